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
    model: Any,
    optimizer: torch.optim.Optimizer,
    first: int,
    steps: int,
    accumulate: int = 1,
    clip: float = 0.0,
) -> list[float]:
    """Every rank has the same batch: sums of 2 or 4 equal gradients, divided by as many, are
    exact.
    """
    import onefold

    losses = []
    for step in range(first, first + steps):
        for micro in range(accumulate):
            loss = (
                (model(features_of(10 * step + micro, 8, 19)) - features_of(5 + step, 8, 300))
                .square()
                .mean()
            )
            if micro < accumulate - 1:
                with onefold.no_sync(model):
                    loss.backward()
            else:
                loss.backward()
        if clip:
            onefold.clip_grad_norm_(model, clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def unlike(found: Any, want: Any, path: str = "", tolerance: float = 0.0) -> list[str]:
    """Where two state dicts differ: keys, types, shapes, dtypes, values."""
    if isinstance(want, torch.Tensor):
        if not isinstance(found, torch.Tensor) or type(found) is not torch.Tensor:
            return [f"{path}: {type(found).__name__} is no plain tensor"]
        if (found.shape, found.dtype) != (want.shape, want.dtype):
            return [
                f"{path}: {tuple(found.shape)} {found.dtype} for {tuple(want.shape)} {want.dtype}"
            ]
        same = (
            torch.equal(found, want)
            if not tolerance
            else torch.allclose(found, want, rtol=tolerance, atol=tolerance)
        )
        return (
            []
            if same
            else [f"{path}: values differ by {(found.float() - want.float()).abs().max().item()}"]
        )
    if isinstance(want, dict):
        if not isinstance(found, dict) or list(found) != list(want):
            return [f"{path}: keys {list(found)} for {list(want)}"]
        return [
            line
            for key in want
            for line in unlike(found[key], want[key], f"{path}/{key}", tolerance)
        ]
    if isinstance(want, (list, tuple)):
        if len(found) != len(want):
            return [f"{path}: {len(found)} for {len(want)}"]
        return [
            line
            for i, (a, b) in enumerate(zip(found, want, strict=True))
            for line in unlike(a, b, f"{path}/{i}", tolerance)
        ]
    return [] if found == want else [f"{path}: {found} for {want}"]


def close(a: list[float], b: list[float]) -> bool:
    return torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-4)
