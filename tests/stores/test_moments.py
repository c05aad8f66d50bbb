"""Moments in 8 and 4 bits and in bf16: the nearest values of their maps, which pack to the same codes
again; and rounding by chance that is right on average and depends on step and place alone.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.quant.bf16_rounding import key_of, to_bf16
from onefold.quant.moment_packing import decode, encode, values_of
from onefold.recipe.moments import FORMATS
from zoo import features_of

#: How far a packed value may be off, as a share of its block's largest.
STEPS = {"int8": 0.015, "int4": 0.17}


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", STEPS)
def test_a_packed_moment_is_the_nearest_value_of_its_map(name: str, signed: bool) -> None:
    """Of random numbers of many sizes, and of all places where rounding changes with their
    neighbours. A one in each block makes its scale one.
    """
    format = FORMATS[name]
    sizes = 10.0 ** -(8 * torch.rand(20000, generator=torch.Generator().manual_seed(0)))
    x = [sizes * features_of(1, 20000).clamp(-1, 1), torch.tensor([0.0, -0.0, 1e-40, -1e-40])]
    levels = values_of(8 // format.grain, signed)
    assert levels[-1] == 1 and torch.equal(levels, levels.unique())
    assert not signed or torch.equal(levels, -levels.flip(0))
    middle = (levels[1:] + levels[:-1]) / 2
    beside = [torch.nextafter(middle, torch.full_like(middle, to)) for to in (-2.0, 2.0)]
    x += [levels, middle, *beside]
    values = torch.cat(x) if signed else torch.cat(x).abs()
    rows = torch.nn.functional.pad(values, (0, -len(values) % (format.block - 1)))
    rows = rows.view(-1, format.block - 1)
    source = torch.cat([rows, torch.ones(len(rows), 1)], 1).flatten()
    back = decode(format, *encode(FORMATS[name], source, signed), source.numel(), signed)
    source, back, levels = source.double(), back.double(), levels.double()
    off = (source[:, None] - levels).abs().amin(1)
    # In the middle between two values the borders are rounded to fp32
    assert ((source - back).abs() <= off + 3e-7 * source.abs()).all()


def test_what_is_no_number_makes_its_block_none_and_no_other() -> None:
    for name in STEPS:
        x = features_of(0, 3 * FORMATS[name].block)
        x[FORMATS[name].block] = math.nan
        back = decode(FORMATS[name], *encode(FORMATS[name], x, True), x.numel(), True)
        wrong = back.isnan().view(3, -1)
        assert wrong[1].all() and not wrong[0].any() and not wrong[2].any()


@given(st.integers(1, 700), st.sampled_from(list(STEPS)), st.booleans(), st.booleans())
def test_a_moment_of_any_length_is_near_and_is_packed_again_without_a_loss(
    numel: int, name: str, signed: bool, zeros: bool
) -> None:
    """A checkpoint holds values; who loads it packs them again."""
    x = features_of(numel, 1024)[:numel] * 1e-3
    x = (x if signed else x.abs()) * (not zeros)
    codes, scales = encode(FORMATS[name], x, signed)
    back = decode(FORMATS[name], codes, scales, numel, signed)
    assert codes.nbytes + scales.nbytes == FORMATS[name].nbytes(numel)
    assert (back - x).abs().max() <= STEPS[name] * x.abs().max() + 1e-12
    again = encode(FORMATS[name], back, signed)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


# -- bf16 by chance --------------------------------------------------------------------------------


def test_rounding_by_chance_is_right_on_average() -> None:
    """Rounding up with probability p, n times, to neighbours a distance d apart: the mean has the
    standard deviation d·sqrt(p(1-p)/n). Six of them are exceeded once in 500 million tries.
    """
    n = 40000
    for i, x in enumerate((1.001, -3.14159, 1e-30)):
        exact = torch.full((n,), x)
        value = exact[0].item()
        found = to_bf16(exact, key_of("weight", str(i)), torch.tensor(7.0), 0).double()
        low, high = found.min().item(), found.max().item()
        p = (value - low) / (high - low)
        assert low < value < high and len(found.unique()) == 2
        off = abs(found.mean().item() - value)
        assert off < 6 * (high - low) * math.sqrt(p * (1 - p) / n), (x, off)


@given(st.integers(0, 1000), st.integers(1, 300), st.integers(1, 299))
def test_an_elements_chance_is_its_own_wherever_a_piece_begins(
    first: int, numel: int, cut: int
) -> None:
    x, key, step = features_of(first, numel), key_of("w", "exp_avg"), torch.tensor(5.0)
    cut = min(cut, numel)
    parts = [to_bf16(x[:cut], key, step, first), to_bf16(x[cut:], key, step, first + cut)]
    assert torch.equal(to_bf16(x, key, step, first), torch.cat(parts))


def test_what_bf16_can_hold_and_what_is_no_number_stays() -> None:
    x = torch.tensor([0.0, -0.0, 1.5, -2.0, math.inf, -math.inf])
    kept = to_bf16(x, 1, torch.tensor(1.0), 0)
    assert torch.equal(kept.float().view(torch.int32), x.view(torch.int32))
    nan = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert to_bf16(nan, 1, torch.tensor(1.0), 0).isnan().all()
