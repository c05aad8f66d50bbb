"""The block-wise codecs on CUDA in one pass over memory: read once, write once. The results equal
those of the plain operations bit for bit.

A program processes `ROWS` blocks, about 4096 elements. One launch serves an interval, or rows of
intervals at equal distances: those of all ranks.

| codec | a byte holds                               | a number is computed by                                      | see         |
|-------|--------------------------------------------|--------------------------------------------------------------|-------------|
| int8  | one element                                | adding 1.5 * 2**23, whose last bits are the nearest integer  | integers.py |
| int4  | the elements i and i + `WIDTH` of a block  | the same                                                     | integers.py |
| fp8   | one element                                | adding half a unit in the last place of e4m3, and truncating | fp8.py      |
| nf4   | the elements 2i and 2i + 1                 | four comparisons with borders between levels                 | nf4.py      |

[Note: the bits of a kernel]  On a GPU the following would break equality. Triton's interpreter does
not show it.

- Triton fuses `a * b + c` into one operation by default. Every launch has `enable_fp_fusion=False`
  (launching.py).
- `/` in fp32 is an approximation on CUDA. The only division is `tl.div_rn`, which rounds as in IEEE
  754.
- `tl.max` of floats ignores NaN by default. Magnitudes are compared as integers, where NaN is the
  largest.
- The hardware's conversion to e4m3 differs from torch's: before compute capability 8.9 there is no
  instruction, and the instruction saturates where torch gives NaN. So kernels round by additions
  and integer arithmetic.
- `program_id` is int32, and 2**31 elements are 8 GiB of fp32. So an element's offset is int64 from
  the first multiplication on.
- A draw's hash uses uint32, which wraps on every device.

[Note: variants]  Triton compiles a kernel for each combination of dtypes, flags and codec. It also
specializes on whether a pointer is a multiple of 16, and on whether an integer fits 32 bits. It
does not specialize on the numbers of blocks and rows, which differ. Distances between rows are
multiples of 16 bytes, or 0 if there is one row: one variant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from onefold.comm.launching import launch
from onefold.comm.triton_floats import bits, narrow, wide
from onefold.quant.numbers import MAGIC, SMALLEST_NORMAL, SMALLEST_STEP, borders, pairs
from onefold.quant.rounding import DRAW_STEP, HASH_FACTORS, HASH_SHIFTS, HIGH_FACTOR, Stochastic
from onefold.quant.scales import CUT, MOST, NEAREST, SMALLEST, UP, reach

if TYPE_CHECKING:
    from onefold.quant.blockwise import Blockwise

ELEMENTS = 4096  # of one program
#: The codecs with kernels (`Blockwise.has_kernel`) by name.
_KINDS = {"int8": 0, "int4": 1, "fp8": 2, "nf4": 3}
_INT8, _INT4, _FP8, _NF4 = (tl.constexpr(kind) for kind in _KINDS.values())
_MAGIC = tl.constexpr(MAGIC)
_MAGIC_BITS = tl.constexpr(0x4B400000)
_ABSOLUTE, _INFINITE = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_MOST, _UP, _NEAREST, _CUT = (
    tl.constexpr(MOST),
    tl.constexpr(UP),
    tl.constexpr(NEAREST),
    tl.constexpr(CUT),
)
_FACTOR_0, _FACTOR_1, _HIGH = (
    tl.constexpr(HASH_FACTORS[0]),
    tl.constexpr(HASH_FACTORS[1]),
    tl.constexpr(HIGH_FACTOR),
)
_SHIFT_0, _SHIFT_1, _SHIFT_2 = (
    tl.constexpr(HASH_SHIFTS[0]),
    tl.constexpr(HASH_SHIFTS[1]),
    tl.constexpr(HASH_SHIFTS[2]),
)
_DRAW_STEP = tl.constexpr(DRAW_STEP)
# e4m3 drops 20 of fp32's fraction bits, and has an exponent bias of 7 instead of 127.
_DROPPED, _HALF, _REBIASED = tl.constexpr(20), tl.constexpr((1 << 19) - 1), tl.constexpr(120 << 3)
_NORMAL, _STEP, _STEPS = (
    tl.constexpr(SMALLEST_NORMAL),
    tl.constexpr(SMALLEST_STEP),
    tl.constexpr(1.0 / SMALLEST_STEP),
)
_LARGEST_CODE, _NAN_CODE = tl.constexpr(0x7E), tl.constexpr(0x7F)
_B0, _B1, _B2, _B3, _B4, _B5, _B6, _B7, _B8, _B9, _B10, _B11, _B12, _B13, _B14 = (
    tl.constexpr(border) for border in borders()
)


def encode(
    codec: Blockwise,
    source: torch.Tensor,
    payload: torch.Tensor,
    kept: torch.Tensor,
    rounding: Stochastic | None,
) -> int:
    """See kernels.py; also runs on CPU tensors under Triton's interpreter."""
    blocks, shape = source.shape[-1] // codec.block, _shape(codec)
    first, next_, address = (
        (*rounding.keys, rounding.address) if rounding is not None else (0, 0, 0)
    )
    payload, kept = payload.view(torch.int8), kept.view(torch.int16)
    launch(
        _encode, triton.cdiv(blocks, shape["ROWS"]) * _rows_of(source), source,
        source, payload, kept, blocks, _between(source), _between(payload), _between(kept), first, next_, address,
        PORTION=codec.scales.portion, LEAST=SMALLEST * codec.top, TOP=codec.top, STOCHASTIC=rounding is not None, **shape,
    )  # fmt: skip
    return blocks * codec.block


