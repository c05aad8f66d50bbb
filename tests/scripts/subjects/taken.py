"""Weights that others take: Functions, TorchScript, compiled code, custom operators, checkpoints'
arguments, hooks of a backward pass.

Each gets `head.weight` in the forward pass of a model that never calls `head`, which is a unit of
its own; or a weight of another block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scripts.loop import Script
from scripts.registry import EITHER, REFUSED, ROUNDING, habit
from scripts.subjects.kinds import number
from zoo import features_of

WIDTH, WORDS = 8, 48


def by_weight(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Saves(torch.autograd.Function):
    """x @ weight.t(), with the weight saved for backward, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, by_weight(grad, x)


class Keeps(torch.autograd.Function):
    """The weight is kept as an attribute instead of saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, by_weight(grad, x)


class GradientInForward(torch.autograd.Function):
    """The mean square of x @ weight.t(), with gradients computed in the forward pass (Liger)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight.t()
        g = 2 * y / y.numel()
        ctx.save_for_backward(g @ weight, by_weight(g, x))
        return y.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        dx, dw = ctx.saved_tensors
        return grad * dx, grad * dw


@torch.library.custom_op("onefold_tests::product", mutates_args=())
def operator(x: Tensor, weight: Tensor) -> Tensor:
    # What a kernel in C++ or Triton sees: the memory at the tensor's address, by its strides
    return x @ torch.from_numpy(weight.detach().numpy()).t()


@operator.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _backward(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return grad @ weight, by_weight(grad, x)


operator.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x) @ weight.t()


def hooked(y: Tensor, weight: Tensor) -> Tensor:
    y.register_hook(lambda grad: grad * (1 + weight.detach().square().mean()))
    return y


def kept(x: Tensor, module: nn.Module) -> Tensor:
    first: list[Any] = module.__dict__.setdefault("kept", [])
    first or first.append(module.weight)
    return F.linear(x, first[0]) * (1 + first[0].square().mean())


CONSUMERS: dict[str, Any] = {
    "a Function": lambda x, m: Saves.apply(x, m.weight),
    "a Function that keeps it": lambda x, m: Keeps.apply(x, m.weight),
    "a Function with its gradient in forward": lambda x, m: GradientInForward.apply(x, m.weight),
    "TorchScript": lambda x, m: torch.jit.script(product)(x, m.weight),
    "a compiled function": lambda x, m: torch.compile(product, backend="aot_eager")(x, m.weight),
    "a custom operator": lambda x, m: operator(x, m.weight),
    "a re-entrant checkpoint's argument": lambda x, m: checkpoint(Saves.apply, x, m.weight, use_reentrant=True),
    "a checkpoint's argument": lambda x, m: checkpoint(Saves.apply, x, m.weight, use_reentrant=False),
    "inside a checkpoint": lambda x, m: checkpoint(lambda t: Saves.apply(t, m.weight), x, use_reentrant=False),
    "`F.linear`": lambda x, m: F.linear(x, m.weight),
    "a hook of its output": lambda x, m: hooked(F.linear(x, m.weight), m.weight),
    "kept for the next pass": kept,
}  # fmt: skip


class Model(nn.Module):
    """Blocks and a large head. `take` is given the head, or a layer of the first block within the
    last one.
    """

    def __init__(self, take: Any, of_block: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.take, self.of_block = take, of_block
        self.inputs = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False).requires_grad_(not frozen)
        self.blocks[0].requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = x + block(x)
        module: Any = self.blocks[0][0] if self.of_block else self.head  # type: ignore[index]
        return number(self.take(x, module))


class Taken:
    micro = 1
    make: Any = None

    def build(self) -> nn.Module:
        return type(self).make()

    def batch(self, seed: int) -> Tensor:
        return features_of(seed, 2, 3, WIDTH)

    def optimizer(self, s: Script) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in s.parameters() if p.requires_grad], lr=0.5)

    def forward(self, s: Script) -> Tensor:
        for micro in range(self.micro - 1):
            with s.no_sync():
                s.model(s.next_batch(micro + 1)).backward()
        return s.model(s.batch)

    def gradients(self, s: Script) -> None:
        s.note("norm", nn.utils.clip_grad_norm_(s.parameters(), float("inf")).item())


def taken(title: str, make: Any, micro: int = 1, **more: Any) -> None:
    kind = type("Taken", (Taken,), {"make": staticmethod(make), "micro": micro, "__module__": __name__})  # fmt: skip
    habit(f"a weight taken: {title}", **{"expect": ROUNDING, "one": ROUNDING, "reference": "mean", **more})(kind)  # fmt: skip


for _title, _take in CONSUMERS.items():
    for _of_block in (False, True):
        for _frozen in (False, True):
            taken(f"{_title}, of {'another block' if _of_block else 'a head that is not called'}{', frozen' if _frozen else ''}",
                  lambda take=_take, b=_of_block, f=_frozen: Model(take, b, f), slow=_frozen)  # fmt: skip
