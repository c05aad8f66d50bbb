"""int8 and int4 in one pass over memory on CUDA: read once, write once. Equal to `integers.py` bit for bit.

A program takes `ROWS` blocks. Both codecs see a block as `PARTS` parts of `WIDTH` elements (int8: one, int4: two halves that share
bytes). What keeps the bits equal: magnitudes are compared as integers, every rounding is one IEEE operation in the order of the plain
version, and products are not fused with sums (`enable_fp_fusion=False`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from onefold.comm.codecs.rounding import DRAW_STEP, HASH_FACTORS, HASH_SHIFTS, HIGH_FACTOR, Stochastic
from onefold.comm.codecs.scales import CUT, MOST, NEAREST, SMALLEST, UP, reach

if TYPE_CHECKING:
    from onefold.comm.codecs.blockwise import Blockwise

ELEMENTS = 4096  # of one program
_MAGIC = tl.constexpr(12582912.0)  # as in integers.py
_MAGIC_BITS = tl.constexpr(0x4B400000)
_ABSOLUTE, _INFINITE = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_MOST, _UP, _NEAREST, _CUT = tl.constexpr(MOST), tl.constexpr(UP), tl.constexpr(NEAREST), tl.constexpr(CUT)
_FACTOR_0, _FACTOR_1, _HIGH = tl.constexpr(HASH_FACTORS[0]), tl.constexpr(HASH_FACTORS[1]), tl.constexpr(HIGH_FACTOR)
_SHIFT_0, _SHIFT_1, _SHIFT_2 = tl.constexpr(HASH_SHIFTS[0]), tl.constexpr(HASH_SHIFTS[1]), tl.constexpr(HASH_SHIFTS[2])
_DRAW_STEP = tl.constexpr(DRAW_STEP)


def encode(codec: Blockwise, source: torch.Tensor, payload: torch.Tensor, kept: torch.Tensor, rounding: Stochastic | None) -> int:
    """See kernels.py; also runs on CPU tensors under Triton's interpreter."""
    blocks, shape = source.numel() // codec.block, _shape(codec)
    first, next_, address = (*rounding.keys, rounding.address) if rounding is not None else (0, 0, 0)
    _encode[(triton.cdiv(blocks, shape["ROWS"]),)](
        source, payload.view(torch.int8), kept.view(torch.int16), blocks, first, next_, address,
        PORTION=codec.scales.portion, LEAST=SMALLEST * codec.top, TOP=codec.top, STOCHASTIC=rounding is not None, **shape,
    )  # fmt: skip
    return blocks * codec.block


def decode(codec: Blockwise, payload: torch.Tensor, kept: torch.Tensor, into: torch.Tensor, sign: int) -> int:
    """See kernels.py; also runs on CPU tensors under Triton's interpreter."""
    blocks, shape = into.numel() // codec.block, _shape(codec)
    narrow = into.dtype != torch.float32
    _decode[(triton.cdiv(blocks, shape["ROWS"]),)](
        payload.view(torch.int8), kept.view(torch.int16), into, blocks, PORTION=codec.scales.portion,
        SIGN=sign, NARROW=narrow, LARGEST=torch.finfo(into.dtype).max, REACH=reach(into.dtype), **shape,
    )  # fmt: skip
    return blocks * codec.block


