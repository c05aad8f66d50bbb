"""Adding up the parts of a reduction: in rank order, in one dtype, scaled and rounded once, in one
pass over memory.

    parts     [ranks, n]   16 bits or fp32, as they came over the wire        r0 |■ ■ ■ ■|
    sum       [n]          ((r0 + r1) + r2) + ..., in `dtype` (fp32)          r1 |■ ■ ■ ■|  ──►  out |■ ■ ■ ■|
    scaled    sum * scale, one multiplication behind the last addition        r2 |■ ■ ■ ■|
    rounded   to `round_to`, then to the dtype of `out`

[Note: the order of a sum] Floating-point addition is not associative, so the result depends on the
order. Rank 0's part comes first. Each part is converted exactly and added with one rounding. The
multiplication by the scale comes last: before an addition, a compiler could fuse it into one
operation, which rounds once instead of twice. Stages 0 to 3 therefore sum the same parts to the
same bits, in different places, on any device.

Torch adds slab by slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from onefold.device import simulated

#: Elements that torch adds up at a time on a CPU if parts are converted: torch would convert a
#: whole addend into new memory.
CPU_SLAB = 1 << 19
#: Up to this many elements that memory is cheap (glibc serves it from its heap).
_SMALL = 1 << 15


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
    """Write `scale` times the sum of the ranks' parts, added in rank order, over all of `out`.
    Nothing waits for the device.

    Args:
        parts: [ranks, n], one row for each rank in rank order: a receive buffer. Rows are
            contiguous; their stride may be larger than n. With `own`: [ranks - 1, n], the rows of
            the other ranks.
        out: [n], contiguous, on the device of `parts`. It may be `own` or a row of `parts` of the
            same dtype; it must not overlap them otherwise.
        scale: the sum is multiplied by it, as by `Tensor.mul_`.
        own: [n], contiguous: this rank's part, left in its place, in any floating-point dtype. It
            is added at position `rank`.
        rank: this rank's position among the ranks, counted from 0; read with `own` only.
        round_to: the scaled sum is rounded to this dtype before it is converted to that of `out`;
            None: it is not.
        dtype: the accumulation dtype, in which parts are added and the sum is multiplied.

    Raises:
        ValueError: shapes, layouts or devices do not fit together.
    """
    _check(parts, out, own, rank)
    if (clock := simulated()) is not None:  # on a device it is one kernel
        clock.kernel("sum_parts", (parts,) if own is None else (parts, own), (out,))
        return
    rows = list(parts.unbind())
    if own is not None:
        rows.insert(rank, own)
    add_up(rows, out, scale, round_to=round_to, dtype=dtype)


def add_up(
    parts: Sequence[torch.Tensor],
    out: torch.Tensor,
    scale: float = 1.0,
    *,
    round_to: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Do the same as `sum_parts` with torch's operations, for parts that need not be in one buffer.

    Args:
        parts: one [n] for each rank, in rank order, in any floating-point dtypes.
        out, scale, round_to, dtype: as in `sum_parts`.
    """
    round_to, n = _narrower(round_to, dtype), out.numel()
    on_cpu, at = out.device.type == "cpu", out.data_ptr()
    apart, widened = out.dtype != dtype, False
    for i, part in enumerate(parts):
        if part.dtype != dtype:
            widened = widened or (on_cpu and n > _SMALL and _widens(part.dtype, dtype))
        elif part.data_ptr() == at and (i > 1 or (i and parts[0].dtype != dtype)):
            # `out` is this part, and would be overwritten before the part is read
            apart = True
    slab = n
    if on_cpu and n > CPU_SLAB and (apart or widened or round_to):
        slab = -(-n // -(-n // CPU_SLAB))  # even slabs
    sums = torch.empty_like(out[:slab], dtype=dtype) if apart else None
    room = torch.empty_like(out[:slab], dtype=dtype) if widened else None
    if slab == n:
        _add_up(parts, out, sums, room, scale, round_to, dtype)
        return
    for piece, *pieces in zip(out.split(slab), *(part.split(slab) for part in parts), strict=True):
        m = piece.numel()
        _add_up(
            pieces,
            piece,
            sums[:m] if sums is not None else None,
            room[:m] if room is not None else None,
            scale,
            round_to,
            dtype,
        )


def _add_up(
    parts: Sequence[torch.Tensor],
    out: torch.Tensor,
    apart: torch.Tensor | None,
    room: torch.Tensor | None,
    scale: float,
    round_to: torch.dtype | None,
    dtype: torch.dtype,
) -> None:
    """Add up one slab. `apart`: the buffer for the sum, if it cannot be `out`. `room`: a buffer in
    which narrower parts are converted, so that torch does not allocate for each.
    """
    first, *others = parts
    sums = out if apart is None else apart
    if others and first.dtype == others[0].dtype == dtype:
        torch.add(first, others.pop(0), out=sums)
    else:
        sums.copy_(first)
    for part in others:
        sums.add_(room.copy_(part) if room is not None and _widens(part.dtype, dtype) else part)
    if scale != 1:
        sums.mul_(scale)
    if round_to is not None:
        sums = sums.to(round_to)
    if sums is not out:
        out.copy_(sums)


@cache
def _narrower(other: torch.dtype | None, dtype: torch.dtype) -> torch.dtype | None:
    """Return `other`, or None if it can hold every value of `dtype`."""
    return None if other is None or torch.promote_types(other, dtype) == other else other


@cache
def _widens(part: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether `dtype` is another dtype than `part`, and can hold every value of it."""
    return part != dtype and torch.promote_types(part, dtype) == dtype


def _check(parts: torch.Tensor, out: torch.Tensor, own: torch.Tensor | None, rank: int) -> None:
    ranks = (parts.shape[0] if parts.dim() == 2 else 0) + (own is not None)
    if (
        parts.dim() != 2
        or not ranks
        or out.shape != parts.shape[1:]
        or (own is not None and own.shape != out.shape)
    ):
        with_own = f" and own of shape {tuple(own.shape)}" if own is not None else ""
        raise ValueError(
            f"parts of shape {tuple(parts.shape)}{with_own} cannot be summed into"
            f" {tuple(out.shape)}: expected [ranks, n] and [n]"
        )
    if own is not None and not 0 <= rank < ranks:
        raise ValueError(
            f"rank {rank} was given with the parts of {ranks} ranks, expected a position from 0 to"
            f" {ranks - 1}"
        )
    if parts.device != out.device or (own is not None and own.device != out.device):
        on = ", ".join(str(t.device) for t in (parts, own, out) if t is not None)
        raise ValueError(f"parts and sum are on several devices ({on}), expected one")
    if out.numel() > 1 and (
        parts.stride(1) != 1 or not out.is_contiguous() or not (own is None or own.is_contiguous())
    ):
        raise ValueError(
            f"parts of strides {parts.stride()} and a sum of strides {out.stride()} were given,"
            " expected contiguous rows and [n]"
        )
