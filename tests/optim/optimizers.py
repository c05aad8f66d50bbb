"""Optimizers by what their update looks at: how each is made of a list of parameters."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


class Own(Optimizer):
    """An optimizer of one's own, by its update: (parameter, gradient, state) -> what is subtracted."""

    def __init__(self, params: Any, update: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.updated(p, p.grad, self.state[p]), alpha=group["lr"])

    def updated(self, p: Any, grad: Tensor, state: Any) -> Tensor:
        return self.update(p, grad, state)  # type: ignore[no-any-return]


def lion(p: Tensor, grad: Tensor, state: Any) -> Tensor:
    """Chen et al. 2023, with a smooth sign."""
    momentum = state.setdefault("momentum", torch.zeros_like(p))
    update = torch.tanh(1e3 * (0.9 * momentum + 0.1 * grad)) + 0.1 * p
    momentum.lerp_(grad, 0.01)
    return update


def lamb(p: Tensor, grad: Tensor, state: Any) -> Tensor:
    """A ratio of norms for each layer (You et al. 2020)."""
    return grad * (p.norm() / (grad.norm() + 1e-6))


def by_rows(p: Tensor, grad: Tensor, state: Any) -> Tensor:
    return grad / (grad.abs().mean(-1, keepdim=True) + 1e-6)


def by_a_norm_later(p: Tensor, grad: Tensor, state: Any) -> Tensor:
    """Element-wise for the first step, and by a norm from the second on."""
    before, state["before"] = state.get("before"), grad.clone()
    return grad if before is None else grad * before.norm()


def if_large(p: Tensor, grad: Tensor, state: Any) -> Tensor:
    """By its norm from 128 rows and columns on."""
    return grad / grad.norm() if p.dim() == 2 and min(p.shape) >= 128 else grad


def shampoo(p: Tensor, grad: Tensor, state: Any) -> Tensor:
    """Gupta et al. 2018: states of the sizes of rows and of columns."""
    for dim in range(p.dim()):
        unfolded = grad.movedim(dim, 0).reshape(p.shape[dim], -1)
        factor = state.setdefault(f"factor {dim}", 1e-3 * torch.eye(p.shape[dim]))
        factor.add_(unfolded @ unfolded.T)
        values, vectors = torch.linalg.eigh(factor)
        root = vectors * values.clamp(min=1e-9).pow(-1 / (2 * p.dim())) @ vectors.T
        grad = (root @ unfolded).reshape(grad.movedim(dim, 0).shape).movedim(0, dim)
    return grad


