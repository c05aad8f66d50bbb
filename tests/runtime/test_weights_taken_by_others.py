"""Code that takes a weight without asking its class how to compute: an autograd Function,
TorchScript, a compiled function, a custom operator, the arguments of a checkpoint.

Each consumer gets `self.head.weight` in the forward pass of the model and never calls `self.head`,
which is a unit of its own; or a weight of another block. Losses, gradients and weights equal DDP's
at every stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.runtime.hooks import is_sharded
from ranks import run_ranks

WIDTH, WORDS = 8, 48


class Saves(torch.autograd.Function):
    """x @ weight.t(), with the weight saved for backward, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Keeps(torch.autograd.Function):
    """The same, with the weight kept as an attribute instead of saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class ReadsAgain(torch.autograd.Function):
    """The same, with a backward that reads the weight through its module into a custom operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        weight = ctx.module.weight
        return operator(grad, weight.t()), grad.flatten(0, -2).t() @ x.flatten(0, -2), None


class GradientInForward(torch.autograd.Function):
    """The mean square of x @ weight.t(), with gradients computed in the forward pass (Liger)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight.t()
        g = 2 * y / y.numel()
        ctx.save_for_backward(g @ weight, g.flatten(0, -2).t() @ x.flatten(0, -2))
        return y.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        dx, dw = ctx.saved_tensors
        return grad * dx, grad * dw


@torch.library.custom_op("onefold_tests::product", mutates_args=())
def operator(x: Tensor, weight: Tensor) -> Tensor:
    # What a kernel in C++ or Triton sees: the memory at the tensor's address, by its strides
    whole = torch.from_numpy(weight.detach().numpy())
    return x @ whole.t()


@operator.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


operator.register_autograd(_backward, setup_context=_setup)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x) @ weight.t()


def scripted(x: Tensor, weight: Tensor) -> Tensor:
    # Compiled here: a function of a module's top level would be compiled in every rank
    return torch.jit.script(product)(x, weight)  # type: ignore[no-any-return]


def traced(x: Tensor, weight: Tensor) -> Tensor:
    like = torch.randn_like(x), torch.randn_like(weight)
    return torch.jit.trace(product, like)(x, weight)  # type: ignore[no-any-return]


def compiled(x: Tensor, weight: Tensor) -> Tensor:
    return torch.compile(product, backend="aot_eager")(x, weight)


Consumer = Callable[[Tensor, nn.Module], Tensor]
CONSUMERS: dict[str, Consumer] = {
    "function": lambda x, m: Saves.apply(x, m.weight),
    "function that keeps it": lambda x, m: Keeps.apply(x, m.weight),
    "function that reads it again": lambda x, m: ReadsAgain.apply(x, m.weight, m),
    "gradient in forward": lambda x, m: GradientInForward.apply(x, m.weight),
    "script": lambda x, m: scripted(x, m.weight),
    "trace": lambda x, m: traced(x, m.weight),
    "compiled": lambda x, m: compiled(x, m.weight),
    "operator": lambda x, m: operator(x, m.weight),
    "re-entrant, argument": lambda x, m: checkpoint(Saves.apply, x, m.weight, use_reentrant=True),
    "non-reentrant, argument": lambda x, m: checkpoint(
        Saves.apply, x, m.weight, use_reentrant=False
    ),
    "re-entrant, inside": lambda x, m: checkpoint(
        lambda t: Saves.apply(t, m.weight), x, use_reentrant=True
    ),
    "non-reentrant, inside": lambda x, m: checkpoint(
        lambda t: Saves.apply(t, m.weight), x, use_reentrant=False
    ),
    "linear": lambda x, m: F.linear(x, m.weight),
    "read, called, used": lambda x, m: _read_called_used(x, m),
    "saved and kept": lambda x, m: Saves.apply(x, m.weight) + Keeps.apply(x, m.weight),
    "hook of its output": lambda x, m: _hooked(F.linear(x, m.weight), m.weight),
    "hook of its input": lambda x, m: F.linear(_hooked(x * 2, m.weight), m.weight),
    "kept for the next pass": lambda x, m: _kept(x, m),
}


def _read_called_used(x: Tensor, module: nn.Module) -> Tensor:
    weight: Any = module.weight
    called = module(x)
    out: Tensor = called + Saves.apply(x, weight)
    return out


def _hooked(y: Tensor, weight: Tensor) -> Tensor:
    y.register_hook(lambda grad: grad * (1 + weight.detach().square().mean()))
    return y


def _kept(x: Tensor, module: nn.Module) -> Tensor:
    first: list[Any] = module.__dict__.setdefault("kept", [])
    first or first.append(module.weight)
    penalty: Tensor = F.linear(x, first[0]) * (1 + first[0].square().mean())
    return penalty


class Model(nn.Module):
    """Blocks and a large head. `consumer` is given the head; `of_block` a linear layer of the first
    block, within the last one.
    """

    def __init__(self, consumer: str, of_block: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.consumer, self.of_block = consumer, of_block
        self.inputs = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if frozen:
            self.head.weight.requires_grad_(False)
            self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = x + block(x)
        take = CONSUMERS[self.consumer]
        module: nn.Module = self.blocks[0][0] if self.of_block else self.head  # type: ignore[index,assignment]
        y = take(x, module)
        return y if y.ndim == 0 else y.square().mean()


def model_of(*given: Any) -> Model:
    torch.manual_seed(3)
    return Model(*given)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(model: nn.Module, rank: int, steps: int = 3, micro: int = 1) -> list[float]:
    """Losses, and the norms of the reduced gradients. A plain model's gradients are averaged over
    the ranks here, as DDP does (which refuses a re-entrant checkpoint's second use of a weight).
    """
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer, sharded = torch.optim.SGD(params, lr=0.5), is_sharded(model)
    out: list[float] = []
    for step in range(steps):
        for m in range(micro):
            waits = sharded and m < micro - 1
            with onefold.no_sync(model) if waits else contextlib.nullcontext():
                loss = model(batch(micro * step + m, rank)) / micro
                loss.backward()
            out.append(loss.item())
        if sharded:
            out.append(float(onefold.clip_grad_norm_(model, float("inf"))))
        else:
            grads = [p.grad for p in params if p.grad is not None]
            for grad in grads:
                torch.distributed.all_reduce(grad)
                grad /= torch.distributed.get_world_size()
            out.append(float(torch.nn.utils.get_total_norm(grads)))
        optimizer.step()
        optimizer.zero_grad()
    return out


def by_stage(consumers: list[str], given: tuple[Any, ...], micro: int = 1) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    found: dict[str, Any] = {}
    for consumer in consumers:
        plain = model_of(consumer, *given)
        expected = trained(plain, rank, micro=micro)
        whole = plain.state_dict()
        for stage in (0, 1, 2, 3):
            recipe = onefold.Recipe.zero(stage, stall_timeout=20.0)
            model = onefold.shard(model_of(consumer, *given), recipe)
            assert any(u.name == "head" for u in onefold.engine_of(model).units)
            losses = trained(model, rank, micro=micro)
            state = onefold.full_state_dict(model)
            off = max((float((state[k] - whole[k]).abs().max()) for k in state), default=0.0)
            found[f"{consumer}, stage {stage}"] = (losses, expected, off)
            units = onefold.engine_of(model).units
            assert stage < 3 or all(u.ungathered for u in units)
    return found


def compared(world: int, *given: Any) -> None:
    for found in run_ranks(world, by_stage, *given):
        for case, (losses, expected, off) in found.items():
            assert losses == pytest.approx(expected, rel=2e-6), case
            assert off < 1e-6, case


@pytest.mark.parametrize("consumer", list(CONSUMERS))
def test_a_head_that_is_not_called_trains_as_under_ddp(consumer: str) -> None:
    compared(2, [consumer], ())


@pytest.mark.parametrize("consumer", list(CONSUMERS))
def test_a_weight_of_another_block_trains_as_under_ddp(consumer: str) -> None:
    compared(2, [consumer], (True,))


def test_frozen_weights_are_whole_for_every_consumer(every: bool) -> None:
    consumers = list(CONSUMERS)[:: 1 if every else 6]
    compared(2, consumers, (False, True))
    compared(2, consumers, (True, True))


class KeepsScale(torch.autograd.Function):
    """x * weight[0], element-wise: a kernel that would read address 0 of a weight that has gone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        by_weight = torch.zeros_like(ctx.weight * 2)
        by_weight[0] = (grad * x).flatten(0, -2).sum(0)
        return grad * ctx.weight[0], by_weight


class Embedded(nn.Module):
    """Looks words up, and keeps the embedding's weight for a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        looked_up = self.words((x.abs() * 10).long().sum(-1) % WORDS)
        return KeepsScale.apply(self.block(looked_up), self.words.weight).square().mean()  # type: ignore[no-any-return]


def embedded() -> dict[str, Any]:
    rank, found = torch.distributed.get_rank(), {}
    for stage in (None, 0, 3):
        torch.manual_seed(5)
        model: nn.Module = Embedded()
        if stage is not None:
            model = onefold.shard(model, onefold.Recipe.zero(stage), units=["words", "block"])
        found[f"stage {stage}"] = trained(model, rank)
    return found


def test_an_embedding_that_is_kept_for_a_backward_pass_is_there_when_it_is_read() -> None:
    for found in run_ranks(2, embedded):
        for losses in found.values():
            assert losses == pytest.approx(found["stage None"], rel=2e-6)


def test_gradients_of_taken_weights_accumulate() -> None:
    compared(2, ["function", "function that keeps it", "script"], (), 2)


def sent_at_stage_3(consumers: list[str]) -> dict[str, int]:
    """Bytes of one step after the order of units is known, by consumer."""
    found = {}
    for consumer in consumers:
        model = onefold.shard(model_of(consumer), onefold.Recipe.zero(3))
        trained(model, 0, steps=2)
        traffic = onefold.engine_of(model).traffic
        traffic.reset()
        trained(model, 0, steps=1)
        found[consumer] = traffic.total()
    return found


def test_a_taken_weight_is_gathered_as_often_as_a_called_one() -> None:
    taken = ["function", "script", "compiled", "operator", "linear"]
    for found in run_ranks(2, sent_at_stage_3, ["read, called, used", *taken]):
        assert len(set(found.values())) == 1, found


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
        by_weight = d.flatten(0, -2).t() @ x.flatten(0, -2)
        return d @ student - d @ teacher, by_weight, -by_weight


class Student(nn.Module):
    """Takes the head of another model in its forward pass, after that model's own pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of("linear")
        self.others: list[Model] = []  # in a list: the other model is no part of this one

    def forward(self, x: Tensor) -> Tensor:
        (other,) = self.others
        for block in self.inner.blocks:
            x = x + block(x)
        weight = other.head.weight
        with torch.no_grad():
            other(x)  # a pass of the other model in between
        return Teacher.apply(x, self.inner.head.weight, weight)  # type: ignore[no-any-return]


def distilled(stage: int | None, trains: bool) -> tuple[list[float], Any]:
    torch.manual_seed(4)
    other: Any = Model("linear")
    other.requires_grad_(trains)
    student: Any = Student()
    if stage is not None:
        student, other = (
            onefold.shard(m, onefold.Recipe.zero(stage, stall_timeout=20.0))
            for m in (student, other)
        )
    student.others.append(other)
    models = [student, other] if trains else [student]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.5)
    losses = []
    for step in range(3):
        loss = student(batch(step, 0))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    if stage is None:
        return losses, other.head.weight.detach().clone()
    assert stage < 3 or all(u.ungathered for u in onefold.engine_of(other).units)
    return losses, (onefold.full_state_dict(other) or {}).get("head.weight")


