"""Floats of 16 bits in Triton's kernels, bit for bit as torch converts them, on every architecture
and in Triton's interpreter.

| conversion   | here                                       | why not `.to()`                                                             |
|--------------|--------------------------------------------|-----------------------------------------------------------------------------|
| bf16 → fp32  | its bits are the upper half                | the same                                                                    |
| fp32 → bf16  | integers: half a unit added, then cut off  | the interpreter cuts off; before 9.0 the instruction has no scalar form     |
| fp16 ↔ fp32  | `.to()`                                    | IEEE, subnormals included, everywhere                                       |

NaN stays NaN; which of its payloads comes out is not promised (torch's differ between CPU and CUDA
as well).
"""

from __future__ import annotations

import triton
import triton.language as tl

_BF16_NAN = tl.constexpr(0x7FC0)


@triton.jit
def bits(x):  # type: ignore[no-untyped-def]
    """The bits of fp32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def wide(x):  # type: ignore[no-untyped-def]
    """fp32, bf16 or fp16 as fp32: exact."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 as fp32, bf16 or fp16: to the nearest, ties to the even one."""
    if dtype == tl.bfloat16:
        raw = bits(x)
        half = tl.where(x == x, (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16, _BF16_NAN)
        return half.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def nothing(unused):  # type: ignore[no-untyped-def]
    """A kernel that does nothing: whether one can be built and launched at all."""
    pass
