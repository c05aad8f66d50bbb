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
    "`p.grad /= world_size`": lambda p: p.grad.__itruediv__(2),
    "`p.grad = p.grad * 0.5`": lambda p: assign(p, p.grad * 0.5),
    "`p.grad = p.grad.clone()`": lambda p: assign(p, p.grad.clone()),
    "`p.grad.add_(p.data, alpha=0.1)` (decay by hand)": lambda p: p.grad.add_(p.data, alpha=0.1),
    "`p.grad.add_(p, alpha=0.1)` under no_grad": torch.no_grad()(lambda p: p.grad.add_(p, alpha=0.1)),
    "`torch.nan_to_num(p.grad, out=p.grad)`": lambda p: torch.nan_to_num(p.grad, nan=0.0, posinf=0.0, neginf=0.0, out=p.grad),
    "`p.grad[p.grad.abs() < 1e-2] = 0` (a boolean mask)": lambda p: p.grad.__setitem__(p.grad.abs() < 1e-2, 0),
    "`p.grad = torch.where(p.grad.abs() > 1e-2, p.grad, 0)`": lambda p: assign(p, torch.where(p.grad.abs() > 1e-2, p.grad, torch.zeros_like(p.grad))),
    "`p.grad.add_(torch.randn_like(p.grad), alpha=0.01)`": lambda p: p.grad.add_(torch.randn_like(p.grad), alpha=0.01),
    "`p.grad += torch.randn(p.shape) * 0.01`": lambda p: p.grad.__iadd__(torch.randn(p.shape) * 0.01),
    "`p.grad = None` for vectors": lambda p: assign(p, None) if p.ndim == 1 else None,
    "`p.grad = torch.zeros(p.shape)` for vectors": lambda p: assign(p, torch.zeros(p.shape)) if p.ndim == 1 else None,
    "`p.grad.data = p.grad.data * 0.5`": lambda p: p.grad.__setattr__("data", p.grad.data * 0.5),
    "`p.grad.flatten()[::2] = 0`": lambda p: p.grad.view(-1)[::2].zero_(),
    "`p.grad[1:3] = 0` for matrices": lambda p: p.grad.__setitem__(slice(1, 3), 0) if p.ndim == 2 else None,
    "`p.grad[:, 0] = 0` for matrices": lambda p: p.grad.__setitem__((slice(None), 0), 0) if p.ndim == 2 else None,
    "`p.grad[torch.tensor([0, 2])] = 0` for matrices": lambda p: p.grad.__setitem__(torch.tensor([0, 2]), 0) if p.ndim == 2 else None,
    "`p.grad.mul_(mask)` with a mask of the whole's shape": lambda p: p.grad.mul_(torch.arange(p.numel()).view(p.shape) % 2),
    "`p.grad.mul_(scale[:, None])` for rows": lambda p: p.grad.mul_(torch.arange(p.shape[0]).view(-1, 1) / 4) if p.ndim == 2 else None,
    "`p.grad.sub_(p.grad.mean())`": lambda p: p.grad.sub_(p.grad.mean()),
    "`p.grad.div_(p.grad.norm() + 1e-3)` (normalized)": lambda p: p.grad.div_(p.grad.norm() + 1e-3),
    "gradient centralization, `g.add_(-g.mean(dim=1, keepdim=True))`": lambda p: p.grad.add_(-p.grad.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True)) if p.grad.dim() > 1 else None,
    "top-k by `torch.topk(p.grad.abs().view(-1), k)`": lambda p: p.grad.mul_(p.grad.abs() >= torch.topk(p.grad.abs().view(-1), 3).values[-1]),
    "orthogonal gradient, `g - (w·g / w·w) w`": lambda p: p.grad.sub_(p.data * ((p.data * p.grad).sum() / (p.data * p.data).sum().clamp(min=1e-6))),
}  # fmt: skip
_ROUNDS = ("mean", "norm", "std", "·", "dot", "topk")
_EITHER = (
    "[:, 0]",
    "::2",
    "torch.tensor([0",
    "mask of the whole",
    "scale[",
    "centralization",
    "topk",
    "torch.randn(p.shape)",
    "torch.zeros(p.shape)",
    "boolean mask",
    "dot(",
    "[1:3] =",
)
for _title, _change in CHANGES.items():
    _expect = ROUNDING if any(word in _title for word in _ROUNDS) else BITS
    _sharded = EITHER if any(word in _title for word in _EITHER) else None
    habit(f"all gradients: {_title}", "gradients", expect=_expect, sharded=_sharded, composes="sign" not in _title and "topk" not in _title and "abs() <" not in _title and "abs() >" not in _title and "bfloat16" not in _title)(each(_change))  # fmt: skip


@habit("shapes and dtypes of gradients: `p.grad.shape == p.shape`", "gradients")
def shapes(s: Script) -> None:
    s.note(
        "shapes",
        [
            (tuple(p.grad.shape), str(p.grad.dtype), p.grad.shape == p.shape, p.grad.numel())
            for p in s.model.parameters()
        ],
    )


@habit("a histogram of each gradient: `torch.histc(p.grad, 5)`", "gradients", sharded=EITHER)
def histogram(s: Script) -> None:
    s.note("histogram", [torch.histc(p.grad.detach(), 5).tolist() for p in s.model.parameters()])


@habit(
    "cosine to the last gradient: `F.cosine_similarity(g.flatten(), last.flatten(), dim=0)`",
    expect=ROUNDING,
    sharded=EITHER,
)
class Cosine:
    def gradients(self, s: Script) -> None:
        now = {n: p.grad.detach().clone() for n, p in s.named()}
        if s.step:
            s.note(
                "cosine",
                [
                    torch.nn.functional.cosine_similarity(
                        now[n].flatten(), self.last[n].flatten(), dim=0
                    ).item()
                    for n in now
                ],
            )
        self.last = now


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


@habit("gradients saved, zeroed, second loss, added back (PCGrad-like)", expect=ROUNDING)
class Conflicting:
    def backward(self, s: Script, loss: Any) -> None:
        loss.backward()
        first = [p.grad.clone() for p in s.model.parameters()]
        s.optimizer.zero_grad()
        s.cross_entropy(s.next_batch(1)).backward()
        for p, g in zip(s.model.parameters(), first, strict=True):
            dot = (p.grad * g).sum()
            p.grad.add_(g - torch.clamp(dot, max=0.0) / (g * g).sum().clamp(min=1e-8) * g)


@habit("`torch._foreach_mul_([p.grad ...], 0.5)`", "gradients")
def foreach(s: Script) -> None:
    torch._foreach_mul_([p.grad for p in s.model.parameters()], 0.5)


@habit("`copy.deepcopy(p.grad)` kept as a snapshot", sharded=EITHER)
class CopyOfGrad:
    def gradients(self, s: Script) -> None:
        import copy

        kept = [copy.deepcopy(p.grad) for p in s.model.parameters()]
        s.optimizer.zero_grad()
        for p, g in zip(s.model.parameters(), kept, strict=True):
            p.grad = g