def distilled_by_stage(trains: bool) -> list[Any]:
    return [distilled(stage, trains) for stage in (None, 0, 1, 2, 3)]


@pytest.mark.parametrize("trains", [False, True])
def test_a_pass_takes_the_head_of_another_sharded_model(trains: bool) -> None:
    for rank, found in enumerate(run_ranks(2, distilled_by_stage, trains)):
        (expected, weight), *rest = found
        for losses, theirs in rest:
            assert losses == pytest.approx(expected, rel=1e-6)
            assert rank or torch.allclose(theirs, weight, atol=1e-7)


class Asks(nn.Module):
    """A pass that reads and sets attributes of a weight of another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.seen: list[Any] = []
        self.freezes = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        grad = self.head.weight.grad
        self.seen.append(
            None if grad is None else (tuple(grad.shape), round(float(grad.norm()), 5))
        )
        if self.freezes:
            self.head.bias.requires_grad_(False)
        weights = {"weight": torch.ones(WORDS, WIDTH)}
        x = self.head(x) + torch.func.functional_call(self.head, weights, (x,))
        # Scripted code has no class to ask, so this is its memory
        return torch.jit.trace(torch.mul, (x, self.head.bias))(x, self.head.bias).square().mean()


def asked(stage: int | None) -> list[Any]:
    torch.manual_seed(5)
    model: Any = Asks()
    if stage is not None:
        model = onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=20.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out: list[Any] = []
    for step in range(4):
        model.freezes = step == 2
        loss = model(batch(step, 0))
        loss.backward()
        out.append(round(loss.item(), 5))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [*out, *model.seen, [p.requires_grad for p in model.parameters()]]


def asked_by_stage() -> list[Any]:
    return [asked(stage) for stage in (None, 0, 1, 2, 3)]


def test_attributes_of_a_taken_weight_are_those_of_the_parameter() -> None:
    for plain, *sharded in run_ranks(2, asked_by_stage):
        assert sharded == [plain] * 4


class Lists(nn.Module):
    """Gives a Function what `parameters()` lists, in the pass or (with `outside`) after it."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.outside = outside
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        (weight,) = self.head.parameters()
        return x if self.outside else Saves.apply(x, weight)  # type: ignore[no-any-return]