def decode(
    codec: Blockwise, payload: torch.Tensor, kept: torch.Tensor, into: torch.Tensor, sign: int
) -> int:
    """See kernels.py; also runs on CPU tensors under Triton's interpreter."""
    blocks, shape = into.shape[-1] // codec.block, _shape(codec)
    narrowed = into.dtype != torch.float32
    payload, kept = payload.view(torch.int8), kept.view(torch.int16)
    launch(
        _decode, triton.cdiv(blocks, shape["ROWS"]) * _rows_of(into), into,
        payload, kept, into, _table(codec, into), blocks, _between(into), _between(payload), _between(kept),
        PORTION=codec.scales.portion, SIGN=sign, NARROW=narrowed, LARGEST=torch.finfo(into.dtype).max, REACH=reach(into.dtype), **shape,
    )  # fmt: skip
    return blocks * codec.block


def decode_sum(
    codec: Blockwise,
    payload: torch.Tensor,
    kept: torch.Tensor,
    own: torch.Tensor,
    rank: int,
    into: torch.Tensor,
) -> None:
    """See kernels.py; also runs on CPU tensors under Triton's interpreter."""
    blocks, shape = into.numel() // codec.block, _shape(codec)
    payload, kept = payload.view(torch.int8), kept.view(torch.int16)
    launch(
        _decode_sum, triton.cdiv(blocks, shape["ROWS"]), into,
        payload, kept, own, into, _table(codec, into), blocks, payload.shape[0], rank, _between(payload), _between(kept),
        PORTION=codec.scales.portion, **shape,
    )  # fmt: skip


def _rows_of(floats: torch.Tensor) -> int:
    return floats.shape[0] if floats.dim() == 2 else 1


def _between(rows: torch.Tensor) -> int:
    """Return the distance from one row to the next, in elements; 0 if there is one row."""
    return rows.stride(0) if rows.dim() == 2 and rows.shape[0] > 1 else 0


def _table(codec: Blockwise, into: torch.Tensor) -> torch.Tensor:
    """Return the levels of nf4, in pairs; any tensor for other codecs."""
    return pairs(into.device).view(torch.float32) if codec.name == "nf4" else into


