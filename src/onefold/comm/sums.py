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

import torch

from onefold.memory import storage_of

#: Elements added up at a time on a CPU: a slab, and what torch converts of it, fit the cache.
CPU_SLAB = 1 << 18


def add_up(
    parts: Sequence[torch.Tensor],
    out: torch.Tensor,
    scale: float = 1.0,
    *,
    round_to: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write `scale` times the sum of the ranks' parts, added in rank order, over all of `out`.
    Nothing waits for the device.

    Args:
        parts: one [n] for each rank, in rank order, in any floating-point dtypes.
        out: [n], contiguous, on the device of `parts`. It may be one of them, if that has its dtype;
            it must not overlap them otherwise.
        scale: the sum is multiplied by it, as by `Tensor.mul_`.
        round_to: the scaled sum is rounded to this dtype before it is converted to that of `out`;
            None: it is not.
        dtype: the accumulation dtype, in which parts are added and the sum is multiplied.
    """
    if round_to is not None and torch.promote_types(round_to, dtype) == round_to:
        round_to = None  # it can hold every value of `dtype`
    # If `out` is one of these, it would be overwritten before that is read
    later, n = parts[2 if parts[0].dtype == dtype else 1 :], out.numel()
    apart = out.dtype != dtype or any(_place(part) == _place(out) for part in later)
    slab = min(n, CPU_SLAB) if out.device.type == "cpu" else n
    room = torch.empty_like(out[:slab], dtype=dtype) if apart else None
    whole = (out, *parts)
    slabs = [whole] if slab == n else zip(*(t.split(slab) for t in whole), strict=True)
    for piece, first, *others in slabs:
        sums = piece if room is None else room[: piece.numel()]
        if others and first.dtype == others[0].dtype == dtype:
            torch.add(first, others.pop(0), out=sums)
        else:
            sums.copy_(first)
        for part in others:
            sums.add_(part)
        if scale != 1:
            sums.mul_(scale)
        if round_to is not None:
            sums = sums.to(round_to)
        if sums is not piece:
            piece.copy_(sums)


def _place(t: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor begins. Fake tensors have no address."""
    return storage_of(t), int(t.storage_offset())
