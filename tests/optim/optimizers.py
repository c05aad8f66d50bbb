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
                    p.sub_(self.update(p, p.grad, self.state[p]), alpha=group["lr"])


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
    "Lion of lion-pytorch": packaged("lion_pytorch", "Lion", lr=0.003),
    "AdamW of schedulefree": packaged("schedulefree", "AdamWScheduleFree", lr=0.01, eps=1e-4),
    "SGD of schedulefree": packaged("schedulefree", "SGDScheduleFree", lr=0.1),
}
WHOLE: dict[str, Make] = {
    "Adafactor": of_torch("Adafactor", lr=0.01),
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.01),
    "LAMB of one's own": lambda p: Own(p, lamb),
    "rows of one's own": lambda p: Own(p, by_rows),
    "a norm from the second step on": lambda p: Own(p, by_a_norm_later),
}
#: Their update looks at all parameters together, so that no shard can be stepped.
TOGETHER: dict[str, Make] = {
    "LBFGS": of_torch("LBFGS", lr=0.1, max_iter=2),
    "Prodigy": packaged("prodigyopt", "Prodigy", lr=1.0),
}


class Looking(torch.optim.SGD):
    """SGD that divides each gradient by a norm: of nothing ("element"), of its parameter
    ("parameter"), or of all parameters ("all"), as each group says.
    """

    def __init__(self, params: Any, lr: float = 0.1, looks_at: str = "element") -> None:
        super().__init__(params, lr=lr)
        self.defaults["looks_at"] = looks_at
        for group in self.param_groups:
            group.setdefault("looks_at", looks_at)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        every = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norms = {p: p.grad.norm() for p in every}
        total = sum(norms.values(), torch.zeros(()))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and group["looks_at"] != "element":
                    p.grad = p.grad / (norms[p] if group["looks_at"] == "parameter" else total)
        super().step()
        return loss
