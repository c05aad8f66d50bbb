"""`torch.autograd.grad`, `functional_call`, penalties, gradient hooks, modules that return weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from scripts.loop import Script
from scripts.registry import EITHER, ROUNDING, habit
from scripts.subjects.kinds import number, x4
from scripts.subjects.loops import Loop
from zoo import ResidualBlock, TinyGPT, features_of, tokens_of

#: Of rows whose gradients are this rank's own.
LOCAL: dict[str, Any] = {"expect": ROUNDING, "reference": "mean", "rtol": 1e-4, "atol": 1e-6}
on_blocks = partial(habit, units=(ResidualBlock,), alike=True, **LOCAL)


def copied(tensors: Any) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


@on_blocks("`autograd.grad` by parameters, inputs and generators leaves no gradient")
class LocalGradients(Loop):
    def batch(self, seed: int) -> Tensor:
        return x4(seed).requires_grad_()

    def forward(self, s: Script) -> Tensor:
        loss = number(s.model(s.batch))
        wanted = [
            [*s.parameters(), s.batch], s.module.blocks[1].up.weight, (p for p in s.module.leave.parameters()),
        ]  # fmt: skip
        for about in wanted:
            s.note("local", copied(torch.autograd.grad(loss, about, retain_graph=True)))
        s.note("left", [p.grad is None for p in s.parameters()])
        return loss

    def gradients(self, s: Script) -> None:
        s.note("of inputs", s.batch.grad)


class Penalty(Loop):
    """The square of the gradient's norm in the loss, and a pass in between whose gathers use
    buffers again.
    """

    by = "inputs"

    def forward(self, s: Script) -> Tensor:
        x = s.batch.requires_grad_()
        loss = number(s.model(x))
        about = [x] if self.by == "inputs" else s.parameters()
        grads = torch.autograd.grad(loss, about, create_graph=True)
        s.note("grads", copied(grads))
        return loss + number(s.model(x4(100 + s.step))) + sum(g.square().sum() for g in grads)


for _by in ("inputs", "parameters"):
    on_blocks(f"a penalty on the gradient by {_by}", one=EITHER)(
        type("Penalty", (Penalty,), {"by": _by, "__module__": __name__})
    )


@habit("`autograd.grad` through checkpoints and tied weights", **LOCAL)
class OfCheckpoints(Loop):
    def build(self) -> nn.Module:
        return TinyGPT(checkpointing="non-reentrant", tied=True)

    def batch(self, seed: int) -> Tensor:
        return tokens_of(seed)

    def forward(self, s: Script) -> Tensor:
        loss = s.model(s.batch)
        grads = torch.autograd.grad(loss, s.parameters(), retain_graph=True)
        s.note("grads", copied(grads))
        return loss


# -- functional_call -------------------------------------------------------------------------------


@on_blocks("`functional_call` with some tensors of one's own, with all of them, with the model's")
class OwnTensors(Loop):
    def after(self, s: Script) -> None:
        self.own = {
            "blocks.1.up.weight": features_of(7, 20, 10).requires_grad_(),
            "leave.bias": nn.Parameter(features_of(8, 5)),
        }
        self.all = {
            n: features_of(i, *p.shape).requires_grad_() for i, (n, p) in enumerate(s.named())
        }

    def forward(self, s: Script) -> Tensor:
        every = functional_call(s.module, self.all, (s.batch,))
        s.note("all", copied(torch.autograd.grad(number(every), list(self.all.values()))))
        mine = functional_call(s.module, dict(s.named()), (s.batch,))
        return number(functional_call(s.module, self.own, (s.batch,))) + mine.mean()

    def gradients(self, s: Script) -> None:
        s.note("own", copied(t.grad for t in self.own.values()))


class Maml(Loop):
    second_order = True

    def forward(self, s: Script) -> Tensor:
        inner = number(s.model(s.batch))
        grads = torch.autograd.grad(inner, s.parameters(), create_graph=self.second_order)
        fast = {n: p - 0.1 * g for (n, p), g in zip(s.named(), grads, strict=True)}
        s.note("inner", [inner.item(), *copied(grads)])
        return number(functional_call(s.module, fast, (x4(50 + s.rank),)))


for _second in (True, False):
    on_blocks(f"MAML of {'second' if _second else 'first'} order by `functional_call`", one=ROUNDING)(
        type("Maml", (Maml,), {"second_order": _second, "__module__": __name__})
    )  # fmt: skip


# -- modules that return their weights -------------------------------------------------------------


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(features_of(3, 7, 5))

    def forward(self) -> Any:
        return self.weight


class Hands(nn.Module):
    """Hands out weights, whole and in part."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(Table() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        first, second, third = (table() for table in self.tables)
        return {"y": x @ first, "weight": second, "view": [third[1:3], third.t()]}