class Counting(Own):
    """Divides by the number of its steps, which it keeps in all the places that there are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, by_rows)
        self.table, self.tensor = {"steps": 0}, torch.zeros(())
        self.param_groups[0]["past"] = []

    def step(self, closure: Any = None) -> None:
        self.number = getattr(self, "number", 0) + 1
        self.table["steps"] += 1
        self.tensor += 1
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        for group in self.param_groups:
            group["past"].append(0.0)
        super().step()

    def updated(self, p: Any, grad: Tensor, state: Any) -> Tensor:
        steps = self.number + self.table["steps"] + self.tensor + self.state["all"]["steps"]
        return super().updated(p, grad, state) / (steps + len(self.param_groups[0]["past"]))


class Rated(Own):
    """Momentum at rates that are kept in all the ways there are, and counts in two of them."""

    def __init__(self, params: Any, whole: bool = False) -> None:
        super().__init__(params, None)
        self.whole, self.counts = whole, dict[Any, int]()

    def updated(self, p: Any, grad: Tensor, state: Any) -> Tensor:
        mine: Any = self
        rate = p.rate * mine.rates[p] * mine.of_ids[id(p)] * mine.halved(p)
        p.seen = getattr(p, "seen", 0) + 1
        self.counts[p] = self.counts.get(p, 0) + 1
        momentum = state.setdefault("momentum", torch.zeros_like(p)).lerp_(grad, 0.5)
        step: Tensor = rate * momentum / (p.seen + self.counts[p] + (p in mine.some))
        return step / momentum.norm() if self.whole else step


def rated(params: Iterable[Any], whole: bool = False) -> Optimizer:
    every = list(params)
    for number, p in enumerate(every):
        p.rate = (2.0, 0.0, 1.0)[number % 3]
    made: Any = Rated(every, whole)
    made.rates = {p: 1.0 + number for number, p in enumerate(every)}
    made.of_ids = {id(p): 3.0 - number / 2 for number, p in enumerate(every)}
    made.halved = lambda p, first=every[0]: 0.5 if p is first else 1.0
    made.some = {p for p in every if p.rate > 1}
    return made  # type: ignore[no-any-return]


class Looking(torch.optim.SGD):
    """SGD that divides each gradient by a norm: of nothing ("element"), of its parameter
    ("parameter"), or of all parameters ("all"), as each group says. `adds`: over all ranks.
    """

    def __init__(
        self, params: Any, lr: float = 0.1, looks_at: str = "element", adds: bool = False
    ) -> None:
        super().__init__(params, lr=lr)
        self.adds, self.defaults["looks_at"] = adds, looks_at
        for group in self.param_groups:
            group.setdefault("looks_at", looks_at)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        every = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norms = {p: p.grad.norm() for p in every}
        for norm in norms.values() if self.adds else ():
            torch.distributed.all_reduce(norm)
        total = sum(norms.values(), torch.zeros(()))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and group["looks_at"] != "element":
                    p.grad = p.grad / (norms[p] if group["looks_at"] == "parameter" else total)
        super().step()
        return loss


def looking(params: Iterable[nn.Parameter], of_matrices: str) -> Optimizer:
    """Vectors are stepped by their elements, matrices by a norm of `of_matrices`."""
    kinds: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for p in params:
        kinds[p.dim() > 1].append(p)
    made = Looking([{"params": kinds[0]}])
    made.add_param_group({"params": kinds[1], "looks_at": of_matrices})
    return made


# -- optimizers that hold others -------------------------------------------------------------------


class Holding(Optimizer):
    """Steps those that it holds, at every `every`-th call. `hidden`: where Onefold does not look."""

    def __init__(self, *held: Optimizer, every: int = 1, hidden: bool = False) -> None:
        self.every, self.calls = every, 0
        self.held = [each.step for each in held] if hidden else held
        super().__init__([group for each in held for group in each.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for each in self.held if self.calls % self.every == 0 else ():
            each.step() if isinstance(each, Optimizer) else each()


def adam_and(other: Callable[[Any], Optimizer]) -> Make:
    """Two for parameters of one model, `other` for its matrices."""

    def make(params: Iterable[nn.Parameter]) -> Optimizer:
        every = list(params)
        rest = torch.optim.Adam([p for p in every if p.dim() != 2], lr=0.01, eps=1e-4)
        return Holding(other([p for p in every if p.dim() == 2]), rest)

    return make


class Beside(Own):
    """Steps matrices by their norms, and the rest by another optimizer that it holds."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        every = list(params)
        super().__init__([p for p in every if p.dim() == 2], lamb)
        self.rest = torch.optim.AdamW([p for p in every if p.dim() != 2], lr=0.05)

    def step(self, closure: Any = None) -> None:
        super().step()
        self.rest.step()


