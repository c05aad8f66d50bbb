"""Stochastic rounding: to a neighbour, unbiased, and the same wherever and however an element is
encoded.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from codec_intervals import (
    BLOCKWISE,
    PROMISES,
    ROUNDED,
    decoded,
    encoded,
    intervals,
    largest_of_blocks,
    rounded,
    roundings,
    steps,
)
from hypothesis import example, given
from hypothesis import strategies as st

from examples import examples
from onefold.quant import Stochastic, codec
from onefold.quant.rounding import Draws

FEW = examples(60)
#: A test of means fails by chance once in so many runs.
CHANCE = 1e-12


def hoeffding(spread: float, count: int, comparisons: int = 1) -> float:
    """How far the mean of `count` independent draws from an interval of length `spread` may be from
    its expectation.
    """
    return spread * math.sqrt(math.log(2 * comparisons / CHANCE) / (2 * count))


def reference(rounding: Stochastic, address: int) -> float:
    """One draw in plain integers, as rounding.py's head says it."""
    first, second = (key & 0xFFFFFFFF for key in rounding.keys)
    pair = address >> 1
    x = (pair & 0xFFFFFFFF) ^ first ^ ((pair >> 32) * 0x9E3779B1 & 0xFFFFFFFF)
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x ^= second
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    x ^= x >> 16
    half = (x >> 16 if address & 1 else x) & 0xFFFF
    return ((half - 65536 if half >> 15 else half) + 0.5) / 65536


@FEW
@given(roundings, st.integers(0, 500), st.integers(1, 90))
@example(Stochastic(1, 2, 2**33 - 11), 0, 50)
@example(Stochastic(0, 0, 2**34 - 2), 1, 9)
def test_a_draw_is_a_hash_of_seed_step_and_address(rounding, start, numel):
    got = Draws(rounding, 90, torch.device("cpu")).of(start, numel)
    assert got.tolist() == [
        reference(rounding, rounding.address + start + i) for i in range(numel)
    ], rounding


@FEW
@given(rounded, intervals(), roundings)
@example(codec("int8"), torch.full((4096,), torch.finfo(torch.float32).max), Stochastic(1))
@example(codec("int4"), torch.full((4096,), torch.finfo(torch.float32).max), Stochastic(2))
@example(codec("fp8"), torch.full((4096,), torch.finfo(torch.float32).max), Stochastic(3))
def test_a_value_goes_to_one_of_its_two_neighbours(by, source, rounding):
    off = (decoded(by, source, rounding=rounding).double() - source.double()).abs()
    scale = steps(by, source, rounding)
    step = torch.maximum(source.double().abs() / 8, scale * 2.0**-9) if by.name == "fp8" else scale
    assert (off <= step + largest_of_blocks(by, source) * 2.0**-22).all(), (by, source, off)


@FEW
@given(rounded, intervals(), roundings)
def test_what_needs_no_rounding_is_left_alone(by, source, rounding):
    once = decoded(by, source)
    again = decoded(by, once, rounding=rounding)
    same = steps(by, once) == steps(by, source)
    assert torch.equal(again[same], once[same]), (by, source)
    assert (decoded(by, source, rounding=rounding)[source == 0] == 0).all(), (by, source)


@FEW
@given(rounded, intervals(), roundings)
def test_equal_seed_step_and_address_give_equal_bytes(by, source, rounding):
    assert torch.equal(encoded(by, source, rounding), encoded(by, source, replace(rounding))), by


def test_another_seed_step_or_address_rounds_otherwise():
    source, base = (
        torch.randn(4096, generator=torch.Generator().manual_seed(0)),
        Stochastic(3, 4, 5),
    )
    for name in ROUNDED:
        seen = [
            encoded(codec(name), source, r)
            for r in (
                base,
                replace(base, seed=7),
                replace(base, step=9),
                replace(base, address=4096),
            )
        ]
        assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i]), name


@pytest.mark.parametrize("name", ROUNDED)
def test_the_mean_of_rounded_values_is_the_value(name):
    """Over addresses, 2**14 for each of 5 values. A draw's 16 bits may add 2**-17 of a step to what
    chance allows (Hoeffding).
    """
    by, count = codec(name), 1 << 14
    values = [0.0, 0.3, 1e-3, -0.77, 5e-6]  # the last one lies below fp8's normal numbers
    # 60 values beside 4 that set the scale
    rows = torch.tensor(values).repeat_interleave(12).repeat(count // 12 + 1)
    source = torch.cat([rows.view(-1, 60), torch.ones(rows.numel() // 60, 4)], 1).flatten()
    source = source[: source.numel() // by.block * by.block]
    got, scale = (
        decoded(by, source, rounding=Stochastic(11, 12, 13)).double(),
        float(steps(by, source)[0]),
    )
    for value in values:
        mine = got[source == value]
        # The gap between the two neighbours that it is rounded to
        spread = 2 * float(
            PROMISES[name].off(torch.tensor(abs(value)).double(), torch.tensor(scale))
        )
        allowed = spread * 2.0**-17 + hoeffding(spread, mine.numel(), 5) + abs(value) * 2.0**-20
        assert abs(float(mine.mean()) - value) <= allowed, (
            name,
            value,
            float(mine.mean()),
            allowed,
        )
        assert abs(value) < 1e-3 or len(mine.unique()) == 2, (name, value, mine.unique())


def test_the_mean_over_steps_is_the_value_at_every_address():
    by, source = codec("int4"), torch.randn(256, generator=torch.Generator().manual_seed(5))
    turns = 300
    mean = (
        sum(decoded(by, source, rounding=Stochastic(1, step)).double() for step in range(turns))
        / turns
    )
    scale = steps(by, source)
    bound = scale * (2.0**-17 + hoeffding(1.0, turns, 256)) + 2.0**-20
    assert ((mean - source.double()).abs() <= bound).all(), (mean - source).abs().max()


def test_draws_are_centred_and_neighbours_and_steps_do_not_know_of_each_other():
    count = 1 << 16
    a, b = (
        Draws(Stochastic(1, step), count, torch.device("cpu")).of(0, count).double()
        for step in (0, 1)
    )
    assert a.abs().max() < 0.5 and a.unique().numel() > 40_000
    assert abs(float(a.mean())) < hoeffding(1.0, count)
    assert abs(float((a * a).mean()) - 1 / 12) < hoeffding(0.25, count)
    for other in (b, a.roll(1), a.roll(2), a.roll(64)):
        assert abs(float((a * other).mean())) < 2 * hoeffding(0.5, count), (
            "products of independent draws have a mean of zero"
        )


def test_rounding_that_cannot_be_had_is_refused():
    source = torch.zeros(4)
    for name in ("plain", *(name for name in BLOCKWISE if name not in ROUNDED)):
        buffer = torch.empty(codec(name).encoded_bytes(4), dtype=torch.uint8)
        with pytest.raises(ValueError, match=f"codec '{name}' rounds to the nearest value only"):
            codec(name).encode(source, buffer, rounding=Stochastic(1))
    for fields, said in (
        ({"seed": -1}, "seed -1"),
        ({"seed": 1, "step": 1.5}, "step 1.5"),
        ({"seed": 1, "address": True}, "address True"),
    ):
        with pytest.raises(ValueError, match=f"was given {said}, expected an integer from 0"):
            Stochastic(**fields)