@habit("a module that returns its weight, and views of it", alike=True, **LOCAL)
class Returned(Loop):
    def build(self) -> nn.Module:
        return Hands()

    def forward(self, s: Script) -> Tensor:
        out = s.module(s.batch) if type(s.world).__name__ == "DDP" else s.model(s.batch)
        with torch.no_grad():
            again = s.model(x4(s.step))  # its gathers use buffers again
        part, (view, turned) = s.module.tables[1](), out["view"]
        s.note("seen", copied([out["weight"], view, turned, part, again["weight"], *again["view"]]))
        both = number(out["y"]) + out["weight"].square().sum()
        return both + (view @ turned[:, :2]).sum() + part.sum()


# -- gradient hooks --------------------------------------------------------------------------------

#: What is hooked, in a GPT whose head is its embedding.
HOOKED = ("tokens.weight", "blocks.1.mlp.0.weight", "blocks.2.norm_1.bias", "norm.weight")


class Hooks(OfCheckpoints):
    """Both kinds of hooks: what they see is noted, half of it is changed; they go after two steps."""

    when, checkpointing = "after", "none"

    def build(self) -> nn.Module:
        return TinyGPT(tied=True, checkpointing=self.checkpointing)  # type: ignore[arg-type]

    def before(self, s: Script) -> None:
        if self.when == "before":
            self.register(s)

    def after(self, s: Script) -> None:
        if self.when == "after":
            self.register(s)

    def register(self, s: Script) -> None:
        def hook(grad: Tensor, name: str) -> Tensor | None:
            s.note(f"hook of {name}", grad)
            return grad.clamp(-0.01, 0.01) if "blocks" in name else None

        def behind(param: Any, name: str) -> None:
            assert param.shape == param.grad.shape, "the parameter is whole while its hook runs"
            s.note(f"behind {name}", param.grad.detach())
            if name == "tokens.weight":
                param.grad.mul_(0.5)
            elif name == "norm.weight":  # a penalty by hand reads the whole values
                param.grad = param.grad + 0.1 * param.detach()

        self.handles = []
        for name, p in s.named():
            if name in HOOKED:
                self.handles.append(p.register_hook(partial(hook, name=name)))
                post = p.register_post_accumulate_grad_hook  # type: ignore[attr-defined]
                self.handles.append(post(partial(behind, name=name)))

    def forward(self, s: Script) -> Tensor:
        return s.model(s.batch)

    def log(self, s: Script) -> None:
        for handle in self.handles if s.step == 1 else ():
            handle.remove()


HOOKS: dict[str, Any] = {
    "registered before shard()": {"when": "before"},
    "registered after shard()": {},
    "of a recomputed model": {"checkpointing": "non-reentrant"},
    "of a model recomputed re-entrantly": {"checkpointing": "reentrant"},
}
for _title, _given in HOOKS.items():
    habit(f"gradient hooks see and change the local gradient, {_title}", ddp={"find_unused_parameters": False}, expect=ROUNDING,
          rtol=1e-4, atol=1e-5, alike=True)(type("Hooks", (Hooks,), {**_given, "__module__": __name__}))  # fmt: skip


class HookedInForward(nn.Module):
    """Hooks its own weights in its first forward pass, as transformers does. Of a width whose
    gradient is not put aside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(80, 80)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@habit("a gradient hook registered in a forward pass", units=[nn.Linear], **LOCAL)
class InForward(Loop):
    def build(self) -> nn.Module:
        return HookedInForward()

    def batch(self, seed: int) -> Tensor:
        return features_of(seed, 4, 80)

    def after(self, s: Script) -> None:
        inner, seen = s.module.inner, []
        own = inner.forward

        def double(param: Any) -> None:
            s.note("seen", param.grad.norm().item())
            param.grad.mul_(2.0)

        def forward(x: Tensor) -> Tensor:
            for _, param in inner.named_parameters(recurse=False) if not seen else ():
                seen.append(param.register_post_accumulate_grad_hook(double))
            return own(x)

        inner.forward = forward


# -- parametrized in a pass ------------------------------------------------------------------------


class Wrapped(nn.Module):
    """Puts its frozen weight into a parametrization in each forward pass, and takes it out again, as
    peft's adapters of experts do: torch sets the weight to itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7, bias=False).requires_grad_(False)
        self.added = nn.Parameter(torch.full((7, 7), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        proxy = nn.Identity()
        proxy.forward = lambda weight: weight + self.added  # type: ignore[method-assign]
        parametrize.register_parametrization(self.layer, "weight", proxy)
        try:
            return self.layer(x)
        finally:
            self.layer.parametrizations.weight.original.requires_grad_(False)
            parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=False)


@habit("a frozen weight in a parametrization for each pass", expect=ROUNDING, reference="mean")
class InParametrization(Loop):
    def build(self) -> nn.Module:
        return nn.Sequential(Wrapped(), nn.Linear(7, 3))
