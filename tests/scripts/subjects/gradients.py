"""Gradients changed, looked at and accumulated by hand between backward() and step()."""

# ruff: noqa: E501 (a habit of the tables is one line)

from __future__ import annotations

from typing import Any

import torch

from scripts.loop import Script
from scripts.registry import BITS, EITHER, ROUNDING, habit


def each(change: Any) -> Any:
    def hook(s: Script) -> None:
        for p in s.model.parameters():
            if p.grad is not None:
                change(p)

    return hook


def assign(p: Any, value: Any) -> None:
    p.grad = value


CHANGES = {
    "`p.grad.mul_(0.5)`": lambda p: p.grad.mul_(0.5),
    "`p.grad = p.grad * 0.5`": lambda p: assign(p, p.grad * 0.5),
    "`p.grad.add_(p.data, alpha=0.1)` (decay by hand)": lambda p: p.grad.add_(p.data, alpha=0.1),
    "`p.grad[p.grad.abs() < 1e-2] = 0` (a boolean mask)": lambda p: p.grad.__setitem__(p.grad.abs() < 1e-2, 0),
    "`p.grad.add_(torch.randn_like(p.grad), alpha=0.01)`": lambda p: p.grad.add_(torch.randn_like(p.grad), alpha=0.01),
    "`p.grad = None` for vectors": lambda p: assign(p, None) if p.ndim == 1 else None,
    "`p.grad[1:3] = 0` for matrices": lambda p: p.grad.__setitem__(slice(1, 3), 0) if p.ndim == 2 else None,
    "`p.grad[:, 0] = 0` for matrices": lambda p: p.grad.__setitem__((slice(None), 0), 0) if p.ndim == 2 else None,
    "`p.grad.mul_(mask)` with a mask of the whole's shape": lambda p: p.grad.mul_(torch.arange(p.numel()).view(p.shape) % 2),
    "`p.grad.div_(p.grad.norm() + 1e-3)` (normalized)": lambda p: p.grad.div_(p.grad.norm() + 1e-3),
    "orthogonal gradient, `g - (w·g / w·w) w`": lambda p: p.grad.sub_(p.data * ((p.data * p.grad).sum() / (p.data * p.data).sum().clamp(min=1e-6))),
}  # fmt: skip
_ROUNDS = ("norm", "·")
#: A threshold enlarges what others round; noise of other seeds on the ranks parts DDP's replicas.
_ALONE = ("abs() <", "randn")
_EITHER = ("[:, 0]", "mask of the whole", "boolean mask", "[1:3] =")
for _title, _change in CHANGES.items():
    _expect = ROUNDING if any(word in _title for word in _ROUNDS) else BITS
    _sharded = EITHER if any(word in _title for word in _EITHER) else None
    habit(
        f"all gradients: {_title}",
        "gradients",
        expect=_expect,
        sharded=_sharded,
        composes=not any(word in _title for word in _ALONE),
    )(each(_change))


@habit("shapes and dtypes of gradients: `p.grad.shape == p.shape`", "gradients")
def shapes(s: Script) -> None:
    s.note(
        "shapes",
        [
            (tuple(p.grad.shape), str(p.grad.dtype), p.grad.shape == p.shape, p.grad.numel())
            for p in s.model.parameters()
        ],
    )


@habit("running mean of gradients (Grokfast): `g.mul_(a).add_(p.grad)`; `p.grad += l * g`")
class Grokfast:
    def gradients(self, s: Script) -> None:
        if s.step == 0:
            self.mean = {
                n: p.grad.data.detach()
                for n, p in s.named()
                if p.requires_grad and p.grad is not None
            }
        for n, p in s.named():
            self.mean[n] = self.mean[n] * 0.9 + p.grad.data.detach() * 0.1
            p.grad.data = p.grad.data + self.mean[n] * 2.0


@habit("accumulation by hand: two backward passes, then the step", expect=ROUNDING)
class Accumulate:
    def backward(self, s: Script, loss: Any) -> None:
        (loss / 2).backward()
        (s.cross_entropy(s.next_batch(1)) / 2).backward()


@habit("accumulation under no_sync", expect=ROUNDING)
class NoSync:
    def forward(self, s: Script) -> Any:
        with s.no_sync():
            (s.cross_entropy() / 2).backward()
        return s.cross_entropy(s.next_batch(1)) / 2


@habit("accumulation over steps: step every second batch", expect=ROUNDING)
class EverySecond:
    def zero(self, s: Script) -> None:
        if s.step % 2 == 0:
            s.optimizer.zero_grad()

    def step(self, s: Script) -> None:
        if s.step % 2 == 1:
            s.optimizer.step()
