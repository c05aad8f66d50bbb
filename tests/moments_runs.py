"""Runs whose gradients are the same bits on 1, 2 and 4 ranks, and how two state dicts differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo import features_of


class Net(nn.Module):
    """x (batch, 19) -> (batch, 300). The weights of `blocks` and `leave` are packed, and none ends
    with a block; the rest is too small.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(19, 70)
        self.blocks = nn.ModuleList(nn.Linear(70, 70) for _ in range(2))
        self.leave = nn.Linear(70, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.enter(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.leave(x)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int
) -> list[float]:
    """Every rank has the same batch: sums of 2 or 4 equal gradients, divided by as many, are
    exact.
    """
    losses = []
    for step in range(first, first + steps):
        off = model(features_of(10 * step, 8, 19)) - features_of(5 + step, 8, 300)
        loss = off.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def unlike(found: Any, want: Any, path: str = "", tolerance: float = 0.0) -> list[str]:
    """Where two state dicts differ: keys, types, shapes, dtypes, values."""
    if isinstance(want, torch.Tensor):
        if type(found) is not torch.Tensor:
            return [f"{path}: {type(found).__name__} is no plain tensor"]
        (shape, dtype), (there, of) = (found.shape, found.dtype), (want.shape, want.dtype)
        if (shape, dtype) != (there, of):
            return [f"{path}: {tuple(shape)} {dtype} for {tuple(there)} {of}"]
        if torch.allclose(found, want, rtol=tolerance, atol=tolerance, equal_nan=True):
            return []
        return [f"{path}: values differ by {(found.float() - want.float()).abs().max().item()}"]
    if isinstance(want, (list, tuple)) and isinstance(found, (list, tuple)):
        found, want = dict(enumerate(found)), dict(enumerate(want))
    if not isinstance(want, dict):
        return [] if found == want else [f"{path}: {found} for {want}"]
    if not isinstance(found, dict) or list(found) != list(want):
        return [f"{path}: {found} for keys {list(want)}"]
    return [
        line for key in want for line in unlike(found[key], want[key], f"{path}/{key}", tolerance)
    ]


def close(a: list[float], b: list[float]) -> bool:
    return torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-4)
