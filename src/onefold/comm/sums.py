"""Adding up the parts of a reduction: in rank order, in one dtype, scaled and rounded once. One
pass over memory.

    parts     [ranks, n]   16 bits or fp32, as they came over the wire        r0 |■ ■ ■ ■|
    sum       [n]          ((r0 + r1) + r2) + ..., in `dtype` (fp32)          r1 |■ ■ ■ ■|  ──►  out |■ ■ ■ ■|
    scaled    sum * scale, one multiplication behind the last addition        r2 |■ ■ ■ ■|
    rounded   to `round_to`, then to the dtype of `out`

[Note: the order of a sum] Floating-point addition is not associative, so the order is part of the
result: rank 0 first, each part converted exactly and added by one rounded addition. The factor
comes last. Stages 0 to 3 sum the same parts into different places and get the same bits, on any
device. (A multiplication in front of an addition could be contracted into one fused operation,
which rounds once instead of twice; behind the additions there is nothing to contract with.)

On CUDA one Triton kernel reads every part once and writes the result once (triton_sums.py);
elsewhere torch adds slab by slab. Both give the same bits, NaN's payload excepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from onefold.comm.launching import served
from onefold.device import simulated

#: Elements that torch adds up at a time on a CPU where parts are converted: it converts an addend
#: as a whole, into memory of its own.
CPU_SLAB = 1 << 19
#: Up to here that memory comes at no cost (glibc maps none of its own for it).
_SMALL = 1 << 15
_SERVED = (torch.float32, torch.bfloat16, torch.float16)


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
            contiguous; their distance may be larger than n. With `own`: [ranks - 1, n], the rows of
            the other ranks.
        out: [n], contiguous, on the device of `parts`. It may be `own` or a row of `parts`, if it
            has its dtype; it overlaps nothing else.
        scale: what the sum is multiplied with, as `Tensor.mul_` would.
        own: [n], contiguous: this rank's part where it lies, in any floating-point dtype. It is
            added at position `rank`.
        rank: this rank's position among the ranks, counted from 0; read with `own` only.
        round_to: the scaled sum is rounded to this dtype before it is converted to that of `out`;
            None: it is not.
        dtype: the accumulation dtype: what is added and multiplied in.

    Raises:
        ValueError: shapes, layouts or devices that do not belong together.
    """
    _check(parts, out, own, rank)
    if (clock := simulated()) is not None:  # on a device it is one kernel
        clock.kernel("sum_parts", (parts,) if own is None else (parts, own), (out,))
        return
    if out.numel() and serve(parts, out, own, round_to, dtype):
        from onefold.comm import triton_sums

        triton_sums.sum_parts(parts, out, scale, own, rank, _narrower(round_to, dtype))
        return
    rows = list(parts.unbind())
    if own is not None:
        rows.insert(rank, own)
    add_up(rows, out, scale, round_to=round_to, dtype=dtype)


def serve(
    parts: torch.Tensor,
    out: torch.Tensor,
    own: torch.Tensor | None,
    round_to: torch.dtype | None,
    dtype: torch.dtype,
) -> bool:
    """Whether the kernel adds these up: in fp32, of and to fp32, bf16 and fp16."""
    dtypes = {
        parts.dtype,
        out.dtype,
        own.dtype if own is not None else dtype,
        _narrower(round_to, dtype) or dtype,
    }
    return dtype == torch.float32 and dtypes.issubset(_SERVED) and served(out)


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
    round_to, n = _narrower(round_to, dtype), out.numel()
    on_cpu, at = out.device.type == "cpu", out.data_ptr()
    apart, widened = out.dtype != dtype, False
    for i, part in enumerate(parts):
        if part.dtype != dtype:
            widened = widened or (on_cpu and n > _SMALL and _widens(part.dtype, dtype))
        elif part.data_ptr() == at and (i > 1 or (i and parts[0].dtype != dtype)):
            # It would be overwritten before it is read
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
    """`apart`: where the sum is made, if not in `out`. `room`: where narrower parts are converted,
    lest torch allocates for each.
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
    """`other`, unless it holds every value of `dtype`."""
    return None if other is None or torch.promote_types(other, dtype) == other else other


@cache
def _widens(part: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether `dtype` holds every value of another dtype, `part`."""
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
