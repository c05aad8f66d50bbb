"""Adding up the parts of a reduction: in rank order, in one dtype, scaled and rounded once. One pass over memory.

    parts     [ranks, n]   16 bits or fp32, as they came over the wire        r0 |■ ■ ■ ■|
    sum       [n]          ((r0 + r1) + r2) + ..., in `dtype` (fp32)          r1 |■ ■ ■ ■|  ──►  out |■ ■ ■ ■|
    scaled    sum * scale, one multiplication behind the last addition        r2 |■ ■ ■ ■|
    rounded   to `round_to`, then to the dtype of `out`

[Note: the order of a sum] Floating-point addition is not associative, so the order is part of the result: rank 0 first, each part
converted exactly and added by one rounded addition. The factor comes last. Stages 0 to 3 sum the same parts into different places and
get the same bits, on any device. (A multiplication in front of an addition could be contracted into one fused operation, which rounds
once instead of twice; behind the additions there is nothing to contract with.)

On CUDA one Triton kernel reads every part once and writes the result once (triton_sums.py); elsewhere torch adds slab by slab. Both give
the same bits, NaN's payload excepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Elements that torch adds up at a time on a CPU: sum and addend stay in the cache while part after part is added.
CPU_SLAB = 1 << 17


@torch.no_grad()
def sum_parts(
    parts: torch.Tensor,
    out: torch.Tensor,
    scale: float = 1.0,
    *,
    own: torch.Tensor | None = None,
    rank: int = 0,
    round_to: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write `scale` times the sum of the ranks' parts, added in rank order, over all of `out`. Nothing waits for the device.

    Args:
        parts: [ranks, n], one row for each rank in rank order: a receive buffer. Rows are contiguous; their distance may be larger than n.
            With `own`: [ranks - 1, n], the rows of the other ranks.
        out: [n], contiguous, on the device of `parts`. It may be `own` or a row of `parts` (in its dtype); it overlaps nothing else.
        scale: what the sum is multiplied with, as `Tensor.mul_` would.
        own: [n], contiguous: this rank's part where it lies, in any floating-point dtype. It is added at position `rank`.
        rank: this rank's position among the ranks, counted from 0; read with `own` only.
        round_to: the scaled sum is rounded to this dtype before it is converted to that of `out`; None: it is not.
        dtype: the accumulation dtype: what is added and multiplied in.

    Raises:
        ValueError: shapes, layouts or devices that do not belong together.
    """
    _check(parts, out, own, rank)
    rows = list(parts.unbind())
    if own is not None:
        rows.insert(rank, own)
    add_up(rows, out, scale, round_to=round_to, dtype=dtype)


@torch.no_grad()
def add_up(
    parts: Sequence[torch.Tensor],
    out: torch.Tensor,
    scale: float = 1.0,
    *,
    round_to: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """`sum_parts` by torch's operations, of parts that lie anywhere.

    Args:
        parts: one [n] for each rank, in rank order, in any floating-point dtypes.
        out, scale, round_to, dtype: as `sum_parts` has them.
    """
    slab = CPU_SLAB if out.device.type == "cpu" else max(out.numel(), 1)
    if out.numel() <= slab:
        _add_up(parts, out, scale, round_to, dtype)
        return
    for pieces in zip(out.split(slab), *(part.split(slab) for part in parts), strict=True):
        _add_up(pieces[1:], pieces[0], scale, round_to, dtype)


def _add_up(parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float, round_to: torch.dtype | None, dtype: torch.dtype) -> None:
    first, *others = parts
    apart = out.dtype != dtype or any(part.data_ptr() == out.data_ptr() for part in others[1:])
    sums = torch.empty_like(out, dtype=dtype) if apart else out
    if others and first.dtype == others[0].dtype == dtype:
        torch.add(first, others.pop(0), out=sums)
    else:
        sums.copy_(first)
    for part in others:
        sums.add_(part)
    if scale != 1:
        sums.mul_(scale)
    rounded = sums if round_to is None or torch.promote_types(round_to, dtype) == round_to else sums.to(round_to)
    if rounded is not out:
        out.copy_(rounded)


def _check(parts: torch.Tensor, out: torch.Tensor, own: torch.Tensor | None, rank: int) -> None:
    ranks = (parts.shape[0] if parts.dim() == 2 else 0) + (own is not None)
    if parts.dim() != 2 or not ranks or out.shape != parts.shape[1:] or (own is not None and own.shape != out.shape):
        with_own = f" and own of shape {tuple(own.shape)}" if own is not None else ""
        raise ValueError(f"parts of shape {tuple(parts.shape)}{with_own} cannot be summed into {tuple(out.shape)}: expected [ranks, n] and [n]")
    if own is not None and not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} was given with parts of {ranks} ranks, expected a position from 0 to {ranks - 1}")
    if any(t is not None and t.device != out.device for t in (parts, own)):
        on = ", ".join(str(t.device) for t in (parts, own, out) if t is not None)
        raise ValueError(f"parts and sum are on several devices ({on}), expected one")
    if out.numel() > 1 and (parts.stride(1) != 1 or not out.is_contiguous() or not (own is None or own.is_contiguous())):
        raise ValueError(f"parts of strides {parts.stride()} and a sum of strides {out.stride()} were given, expected contiguous rows")
