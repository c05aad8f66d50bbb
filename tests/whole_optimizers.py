"""Optimizers whose updates look at whole matrices, as people write them, and a small model for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer


class Words(nn.Module):
    """Embeddings tied to the head, matrices of unequal sizes, a norm, biases, and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(29, 12)
        self.up = nn.Linear(12, 40)
        self.mid = nn.Linear(40, 56, bias=False)
        self.frozen = nn.Linear(56, 56, bias=False).requires_grad_(False)
        self.down = nn.Linear(56, 12, bias=False)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 29, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        x = self.norm(x + self.down(self.frozen(F.gelu(self.mid(F.gelu(self.up(x)))))))
        logits = self.head(x[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def words_of(rank: int, step: int, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 29, (batch, 9), generator=generator, device="cpu")


def is_matrix(name: str, param: torch.Tensor) -> bool:
    return param.dim() == 2 and not name.startswith(("embed", "head"))


class PerTensor(Optimizer):
    """Base of optimizers that go through their parameters one by one."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.02, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group)
        return loss

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lamb(PerTensor):
    """LAMB (You et al., 2020): Adam's update, scaled by a ratio of two norms of the layer."""

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state |= {"step": torch.zeros(()), "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
        state["step"] += 1
        state["m"].lerp_(p.grad, 0.1)
        state["v"].lerp_(p.grad.square(), 0.01)
        update = state["m"] / (state["v"].sqrt() + 1e-4)
        p.sub_(update * (group["lr"] * p.norm() / update.norm().clamp(min=1e-6)))


class Lars(PerTensor):
    """LARS (You et al., 2017): momentum, at a rate of two norms of the layer."""

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad = p.grad * (p.norm() / p.grad.norm().clamp(min=1e-6))
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
        p.sub_(momentum.mul_(0.9).add_(grad, alpha=group["lr"]))


class Shampoo(PerTensor):
    """Shampoo (Gupta et al., 2018), with states of the sizes of rows and of columns."""

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad = p.grad
        for dim in range(p.dim()):
            unfolded = grad.movedim(dim, 0).reshape(p.shape[dim], -1)
            factor = state.setdefault(f"factor {dim}", 1e-3 * torch.eye(p.shape[dim]))
            factor.add_(unfolded @ unfolded.T)
            values, vectors = torch.linalg.eigh(factor)
            root = vectors * values.clamp(min=1e-9).pow(-1 / (2 * p.dim())) @ vectors.T
            grad = (root @ unfolded).reshape(grad.movedim(dim, 0).shape).movedim(0, dim)
        p.sub_(grad, alpha=group["lr"])


class Soap(PerTensor):
    """SOAP-like (Vyas et al., 2024): Adam in a basis that is made anew every second step. The first
    step only looks.
    """

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad = p.grad.reshape(p.shape[0], -1)
        if not state:
            rows, columns = grad.shape
            state |= {"step": 0, "rows": torch.zeros(rows, rows), "basis": torch.eye(rows)}
            state |= {"m": torch.zeros_like(p), "v": torch.zeros(rows, columns)}
        state["step"] += 1
        state["rows"].lerp_(grad @ grad.T, 0.1)
        if state["step"] == 1:
            return
        if state["step"] % 2 == 0:
            state["basis"] = torch.linalg.eigh(state["rows"])[1]
        turned = state["basis"].T @ grad
        state["m"].lerp_(p.grad, 0.1)
        state["v"].lerp_(turned.square(), 0.05)
        update = state["basis"] @ (
            (state["basis"].T @ state["m"].reshape(grad.shape)) / (state["v"].sqrt() + 1e-3)
        )
        p.sub_(update.reshape(p.shape), alpha=group["lr"])


class Dion(PerTensor):
    """Dion (Ahn et al., 2025): momentum, of which a step takes the part of low rank that one iteration
    finds from the last factor, a state of columns x rank. Vectors go by the sign of the momentum.
    """

    RANK = 8

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        momentum.add_(p.grad)
        if p.dim() < 2:
            p.sub_(momentum.sign(), alpha=0.1 * group["lr"])
            momentum.mul_(0.95)
            return
        rows, columns = p.shape
        if "factor" not in state:
            drawn = torch.Generator().manual_seed(p.numel())
            shape = columns, min(self.RANK, rows, columns)
            state["factor"] = torch.randn(shape, generator=drawn, device="cpu")
        left = torch.linalg.qr(momentum @ state["factor"])[0]
        right = momentum.T @ left
        momentum.addmm_(left, right.T, alpha=-0.05)
        state["factor"] = right / (right.norm(dim=0) + 1e-8)
        p.addmm_(left, state["factor"].T, alpha=-group["lr"] * (rows / columns) ** 0.5)


class MuonWithAdam(Optimizer):
    """Muon for some groups and Adam for others, in one optimizer, with a count of its own for each
    group. It steps parameters without a gradient too, as if that were zero.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        groups = list(groups)
        for group in groups:
            assert set(group) == {"params", "use_muon", "lr"}, set(group)
            group["count"] = 0
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                state = self.state[p]
                if group["use_muon"]:
                    assert p.dim() >= 2, "matrices only"
                    momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    momentum.lerp_(grad, 0.05)
                    p.mul_(1 - 0.1 * group["lr"])
                    p.sub_(orthogonal(momentum), alpha=group["lr"])
                else:
                    moments = (
                        state.setdefault("m", torch.zeros_like(p)),
                        state.setdefault("v", torch.zeros_like(p)),
                    )
                    moments[0].lerp_(grad, 0.1)
                    moments[1].lerp_(grad.square(), 0.05)
                    rate = group["lr"] / (1 - 0.9 ** group["count"])
                    p.sub_(moments[0] / (moments[1].sqrt() + 1e-3), alpha=rate)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest orthogonal matrix, by three Newton-Schulz iterations."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ (x.mT @ x)
    return x


Named = Iterable[tuple[str, nn.Parameter]]


def muon_and_adamw(named: Named) -> list[Optimizer]:
    """torch's Muon for matrices and AdamW for the rest."""
    named = list(named)
    return [
        torch.optim.Muon([p for n, p in named if is_matrix(n, p)], lr=0.02),
        torch.optim.AdamW([p for n, p in named if not is_matrix(n, p)], lr=0.01, eps=1e-3),
    ]


def muon_with_adam(named: Named) -> list[Optimizer]:
    named = list(named)
    groups = [
        {"params": [p for n, p in named if is_matrix(n, p)], "use_muon": True, "lr": 0.02},
        {"params": [p for n, p in named if not is_matrix(n, p)], "use_muon": False, "lr": 0.01},
    ]
    return [MuonWithAdam(groups)]


def one(kind: Callable[..., Optimizer], **options: Any) -> Callable[[Named], list[Optimizer]]:
    return lambda named: [kind([p for _, p in named], **options)]


#: {name: what makes the optimizers of the model's named parameters}
MADE: dict[str, Callable[[Named], list[Optimizer]]] = {
    "Muon and AdamW": muon_and_adamw,
    "Muon with Adam": muon_with_adam,
    "Adafactor": one(torch.optim.Adafactor, lr=0.02),
    "LAMB": one(Lamb),
    "LARS": one(Lars),
    "Shampoo": one(Shampoo),
    "SOAP": one(Soap),
    "Dion": one(Dion),
}