def _shape(codec: Blockwise) -> dict[str, Any]:
    return {
        "KIND": _KINDS[codec.name],
        "BLOCK": codec.block,
        "WIDTH": codec.payload_bytes(codec.block),
        "ROWS": max(ELEMENTS // codec.block, 1),
    }


# --- parts of both kernels ---


@triton.jit
def _load(at, here):  # type: ignore[no-untyped-def]
    """Load elements of blocks as fp32."""
    return wide(tl.load(at, mask=here[:, None], other=0.0))


@triton.jit
def _scale(kept, PORTION: tl.constexpr):  # type: ignore[no-untyped-def]
    return (bits(kept * PORTION) & _CUT).to(tl.float32, bitcast=True)


@triton.jit
def _half(address, key, next_key):  # type: ignore[no-untyped-def]
    """Return the 16-bit draws of elements from their addresses (int64), as rounding.py does: int32,
    signed.
    """
    pair = address >> 1
    x = pair.to(tl.uint32) ^ key.to(tl.uint32) ^ ((pair >> 32).to(tl.uint32) * _HIGH)
    x ^= x >> _SHIFT_0
    x *= _FACTOR_0
    x ^= next_key.to(tl.uint32)
    x ^= x >> _SHIFT_1
    x *= _FACTOR_1
    x ^= x >> _SHIFT_2
    half = tl.where((address & 1) == 1, x >> 16, x & 0xFFFF).to(tl.int32)
    return tl.where(half >= 32768, half - 65536, half)


@triton.jit
def _place(blocks, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return this program's row of intervals, of `blocks` blocks each, and its blocks there. All are
    int64.
    """
    programs = tl.cdiv(blocks, ROWS)  # of a row
    row = tl.program_id(0) // programs
    within = (tl.program_id(0) - row * programs).to(tl.int64)
    return row.to(tl.int64), within * ROWS + tl.arange(0, ROWS)


# --- numbers as bytes ---


@triton.jit
def _integer(y, half, TOP: tl.constexpr, STOCHASTIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round `y` to the nearest integers, or stochastically; int32."""
    if STOCHASTIC:
        y += (half.to(tl.float32) + 0.5) * _DRAW_STEP
        y = tl.where(y > TOP, TOP, tl.where(y < -TOP, -TOP, y))
    return bits(y + _MAGIC) - _MAGIC_BITS


@triton.jit
def _e4m3(y, half, STOCHASTIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round `y` to e4m3, to the nearest or stochastically; int32. `y` is below 464, where rounding
    would exceed e4m3's largest number.

    Below the smallest normal number e4m3 has equal steps, so the steps are counted like integers.
    From it on the bits of e4m3 are the upper bits of fp32, with another bias. The sign bit comes
    from the value that was rounded, so -0 stays -0.
    """
    raw = bits(y)
    steps = y * _STEPS
    if STOCHASTIC:
        steps += (half.to(tl.float32) + 0.5) * _DRAW_STEP
        up = (half << 4) + ((1 << 19) + 8)  # (draw + 0.5) * 2**20, exactly
    else:
        up = _HALF + ((raw >> _DROPPED) & 1)  # ties to even
    counted = bits(tl.abs(steps) + _MAGIC) - _MAGIC_BITS
    normal = tl.minimum((((raw & _ABSOLUTE) + up) >> _DROPPED) - _REBIASED, _LARGEST_CODE)
    below = tl.abs(y) < _NORMAL
    return tl.where(below, counted, normal) | ((tl.where(below, bits(steps), raw) >> 24) & 0x80)


@triton.jit
def _level(y):  # type: ignore[no-untyped-def]
    """Count the borders below `y` (of 15) by binary search; int32. A value on a border gets the
    lower level.
    """
    a = y > _B7
    b = y > tl.where(a, _B11, _B3)
    c = y > tl.where(a, tl.where(b, _B13, _B9), tl.where(b, _B5, _B1))
    upper = tl.where(b, tl.where(c, _B14, _B12), tl.where(c, _B10, _B8))
    lower = tl.where(b, tl.where(c, _B6, _B4), tl.where(c, _B2, _B0))
    d = y > tl.where(a, upper, lower)
    return (a.to(tl.int32) << 3) | (b.to(tl.int32) << 2) | (c.to(tl.int32) << 1) | d.to(tl.int32)


@triton.jit
def _number(  # type: ignore[no-untyped-def]
    x,
    inverse,
    at,
    key,
    next_key,
    address,
    KIND: tl.constexpr,
    TOP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Convert elements of blocks to the codec's numbers (int32)."""
    y = x * inverse[:, None]
    half = at
    if STOCHASTIC:
        half = _half(address + at, key, next_key)
    if KIND == _NF4:
        return _level(y)
    elif KIND == _FP8:
        return _e4m3(y, half, STOCHASTIC)
    else:
        return _integer(y, half, TOP, STOCHASTIC)


@triton.jit(do_not_specialize=["blocks", "kept_by", "key", "next_key", "address"])
def _encode(  # type: ignore[no-untyped-def]
    source, payload, kept, blocks, source_by, payload_by, kept_by, key, next_key, address,
    PORTION: tl.constexpr, LEAST: tl.constexpr, TOP: tl.constexpr, STOCHASTIC: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, rows = _place(blocks, ROWS)
    here = rows < blocks
    HALVES: tl.constexpr = KIND == _INT4
    SPAN: tl.constexpr = WIDTH if HALVES else BLOCK
    at = (row * source_by + rows * BLOCK)[:, None] + tl.arange(0, SPAN)[None, :]
    low = _load(source + at, here)
    largest = tl.max(bits(low) & _ABSOLUTE, axis=1)
    if HALVES:
        high = _load(source + (at + WIDTH), here)
        largest = tl.maximum(largest, tl.max(bits(high) & _ABSOLUTE, axis=1))

    finite = largest < _INFINITE
    raw = tl.where(finite, largest, 0).to(tl.float32, bitcast=True)
    raw = tl.where(raw < LEAST, LEAST, tl.where(raw > _MOST, _MOST, raw))
    rounded = (bits(raw) + (_UP if STOCHASTIC else _NEAREST)) & -0x10000
    tl.store(
        kept + (row * kept_by + rows),
        (tl.where(finite, rounded, _NAN) >> 16).to(tl.int16),
        mask=here,
    )

    one = tl.full([ROWS], 1.0, tl.float32)
    inverse = tl.div_rn(one, _scale(rounded.to(tl.float32, bitcast=True), PORTION))
    number = _number(low, inverse, at, key, next_key, address, KIND, TOP, STOCHASTIC)
    if HALVES:
        upper = _number(high, inverse, at + WIDTH, key, next_key, address, KIND, TOP, STOCHASTIC)
        number = (number + 8) | ((upper + 8) << 4)
    if KIND == _NF4:
        even, odd = tl.split(tl.reshape(number, [ROWS, WIDTH, 2]))
        number = even | (odd << 4)
    number = tl.where(finite[:, None], number, 0)
    tl.store(
        payload + ((row * payload_by + rows * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]),
        number.to(tl.int8),
        mask=here[:, None],
    )


# --- bytes as numbers ---


@triton.jit
def _from_e4m3(byte):  # type: ignore[no-untyped-def]
    """Convert bytes of e4m3 to fp32, exactly."""
    code = byte & 0x7F
    normal = (code + _REBIASED) << _DROPPED
    below = bits(code.to(tl.float32) * _STEP)
    raw = tl.where(code == _NAN_CODE, _NAN, tl.where(code < 8, below, normal))
    return (raw | ((byte & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _put(  # type: ignore[no-untyped-def]
    into,
    at,
    here,
    number,
    largest,
    scale,
    SIGN: tl.constexpr,
    NARROW: tl.constexpr,
    LARGEST: tl.constexpr,
    REACH: tl.constexpr,
):
    value = number * scale[:, None]
    if SIGN != 0:
        value = _load(into + at, here) + SIGN * value
    elif NARROW:
        fits = (largest <= REACH)[:, None]
        value = tl.where(
            fits & (value > LARGEST), LARGEST, tl.where(fits & (value < -LARGEST), -LARGEST, value)
        )
    tl.store(into + at, narrow(value, into.dtype.element_ty), mask=here[:, None])


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    payload, kept, table, here, PORTION: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Load blocks. `payload` and `kept` point to them. Return their numbers, [ROWS, WIDTH] (nf4:
    [ROWS, BLOCK]), those of their upper halves (int4; the same again for others), their largest
    magnitudes and their scales.
    """
    largest = (tl.load(kept, mask=here, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    scale = _scale(largest, PORTION)
    byte = tl.load(payload, mask=here[:, None], other=0).to(tl.int32)
    if KIND == _INT8:
        low = byte.to(tl.float32)
        high = low
    elif KIND == _FP8:
        low = _from_e4m3(byte)
        high = low
    elif KIND == _INT4:
        low = ((byte & 15) - 8).to(tl.float32)
        high = (((byte >> 4) & 15) - 8).to(tl.float32)
    else:
        number = tl.reshape(tl.join(byte & 15, (byte >> 4) & 15), [ROWS, BLOCK])
        low = tl.load(table + 2 * number)  # 16 words of one cache line, without bank conflicts
        high = low
    return low, high, largest, scale


@triton.jit(do_not_specialize=["blocks", "kept_by"])
def _decode(  # type: ignore[no-untyped-def]
    payload, kept, into, table, blocks, into_by, payload_by, kept_by,
    PORTION: tl.constexpr, SIGN: tl.constexpr, NARROW: tl.constexpr, LARGEST: tl.constexpr, REACH: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, rows = _place(blocks, ROWS)
    here, column = rows < blocks, tl.arange(0, WIDTH)
    bytes_at = (row * payload_by + rows * WIDTH)[:, None] + column[None, :]
    low, high, largest, scale = _read(
        payload + bytes_at, kept + (row * kept_by + rows), table, here, PORTION, KIND, BLOCK, WIDTH, ROWS
    )  # fmt: skip
    first = row * into_by + rows * BLOCK
    if KIND == _NF4:
        whole = first[:, None] + tl.arange(0, BLOCK)[None, :]
        _put(into, whole, here, low, largest, scale, SIGN, NARROW, LARGEST, REACH)
    else:
        at = first[:, None] + column[None, :]
        _put(into, at, here, low, largest, scale, SIGN, NARROW, LARGEST, REACH)
        if KIND == _INT4:
            _put(into, at + WIDTH, here, high, largest, scale, SIGN, NARROW, LARGEST, REACH)


@triton.jit(do_not_specialize=["blocks", "rows", "rank", "kept_by"])
def _decode_sum(  # type: ignore[no-untyped-def]
    payload, kept, own, into, table, blocks, rows, rank, payload_by, kept_by,
    PORTION: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    SPAN: tl.constexpr = BLOCK if KIND == _NF4 else WIDTH
    block, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    here = block < blocks
    bytes_at = block[:, None] * WIDTH + column[None, :]
    at = block[:, None] * BLOCK + tl.arange(0, SPAN)[None, :]
    low_sum = tl.zeros([ROWS, SPAN], tl.float32)
    high_sum = tl.zeros([ROWS, SPAN], tl.float32)
    r = 0  # not `for r in range(rows)`: see comm/triton_sums.py
    while r < rows:
        if r == rank:
            low_sum += _load(own + at, here)
            if KIND == _INT4:
                high_sum += _load(own + (at + WIDTH), here)
        else:
            low, high, _, scale = _read(
                payload + bytes_at, kept + block, table, here, PORTION, KIND, BLOCK, WIDTH, ROWS
            )
            low_sum += low * scale[:, None]
            if KIND == _INT4:
                high_sum += high * scale[:, None]
        payload += payload_by  # a scalar: one addition a row
        kept += kept_by
        r += 1
    tl.store(into + at, low_sum, mask=here[:, None])
    if KIND == _INT4:
        tl.store(into + (at + WIDTH), high_sum, mask=here[:, None])
