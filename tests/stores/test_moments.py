"""Moments in 8 and 4 bits and in bf16: the codes of torchao to the last bit, and rounding by chance that
is right on average and depends on seed, step and place alone.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from needed import skip_without
from onefold.quant.bf16_rounding import key_of, to_bf16
from onefold.quant.moment_packing import MomentPacking
from onefold.recipe.moments import FORMATS
from zoo import features_of

skip_without("torchao", "the formats are torchao's: pip install onefold[lowbit]")
#: How far a packed value may be off, as a share of its block's largest.
STEPS = {"int8": 0.015, "int4": 0.17}


def packed(name: str, x: Tensor, signed: bool, again: bool = False) -> tuple[Tensor, Tensor]:
    """(codes, scales)"""
    format = FORMATS[name]
    codes = torch.empty(-(-x.numel() // format.grain), dtype=format.dtype)
    scales = torch.empty(-(-x.numel() // format.block))
    by = MomentPacking(format, torch.device("cpu"))
    (by.encode_again if again else by.encode)(x, signed, codes, scales)
    return codes, scales


def unpacked(name: str, codes: Tensor, scales: Tensor, numel: int, signed: bool) -> Tensor:
    return MomentPacking(FORMATS[name], torch.device("cpu")).decode(codes, scales, numel, signed)


def of_torchao(name: str, numel: int, signed: bool) -> Any:
    import torchao.optim.subclass_4bit as bit4
    import torchao.optim.subclass_8bit as bit8

    made = bit8.OptimState8bit if name == "int8" else bit4.OptimState4bit
    return made.zeros((numel,), signed, FORMATS[name].block)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", STEPS)
def test_a_packed_moment_is_what_torchaos_tensor_holds(name: str, signed: bool) -> None:
    """Random numbers of many sizes, and all places where rounding changes with their neighbours. A
    one in each block makes its scale one.
    """
    sizes = 10.0 ** -(8 * torch.rand(20000, generator=torch.Generator().manual_seed(0)))
    x = [sizes * features_of(1, 20000).clamp(-1, 1), torch.tensor([0.0, -0.0, 1e-40, -1e-40])]
    levels = of_torchao(name, 1024, signed).qmap
    middle = (levels[1:] + levels[:-1]) / 2
    beside = [torch.nextafter(middle, torch.full_like(middle, to)) for to in (-2.0, 2.0)]
    x += [levels, middle, *beside]
    values = torch.cat(x) if signed else torch.cat(x).abs()
    block = FORMATS[name].block
    rows = torch.nn.functional.pad(values, (0, -len(values) % (block - 1))).view(-1, block - 1)
    source = torch.cat([rows, torch.ones(len(rows), 1)], 1).flatten()
    theirs = of_torchao(name, source.numel(), signed)
    theirs.copy_(source)
    codes, scales = packed(name, source, signed)
    assert torch.equal(codes.view(torch.uint8), theirs.codes.view(torch.uint8))
    assert torch.equal(scales, theirs.scale)
    back = unpacked(name, codes, scales, source.numel(), signed)
    assert torch.equal(back, theirs.dequantize())


@given(st.integers(1, 700), st.sampled_from(list(STEPS)), st.booleans())
def test_a_moment_of_any_length_is_near_and_is_packed_again_without_a_loss(
    numel: int, name: str, signed: bool
) -> None:
    """A checkpoint holds values; who loads it packs them again."""
    x = features_of(numel, 1024)[:numel] * 1e-3
    x = x if signed else x.abs()
    codes, scales = packed(name, x, signed)
    back = unpacked(name, codes, scales, numel, signed)
    assert codes.nbytes + scales.nbytes == FORMATS[name].nbytes(numel)
    assert (back - x).abs().max() <= STEPS[name] * x.abs().max()
    again = packed(name, back, signed, again=True)
    assert torch.equal(unpacked(name, *again, numel, signed), back)


# -- bf16 by chance --------------------------------------------------------------------------------


def test_rounding_by_chance_is_right_on_average() -> None:
    """Rounding up with probability p, n times, to neighbours a distance d apart: the mean has the
    standard deviation d·sqrt(p(1-p)/n). Six of them are exceeded once in 500 million tries.
    """
    n = 40000
    for i, x in enumerate((1.001, -3.14159, 1e-30)):
        exact = torch.full((n,), x)
        value = exact[0].item()
        found = to_bf16(exact, key_of(0, "weight", str(i)), torch.tensor(7.0), 0).double()
        low, high = found.min().item(), found.max().item()
        p = (value - low) / (high - low)
        assert low < value < high and len(found.unique()) == 2
        off = abs(found.mean().item() - value)
        assert off < 6 * (high - low) * math.sqrt(p * (1 - p) / n), (x, off)


@given(st.integers(0, 1000), st.integers(1, 300), st.integers(1, 299))
def test_an_elements_chance_is_its_own_wherever_a_piece_begins(
    first: int, numel: int, cut: int
) -> None:
    x, key, step = features_of(first, numel), key_of(3, "w", "exp_avg"), torch.tensor(5.0)
    cut = min(cut, numel)
    parts = [to_bf16(x[:cut], key, step, first), to_bf16(x[cut:], key, step, first + cut)]
    assert torch.equal(to_bf16(x, key, step, first), torch.cat(parts))


def test_what_bf16_can_hold_and_what_is_no_number_stays() -> None:
    x = torch.tensor([0.0, -0.0, 1.5, -2.0, math.inf, -math.inf])
    kept = to_bf16(x, 1, torch.tensor(1.0), 0)
    assert torch.equal(kept.float().view(torch.int32), x.view(torch.int32))
    nan = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert to_bf16(nan, 1, torch.tensor(1.0), 0).isnan().all()
