"""Clipping, norms of gradients and of weights."""

# ruff: noqa: E501 (a habit of the tables is one line)

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from scripts.loop import Script
from scripts.registry import BITS, EITHER, ROUNDING, STALLED, habit


@habit("`torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)`", "gradients", expect=ROUNDING)
def clip(s: Script) -> None:
    s.note("norm", clip_grad_norm_(s.model.parameters(), 0.5).item())


@habit("`clip_grad_norm_(..., norm_type=inf)`", "gradients", expect=ROUNDING)
def clip_inf(s: Script) -> None:
    s.note("norm", clip_grad_norm_(s.model.parameters(), 0.05, norm_type=float("inf")).item())


@habit(
    "`clip_grad_norm_(..., foreach=True, error_if_nonfinite=True)`", "gradients", expect=ROUNDING
)
def clip_strict(s: Script) -> None:
    clip_grad_norm_(s.parameters(), 0.5, foreach=True, error_if_nonfinite=True)


@habit("`clip_grad_value_(model.parameters(), 0.01)`", "gradients")
def clip_value(s: Script) -> None:
    clip_grad_value_(s.model.parameters(), 0.01)


@habit("`get_total_norm([p.grad ...])` and `clip_grads_with_norm_`", "gradients", expect=ROUNDING)
def total(s: Script) -> None:
    norm = get_total_norm([p.grad for p in s.model.parameters() if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(s.model.parameters(), 0.5, norm)
    s.note("norm", norm.item())


NORMS = {
    "`sum(p.grad.norm() ** 2) ** 0.5`": lambda ps: (sum(p.grad.norm() ** 2 for p in ps) ** 0.5).item(),
    "`torch._foreach_norm([p.grad ...])`": lambda ps: torch.linalg.vector_norm(torch.stack(torch._foreach_norm([p.grad for p in ps]))).item(),
    "`max(p.grad.abs().max())`": lambda ps: max(p.grad.abs().max().item() for p in ps),
    "`torch.cat([p.grad.view(-1) ...]).norm()`": lambda ps: torch.cat([p.grad.view(-1) for p in ps]).norm().item(),
    "`np.linalg.norm(p.grad.numpy())`": lambda ps: [float((p.grad.detach().cpu().numpy() ** 2).sum()) for p in ps],
}  # fmt: skip
for _title, _norm in NORMS.items():
    _expect = BITS if _title.startswith("`max") else ROUNDING
    _either = EITHER if "cat" in _title or "numpy" in _title else None
    habit(f"the gradient's norm: {_title}", "gradients", expect=_expect, sharded=_either)(
        lambda s, f=_norm: s.note("norm", f(s.parameters()))
    )


@habit(
    "adaptive clipping by rows (NFNets: `x.norm(2, dim=1, keepdim=True)`)",
    "gradients",
    expect=ROUNDING,
    sharded=EITHER,
)
@torch.no_grad()
def agc_rows(s: Script) -> None:
    for p in s.model.parameters():
        if p.ndim < 2:
            continue
        most = p.norm(2, dim=1, keepdim=True).clamp_(min=1e-3) * 0.05
        norm = p.grad.norm(2, dim=1, keepdim=True)
        p.grad.copy_(torch.where(norm < most, p.grad, p.grad * (most / norm.clamp(min=1e-6))))


WEIGHTS = {
    "the Frobenius norm of matrices, `torch.linalg.matrix_norm(p)`": lambda ps: [torch.linalg.matrix_norm(p).item() for p in ps if p.ndim == 2],
    "singular values, `torch.linalg.svdvals(p)`": lambda ps: [torch.linalg.svdvals(p)[0].item() for p in ps if p.ndim == 2],
    "norms of rows, `p.norm(dim=1).mean()`": lambda ps: [p.norm(dim=1).mean().item() for p in ps if p.ndim == 2],
}  # fmt: skip
for _title, _norm in WEIGHTS.items():
    _either = EITHER if any(w in _title for w in ("svd", "rows", "matrix_norm")) else None

    def _note(s: Script, f: object = _norm) -> None:
        with torch.no_grad():
            s.note("norm", f(s.parameters()))  # type: ignore[operator]

    habit(
        f"the weights' norm: {_title}",
        "log" if "ratio" not in _title else "gradients",
        expect=ROUNDING,
        sharded=_either,
    )(_note)


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