for _title in ("a Function", "a Function that keeps it", "TorchScript"):
    taken(f"{_title}, two micro-batches", lambda take=CONSUMERS[_title]: Model(take), micro=2)


class SomeRanks(Model):
    """Only one rank takes the head. (Batches tell ranks apart: the first number is its sign.)"""

    def forward(self, x: Tensor) -> Tensor:
        first, y = x.flatten()[0] > 0, self.inputs(x)
        for block in self.blocks:
            y = y + block(y)
        return number(Saves.apply(y, self.head.weight) if first else y)


taken("by one rank only", lambda: SomeRanks(None))


# -- of other models, and outside a pass -----------------------------------------------------------


class Teacher(torch.autograd.Function):
    """The mean square of the difference of two heads' outputs; reads both weights in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, student: Tensor, teacher: Tensor) -> Tensor:
        ctx.save_for_backward(x, student, teacher)
        return (x @ student.t() - x @ teacher.t()).square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, student, teacher = ctx.saved_tensors
        d = x @ student.t() - x @ teacher.t()
        d = 2 * d * grad / d.numel()
        return d @ student - d @ teacher, by_weight(d, x), -by_weight(d, x)


class Student(Model):
    """Takes the head of another model in its forward pass, before a pass of that model."""

    def forward(self, x: Tensor) -> Tensor:
        (other,) = self.others
        for block in self.blocks:
            x = x + block(x)
        weight = other.head.weight
        with torch.no_grad():
            other(x)
        return Teacher.apply(x, self.head.weight, weight)  # type: ignore[no-any-return]


class Distilled(Taken):
    trains = False

    def build(self) -> nn.Module:
        return Student(CONSUMERS["`F.linear`"])

    def after(self, s: Script) -> None:
        torch.manual_seed(4)
        other = Model(CONSUMERS["`F.linear`"]).requires_grad_(self.trains)
        self.other = s.wrap(other)
        s.module.others = [self.other]  # in a list: the other model is no part of this one
        self.step_other = torch.optim.SGD(self.other.parameters(), lr=0.5)

    def weights(self, s: Script) -> None:
        if self.trains:
            s.world.reduce(self.other)
            self.step_other.step()
            self.step_other.zero_grad()

    def end(self, s: Script) -> None:
        with torch.no_grad():
            s.note("theirs", self.other.head.weight.norm().item())


for _trains in (False, True):
    # Without gradients nothing tells at stage 0, where its masters are whole
    habit(
        f"a weight taken: the head of another sharded model{', which trains' if _trains else ''}",
        zero=REFUSED if _trains else ROUNDING,
        sharded=REFUSED,
        one=EITHER,
        reference="mean",
    )(type("Distilled", (Distilled,), {"trains": _trains, "__module__": __name__}))


class Outside(Taken):
    """The weight goes to a Function after the pass, as it is or as a clone."""

    clone = False

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, s: Script) -> Tensor:
        weight = s.module[1].weight
        return number(Saves.apply(s.model(s.batch), weight.clone() if self.clone else weight))


habit("a weight taken: behind a pass, as it is", zero=REFUSED, sharded=REFUSED, one=EITHER, reference="mean")(Outside)  # fmt: skip
habit("a weight taken: behind a pass, as a clone", expect=ROUNDING, reference="mean")(
    type("Cloned", (Outside,), {"clone": True, "__module__": __name__})
)


# -- by code of a backward pass --------------------------------------------------------------------


class Own(nn.Module):
    """A linear layer with a backward of its own, which reads the module's weight again."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight, self)  # type: ignore[no-any-return]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: Own) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        module.seen.append(f"{weight.dtype}")
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        weight, (x,) = ctx.module.weight, ctx.saved_tensors
        ctx.module.seen.append(f"{weight.dtype}")
        return grad.to(weight.dtype) @ weight, by_weight(grad, x), None


def of_own() -> nn.Module:
    return nn.Sequential(Own(WIDTH, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), Own(7, 3))


@habit("a weight taken: read again by the backward of a Function", expect=ROUNDING, units=(Own,), reference="mean")  # fmt: skip
class ReadInBackward(Taken):
    make = of_own

    def forward(self, s: Script) -> Tensor:
        return number(s.model(s.batch).float())

    def log(self, s: Script) -> None:
        seen = s.module[0].seen + s.module[4].seen
        s.note("one dtype", len(set(seen)))


habit("a weight taken: read again by the backward of a Function, in bf16", expect=ROUNDING, one=ROUNDING, units=(Own,), reference="mean",
      options={"precision": "bf16"}, rtol=5e-2, atol=5e-3, alike=True)(
    type("InBf16", (ReadInBackward,), {"gradients": lambda self, s: None, "__module__": __name__})
)  # fmt: skip
