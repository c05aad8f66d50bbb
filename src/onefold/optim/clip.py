"""Clipping by the global norm over gradients that are divided among the ranks.

[Note: the norm's order] Each rank takes the norms of the parts of its own intervals, at every stage (at stage 0 too, where it holds
all gradients), adds their powers in fp64, and the ranks' sums are added in rank order. The norm therefore has the same bits at
every stage, and costs one pass over 1/N of the gradients and one exchange of 8 bytes.
"""

from __future__ import annotations

import math
import numbers

import torch

from onefold.comm import Place
from onefold.layout import overlap
from onefold.runtime.engine import Engine
from onefold.runtime.parameter import whole_sight


def own_gradients(engine: Engine) -> list[torch.Tensor]:
    """The parts of all gradients that this rank accounts for: each element of the model on exactly one rank."""
    parts = []
    for entry in engine.entries:
        grad = entry.param.grad
        if grad is None:
            continue
        flat = entry.flat
        if flat.whole_master and not flat.passive:
            a, b = overlap((entry.slot.start, entry.slot.end), flat.interval)
            grad = grad.reshape(-1)[a - entry.slot.start : b - entry.slot.start]
        if grad.numel():
            parts.append(grad)
    return parts


def clip_grad_norm(engine: Engine, max_norm: float, norm_type: float) -> torch.Tensor:
    """See `onefold.clip_grad_norm_`.

    Raises:
        ValueError: before anything is exchanged: `max_norm` is no number from 0 up, or `norm_type` is none above 0.
    """
    limit, p = _number(max_norm), _number(norm_type)
    if limit is None or not limit >= 0:
        raise ValueError(f"max_norm={max_norm!r}: expected a number, 0 or more; float('inf') measures without clipping.")
    if p is None or not p > 0:
        raise ValueError(f"norm_type={norm_type!r}: expected a number above 0, or inf.")
    with whole_sight(), torch.no_grad():
        engine.optimizer_is_stepping()
        total = _total_norm(engine, own_gradients(engine), p)
        scale = (limit / (total + 1e-6)).clamp(max=1.0)
        grads = [e.param.grad for e in engine.entries if e.param.grad is not None]
        # On the host a look at the number saves a pass over all gradients; on a device looking would cost a synchronization.
        if grads and not (engine.device.type == "cpu" and not engine.group.imagined and scale.item() == 1.0):
            torch._foreach_mul_(grads, scale.to(torch.float32))
        return total.to(torch.float32)


def _number(value: object) -> float | None:
    """`value` as a float if it is a number (a tensor of one element too), else None."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else None


def _total_norm(engine: Engine, parts: list[torch.Tensor], p: float) -> torch.Tensor:
    """A 0-dim fp64 tensor, the same bits on every rank."""
    device = engine.device
    norms = (
        torch.stack([n.to(torch.float64) for n in torch._foreach_norm(parts, p)])
        if parts
        else torch.zeros(1, dtype=torch.float64, device=device)
    )
    mine = norms.max() if math.isinf(p) else norms.pow(p).sum()
    values = engine.group.gather_values(mine, Place("control", "(gradient norm)", engine.step, "optimizer"))
    return values.max() if math.isinf(p) else values.sum().pow(1.0 / p)