def _shape(codec: Blockwise) -> dict[str, Any]:
    width = codec.block // codec.packed
    return {"BLOCK": codec.block, "WIDTH": width, "ROWS": max(ELEMENTS // codec.block, 1), "num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _bits(x):  # type: ignore[no-untyped-def]
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _load(at, here):  # type: ignore[no-untyped-def]
    """Elements as fp32; bf16 by its bits, which are the upper half of fp32's."""
    x = tl.load(at, mask=here[:, None], other=0.0)
    if at.dtype.element_ty == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _scale(kept, PORTION: tl.constexpr):  # type: ignore[no-untyped-def]
    return (_bits(kept * PORTION) & _CUT).to(tl.float32, bitcast=True)


@triton.jit
def _draw(address, key, next_key):  # type: ignore[no-untyped-def]
    """Draws of elements by their addresses (int64), as rounding.py makes them."""
    pair = address >> 1
    x = pair.to(tl.uint32) ^ key.to(tl.uint32) ^ ((pair >> 32).to(tl.uint32) * _HIGH)
    x ^= x >> _SHIFT_0
    x *= _FACTOR_0
    x ^= next_key.to(tl.uint32)
    x ^= x >> _SHIFT_1
    x *= _FACTOR_1
    x ^= x >> _SHIFT_2
    half = tl.where((address & 1) == 1, x >> 16, x & 0xFFFF).to(tl.int32)
    half = tl.where(half >= 32768, half - 65536, half)
    return (half.to(tl.float32) + 0.5) * _DRAW_STEP


@triton.jit
def _whole(x, inverse, offsets, key, next_key, address, TOP: tl.constexpr, STOCHASTIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of a block as integers (int32)."""
    y = x * inverse[:, None]
    if STOCHASTIC:
        y += _draw(address + offsets, key, next_key)
        y = tl.where(y > TOP, TOP, tl.where(y < -TOP, -TOP, y))
    return _bits(y + _MAGIC) - _MAGIC_BITS


@triton.jit(do_not_specialize=["key", "next_key", "address"])
def _encode(  # type: ignore[no-untyped-def]
    source, payload, kept, blocks, key, next_key, address,
    PORTION: tl.constexpr, LEAST: tl.constexpr, TOP: tl.constexpr, STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here, column = rows < blocks, tl.arange(0, WIDTH)
    low_at = rows[:, None] * BLOCK + column[None, :]
    low = _load(source + low_at, here)
    largest = tl.max(_bits(low) & _ABSOLUTE, axis=1)
    if BLOCK != WIDTH:
        high = _load(source + low_at + WIDTH, here)
        largest = tl.maximum(largest, tl.max(_bits(high) & _ABSOLUTE, axis=1))

    finite = largest < _INFINITE
    raw = tl.where(finite, largest, 0).to(tl.float32, bitcast=True)
    raw = tl.where(raw < LEAST, LEAST, tl.where(raw > _MOST, _MOST, raw))
    rounded = (_bits(raw) + (_UP if STOCHASTIC else _NEAREST)) & -0x10000
    tl.store(kept + rows, (tl.where(finite, rounded, _NAN) >> 16).to(tl.int16), mask=here)

    one = tl.full([ROWS], 1.0, tl.float32)
    inverse = tl.div_rn(one, _scale(rounded.to(tl.float32, bitcast=True), PORTION))
    number = _whole(low, inverse, low_at, key, next_key, address, TOP, STOCHASTIC)
    if BLOCK != WIDTH:
        upper = _whole(high, inverse, low_at + WIDTH, key, next_key, address, TOP, STOCHASTIC)
        number = (number + 8) | ((upper + 8) << 4)
    number = tl.where(finite[:, None], number, 0)
    tl.store(payload + rows[:, None] * WIDTH + column[None, :], number.to(tl.int8), mask=here[:, None])


@triton.jit
def _put(into, at, here, number, largest, scale, SIGN: tl.constexpr, NARROW: tl.constexpr, LARGEST: tl.constexpr, REACH: tl.constexpr):  # type: ignore[no-untyped-def]
    value = number.to(tl.float32) * scale[:, None]
    if SIGN != 0:
        value = _load(into + at, here) + SIGN * value
    elif NARROW:
        fits = (largest <= REACH)[:, None]
        value = tl.where(fits & (value > LARGEST), LARGEST, tl.where(fits & (value < -LARGEST), -LARGEST, value))
    tl.store(into + at, value.to(into.dtype.element_ty), mask=here[:, None])


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    payload, kept, into, blocks,
    PORTION: tl.constexpr, SIGN: tl.constexpr, NARROW: tl.constexpr, LARGEST: tl.constexpr, REACH: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here, column = rows < blocks, tl.arange(0, WIDTH)
    largest = (tl.load(kept + rows, mask=here, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    scale = _scale(largest, PORTION)
    number = tl.load(payload + rows[:, None] * WIDTH + column[None, :], mask=here[:, None], other=0).to(tl.int32)
    at = rows[:, None] * BLOCK + column[None, :]
    if BLOCK == WIDTH:
        _put(into, at, here, number, largest, scale, SIGN, NARROW, LARGEST, REACH)
    else:
        _put(into, at, here, (number & 15) - 8, largest, scale, SIGN, NARROW, LARGEST, REACH)
        _put(into, at + WIDTH, here, ((number >> 4) & 15) - 8, largest, scale, SIGN, NARROW, LARGEST, REACH)