def listed(stage: int, outside: bool) -> str:
    model = onefold.shard(Lists(outside), onefold.Recipe.zero(stage, stall_timeout=20.0))
    try:
        y = model(batch(0, 0))
        if outside:
            y = Saves.apply(y, model.head.weight)
        y.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("outside", [False, True])
def test_a_function_that_is_given_the_parameter_itself_is_refused(outside: bool) -> None:
    for said in run_ranks(2, listed, 0, outside):
        assert "'head.weight' was given to an autograd Function" in said
    for stage in (1, 2, 3):
        for said in run_ranks(2, listed, stage, outside):
            assert said != "trained"


def cloned(stage: int | None) -> float:
    torch.manual_seed(6)
    model: Any = Lists(True)
    if stage is not None:
        model = onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=20.0))
    Saves.apply(model(batch(0, 0)), model.head.weight.clone()).sum().backward()
    if stage is not None:
        return round(float(onefold.clip_grad_norm_(model, 9e9)), 4)
    return round(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])), 4)


def test_outside_a_pass_a_function_is_given_a_clone() -> None:
    every = [run_ranks(2, cloned, stage) for stage in (None, 0, 1, 2, 3)]
    assert all(norm == every[0][0] for of_stage in every for norm in of_stage)


class SomeRanks(Model):
    """Only some ranks take the head in a step."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = x + block(x)
        if torch.distributed.get_rank() == 1:
            return x.square().mean()
        return Saves.apply(x, self.head.weight).square().mean()  # type: ignore[no-any-return]


def some_ranks(stage: int) -> list[float]:
    torch.manual_seed(3)
    model = onefold.shard(SomeRanks("linear"), onefold.Recipe.zero(stage, stall_timeout=20.0))
    rank = torch.distributed.get_rank()
    return [x for i, x in enumerate(trained(model, rank)) if i % 2]


def test_ranks_that_do_not_take_the_weight_take_part() -> None:
    every = [run_ranks(2, some_ranks, stage) for stage in (0, 1, 2, 3)]
    assert all(norms == every[0][0] for of_stage in every for norms in of_stage)
    assert len(set(every[0][0])) == 3
