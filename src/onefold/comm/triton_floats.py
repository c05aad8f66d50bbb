"""Conversions of 16-bit floats in Triton kernels, with the same bits as torch's, on every
architecture and in Triton's interpreter.

| conversion   | here                                       | why not `.to()`                                                             |
|--------------|--------------------------------------------|-----------------------------------------------------------------------------|
| bf16 → fp32  | its bits are the upper half                | (exact either way)                                                          |
| fp32 → bf16  | integers: half a unit added, then cut off  | the interpreter cuts off; before 9.0 the instruction has no scalar form     |
| fp16 ↔ fp32  | `.to()`                                    | (it is IEEE, subnormals included, everywhere)                               |

NaN stays NaN. Its payload is not guaranteed (torch's differs between CPU and CUDA too).
"""

from __future__ import annotations

import triton
import triton.language as tl

_BF16_NAN = tl.constexpr(0x7FC0)


@triton.jit
def bits(x):  # type: ignore[no-untyped-def]
    """Return the bits of fp32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def wide(x):  # type: ignore[no-untyped-def]
    """Convert fp32, bf16 or fp16 to fp32, which is exact."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert fp32 to fp32, bf16 or fp16: to the nearest, ties to even."""
    if dtype == tl.bfloat16:
        raw = bits(x)
        half = tl.where(x == x, (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16, _BF16_NAN)
        return half.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def nothing(unused):  # type: ignore[no-untyped-def]
    """Do nothing: this kernel tests whether kernels can be built and launched at all."""
    pass
