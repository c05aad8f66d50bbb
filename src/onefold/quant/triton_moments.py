"""The kernels of moments in 8 bits, and of rounding to bf16 by chance: one launch for a tensor,
where torch's operations need four (unpack), twelve (pack) and twenty (round).

The results equal those of moment_packing.py and bf16_rounding.py bit for bit. See [Note: the bits of
a kernel] in triton_kernels.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onefold.comm.launching import launch
from onefold.comm.triton_floats import bits, narrow
from onefold.quant.numbers import GAMMA, MIX_1, MIX_2

ELEMENTS = 4096  # of one program
_ABSOLUTE, _INFINITE = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)
_LEAST = tl.constexpr(1e-12)  # torchao's least scale
_GAMMA, _MIX_1, _MIX_2 = tl.constexpr(GAMMA), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


def unpack(
    codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, out: torch.Tensor, block: int
) -> None:
    """Write `values[code] * scale` to `out`, [numel]. Also runs on CPU tensors under Triton's
    interpreter.
    """
    blocks, rows = scales.numel(), max(ELEMENTS // block, 1)
    launch(
        _unpack, triton.cdiv(blocks, rows), out,
        codes.view(torch.int8), scales, values, out, out.numel(), BLOCK=block, ROWS=rows,
    )  # fmt: skip


def pack(
    given: torch.Tensor,
    lowest: torch.Tensor,
    boundary: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    block: int,
) -> None:
    """Pack fp32 `given`, [numel], into `codes`, [numel], and `scales`. `lowest` and `boundary`: the
    tables of moment_packing.py.
    """
    blocks, rows = scales.numel(), max(ELEMENTS // block, 1)
    launch(
        _pack, triton.cdiv(blocks, rows), given,
        given, lowest.view(torch.int8), boundary, codes.view(torch.int8), scales, given.numel(), blocks, BLOCK=block, ROWS=rows,
    )  # fmt: skip


def round_by_chance(
    values: torch.Tensor, of_step: int | torch.Tensor, first: int, out: torch.Tensor
) -> None:
    """Round fp32 `values`, [numel], to bf16 `out`. See bf16_rounding.py.

    `of_step`: the hash of key and step, or an int64 tensor, [1], that holds it.
    """
    n = values.numel()
    launch(
        _round, triton.cdiv(n, ELEMENTS), values,
        values, out, of_step, first, n, HELD=isinstance(of_step, torch.Tensor), SIZE=ELEMENTS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def _unpack(  # type: ignore[no-untyped-def]
    codes, scales, values, out, n, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    scale = tl.load(scales + block, mask=block * BLOCK < n, other=0.0)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    here = at < n
    code = tl.load(codes + at, mask=here, other=0).to(tl.int64) & 0xFF
    tl.store(out + at, tl.load(values + code) * scale[:, None], mask=here)


@triton.jit(do_not_specialize=["n", "blocks"])
def _pack(  # type: ignore[no-untyped-def]
    given, lowest, boundary, codes, scales, n, blocks, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    here = at < n
    x = tl.load(given + at, mask=here, other=0.0)
    # As integers, where NaN is the largest
    scale = tl.max(bits(x) & _ABSOLUTE, axis=1).to(tl.float32, bitcast=True)
    scale = tl.where(scale < _LEAST, _LEAST, scale)
    tl.store(scales + block, scale, mask=block < blocks)
    y = tl.div_rn(x, tl.broadcast_to(scale[:, None], [ROWS, BLOCK]))
    upper = ((bits(y) >> 16) & 0xFFFF).to(tl.int64)
    code = (tl.load(lowest + upper).to(tl.int32) & 0xFF) + (y >= tl.load(boundary + upper)).to(
        tl.int32
    )
    tl.store(codes + at, code.to(tl.int8), mask=here)


@triton.jit
def _mixed(z):  # type: ignore[no-untyped-def]
    """Mix the bits of uint64 numbers (SplitMix64)."""
    z ^= z >> 30
    z *= _MIX_1
    z ^= z >> 27
    z *= _MIX_2
    z ^= z >> 31
    return z


@triton.jit(do_not_specialize=["of_step", "first", "n"])
def _round(  # type: ignore[no-untyped-def]
    values, out, of_step, first, n, HELD: tl.constexpr, SIZE: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    here = at < n
    if HELD:  # noqa: SIM108
        key = tl.load(of_step)
    else:
        key = of_step.to(tl.int64)
    place = at + first
    z = _mixed(((place >> 2) + 1).to(tl.uint64) * _GAMMA + key.to(tl.uint64, bitcast=True))
    drawn = ((z >> ((place & 3) << 4).to(tl.uint64)) & 0xFFFF).to(tl.int32)
    x = tl.load(values + at, mask=here, other=0.0)
    rounded = ((bits(x) + drawn) & -0x10000).to(tl.float32, bitcast=True)
    # The addition may carry a NaN's bits into the sign
    x = tl.where((bits(x) & _ABSOLUTE) < _INFINITE, rounded, x)
    tl.store(out + at, narrow(x, out.dtype.element_ty), mask=here)