class Listed(Optimizer):
    """Steps a list of its own. Its constructor needs more than its defaults tell."""

    def __init__(self, params: Iterable[nn.Parameter], name: str) -> None:
        self.every = list(params)
        super().__init__(self.every, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.every:
            if p.grad is not None:
                p.data.sub_(p.grad, alpha=0.05)


# -- the tables ------------------------------------------------------------------------------------


def packaged(package: str, name: str, **options: Any) -> Make:
    """One of a library that people install, in its mode for training if it has modes."""

    def make(params: Any) -> Optimizer:
        optimizer: Any = getattr(importlib.import_module(package), name)(params, **options)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer  # type: ignore[no-any-return]

    return make


def of_torch(name: str, **options: Any) -> Make:
    return lambda params: getattr(torch.optim, name)(params, **options)


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def muon(params: Any) -> Optimizer:
    return torch.optim.Muon(params, lr=0.02)


ELEMENTWISE: dict[str, Make] = {
    "SGD": of_torch("SGD", lr=0.1),
    "SGD, Nesterov": of_torch("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, dampened": of_torch("SGD", lr=0.001, momentum=0.5, dampening=0.3, maximize=True),
    "Adam, AMSGrad": of_torch("Adam", lr=0.01, amsgrad=True, weight_decay=0.1, eps=1e-4),
    "AdamW": of_torch("AdamW", lr=0.01, eps=1e-4),
    "AdamW, foreach": of_torch("AdamW", lr=0.01, eps=1e-4, foreach=True),
    "AdamW, fused": of_torch("AdamW", lr=0.01, eps=1e-4, fused=True),
    "Adamax": of_torch("Adamax", lr=0.01, eps=1e-4),
    "NAdam": of_torch("NAdam", lr=0.01, eps=1e-4, momentum_decay=0.01),
    "RAdam": of_torch("RAdam", lr=0.01, eps=1e-4),
    "RMSprop": of_torch("RMSprop", lr=0.01, centered=True, momentum=0.5, eps=1e-3),
    "Adagrad": of_torch("Adagrad", lr=0.05, lr_decay=0.1, eps=1e-4),
    "Adadelta": of_torch("Adadelta", lr=1.0, eps=1e-4),
    "ASGD": of_torch("ASGD", lr=0.05),
    "Rprop": of_torch("Rprop", lr=0.01),
    "Lion of one's own": lambda p: Own(p, lion),
    "rates kept by parameters": rated,
    "Lion of lion-pytorch": packaged("lion_pytorch", "Lion", lr=0.003),
    "AdamW of schedulefree": packaged("schedulefree", "AdamWScheduleFree", lr=0.01, eps=1e-4),
    "SGD of schedulefree": packaged("schedulefree", "SGDScheduleFree", lr=0.1),
    "Adam and SGD inside another": adam_and(sgd),
    "every second step of another": lambda p: Holding(sgd(p), every=2),
}
WHOLE: dict[str, Make] = {
    "Adafactor": of_torch("Adafactor", lr=0.01),
    "Muon inside another": adam_and(muon),
    "Shampoo of one's own": lambda p: Own(p, shampoo),
    "LAMB of one's own": lambda p: Own(p, lamb),
    "rows of one's own": lambda p: Own(p, by_rows),
    "a norm from the second step on": lambda p: Own(p, by_a_norm_later),
    "a norm of large matrices": lambda p: Own(p, if_large),
    "a norm in one group": lambda p: looking(p, "parameter"),
    "steps counted everywhere": Counting,
    "rates kept by parameters": lambda p: rated(p, whole=True),
    **{
        f"{name} of pytorch-optimizer": packaged("pytorch_optimizer", name, lr=0.01)
        for name in ("SOAP", "SPlus", "Shampoo", "RACS", "CAME", "AdaFactor", "Lamb", "LARS")
    },
}
#: No shard can be stepped, and no matrix alone: {name: (how it is made, words of the sentence)}
REFUSED: dict[str, tuple[Make, tuple[str, ...]]] = {
    "LBFGS": (of_torch("LBFGS", lr=0.1, max_iter=2), ("stage 0", "whole=False")),
    "Prodigy": (packaged("prodigyopt", "Prodigy", lr=1.0), ("stage 0", "whole=False")),
    "a norm of each layer": (lambda p: Own(p, lamb), ("stage 0", "whole=True")),
    "a norm of large matrices": (lambda p: Own(p, if_large), ("whole=True",)),
    "a norm of all in one group": (lambda p: looking(p, "all"), ("depends on other elements",)),
    "communication": (lambda p: Looking(p, looks_at="parameter", adds=True), ("communicates",)),
    "a hidden optimizer": (lambda p: Holding(sgd(p), hidden=True), ("also calls that of SGD",)),
    "a list of its own": (lambda p: Listed(p, "x"), ("the model's own parameters",)),
}
