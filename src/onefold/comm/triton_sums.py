"""The Triton kernel of sums.py: it reads every part once and writes the result once. See [Note: the
order of a sum] there.

A program adds up `BLOCK` elements of all ranks, in a loop over the rows of the receive buffer. So
one kernel serves any number of ranks. The loads of a row do not depend on the sum so far, and an SM
runs 16 programs, which keeps the memory busy.

What could change bits on a GPU, and what prevents it:

| hazard                                                             | answer                                                            |
|--------------------------------------------------------------------|-------------------------------------------------------------------|
| a product fused with a sum rounds once                             | the product comes last; also `enable_fp_fusion=False`             |
| a sum that begins with +0 turns a first part of -0 into +0         | it begins with -0: -0 + x is x, for every x                       |
| `tl.full(-0.0)` is +0, since Triton compares the value with 0      | -0 is made from its bits                                          |
| 2**31 elements and more, and rows that far apart                   | offsets are int64; each row's pointer is the last one plus stride |
| subnormals flushed to 0                                            | Triton does not flush them (tests/stores/test_kernels.py)         |
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onefold.comm.launching import launch
from onefold.comm.triton_floats import narrow, wide

#: Elements of one program: 8 for each of its 128 threads, one load of 16 bytes from a row of 16-bit
#: parts.
BLOCK = 1024
_NEGATIVE_ZERO = tl.constexpr(-0x80000000)
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def sum_parts(
    parts: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    own: torch.Tensor | None,
    rank: int,
    round_to: torch.dtype | None,
) -> None:
    """See sums.py; also runs on CPU tensors under Triton's interpreter."""
    n = out.numel()
    launch(
        _sum, triton.cdiv(n, BLOCK), out,
        parts, out if own is None else own, out, n, parts.stride(0), parts.shape[0], rank, float(scale),
        OWN=own is not None, ROUND=_TYPES[round_to or torch.float32], BLOCK=BLOCK,
    )  # fmt: skip


# Triton compiles a variant for values of `n` and `stride` that 16 divides, which lets a thread load
# 16 bytes at once, and another for int64, from 2**31 on. `rows` and `rank` are excluded: 1,
# multiples of 16 and all other numbers would be compiled separately.
@triton.jit(do_not_specialize=["rows", "rank"])
def _sum(  # type: ignore[no-untyped-def]
    parts,
    own,
    out,
    n,
    stride,
    rows,
    rank,
    scale,
    OWN: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    total = tl.full([BLOCK], _NEGATIVE_ZERO, tl.int32).to(tl.float32, bitcast=True)
    row = parts  # a scalar: one addition a row
    r = 0  # not `for r in range(rows)`: with NumPy 2.4 the interpreter cannot use `rows` as an int
    if OWN:
        while r < rank:
            total += wide(tl.load(row + at, mask=here, other=0.0))
            row += stride
            r += 1
        total += wide(tl.load(own + at, mask=here, other=0.0))
    while r < rows:
        total += wide(tl.load(row + at, mask=here, other=0.0))
        row += stride
        r += 1
    total *= scale
    total = wide(narrow(total, ROUND))
    tl.store(out + at, narrow(total, out.dtype.element_ty), mask=here)
