"""Clipping, norms of gradients and of weights."""

# ruff: noqa: E501 (a habit of the tables is one line)

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from scripts.loop import Script
from scripts.registry import BITS, EITHER, ROUNDING, STALLED, habit


@habit("`torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)`", "gradients", expect=ROUNDING)
def clip(s: Script) -> None:
    s.note("norm", clip_grad_norm_(s.model.parameters(), 0.5).item())


@habit("`clip_grad_value_(model.parameters(), 0.01)`", "gradients")
def clip_value(s: Script) -> None:
    clip_grad_value_(s.model.parameters(), 0.01)


NORMS = {
    "`sum(p.grad.norm() ** 2) ** 0.5`": lambda ps: (sum(p.grad.norm() ** 2 for p in ps) ** 0.5).item(),
    "`torch._foreach_norm([p.grad ...])`": lambda ps: torch.linalg.vector_norm(torch.stack(torch._foreach_norm([p.grad for p in ps]))).item(),
    "`max(p.grad.abs().max())`": lambda ps: max(p.grad.abs().max().item() for p in ps),
    "`np.linalg.norm(p.grad.numpy())`": lambda ps: [float((p.grad.detach().cpu().numpy() ** 2).sum()) for p in ps],
}  # fmt: skip
for _title, _norm in NORMS.items():
    _expect = BITS if _title.startswith("`max") else ROUNDING
    _either = EITHER if "numpy" in _title else None
    habit(f"the gradient's norm: {_title}", "gradients", expect=_expect, sharded=_either)(
        lambda s, f=_norm: s.note("norm", f(s.parameters()))
    )


@habit("norms of rows: `p.norm(dim=1).mean()`", "log", expect=ROUNDING, sharded=EITHER)
@torch.no_grad()
def rows(s: Script) -> None:
    s.note("norm", [p.norm(dim=1).mean().item() for p in s.parameters() if p.ndim == 2])


@habit(
    "the gradient's norm logged by rank 0 only, as DDP allows",
    "gradients",
    expect=ROUNDING,
    sharded=STALLED,
    composes=False,
    options={"stall_timeout": 1.0},
)
def rank_0_only(s: Script) -> None:
    if s.rank == 0:
        s.note("norm", sum(p.grad.norm().item() for p in s.model.parameters()))
