"""`sum_parts`: rank order, one rounding, no other memory than it was given; the bits that a loop of
torch's additions has.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from onefold.comm import sums
from onefold.comm.sums import add_up, sum_parts
from onefold.quant.kernel_check import parts_of, same

LOW = (torch.float32, torch.bfloat16, torch.float16)


def one_by_one(parts, out, scale, round_to, dtype):
    """What a reader would write: an accumulator, an addition a rank, a factor, conversions."""
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total += part
    total *= scale
    if round_to is not None:
        total = total.to(round_to).to(dtype)
    return total.to(out.dtype)


def parts_for(ranks, n, dtype, seed=3):
    return parts_of(ranks, n, dtype, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [*LOW, torch.float64], ids=str)
def test_a_sum_has_the_bits_of_one_addition_a_rank_in_rank_order(dtype):
    """In every accumulation dtype, from and to every dtype, rounded on the way or not."""
    for wire, out_dtype, round_to, ranks in product(LOW, LOW, (None, *LOW), (1, 2, 5)):
        parts = parts_for(ranks, 300, wire)
        out = torch.empty(300, dtype=out_dtype)
        sum_parts(parts, out, 1 / 3, round_to=round_to, dtype=dtype)
        expected = one_by_one(list(parts), out, 1 / 3, round_to, dtype)
        assert same(out, expected), (
            wire,
            out_dtype,
            round_to,
            ranks,
            out[out != expected],
            expected[out != expected],
        )


@pytest.mark.parametrize("rank", [0, 2, 4])
@pytest.mark.parametrize("own_dtype", LOW, ids=str)
def test_an_own_part_takes_its_ranks_place_among_the_others(rank, own_dtype):
    parts = list(parts_for(5, 200, torch.bfloat16))
    own = parts_for(1, 200, own_dtype, seed=4)[0]
    others = torch.stack(parts[:4])
    out = torch.empty(200)
    sum_parts(others, out, 0.2, own=own, rank=rank)
    everybody = list(others)
    everybody.insert(rank, own)
    assert same(out, one_by_one(everybody, out, 0.2, None, torch.float32))


def test_rows_may_lie_apart_and_start_anywhere():
    parts = parts_for(4, 101, torch.float32)
    buffer = torch.full((3 + 4 * 128,), torch.nan)[3:].view(4, 128)
    buffer[:, :101] = parts
    out = torch.full((103,), 7.0)
    sum_parts(buffer[:, :101], out[1:102], 0.25)
    assert (
        same(out[1:102], one_by_one(list(parts), out, 0.25, None, torch.float32))
        and out[0] == out[102] == 7.0
    )


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_the_sum_may_take_the_place_of_any_part(at, dtype):
    parts = parts_for(4, 150, dtype)
    expected = one_by_one(list(parts), parts[at], 0.5, None, torch.float32)
    untouched = [parts[i].clone() for i in range(4) if i != at]
    sum_parts(parts, parts[at], 0.5)
    assert same(parts[at], expected)
    assert all(
        same(a, b) for a, b in zip(untouched, (parts[i] for i in range(4) if i != at), strict=True)
    )
    parts = parts_for(4, 150, dtype)
    own = parts[at].clone()
    sum_parts(torch.cat([parts[:at], parts[at + 1 :]]), own, 0.5, own=own, rank=at)
    assert same(own, expected)


def test_fp32_parts_are_summed_in_place_of_the_first_or_second_without_other_memory(monkeypatch):
    monkeypatch.setattr(torch, "empty_like", None)
    for at in (0, 1):
        parts = parts_for(4, 150, torch.float32)
        expected = one_by_one(list(parts), parts[at], 1.0, None, torch.float32)
        add_up(list(parts), parts[at])
        assert same(parts[at], expected)


def test_long_parts_are_summed_in_slabs_with_the_bits_of_the_whole(monkeypatch):
    parts = parts_for(3, 1000, torch.bfloat16)
    for out_dtype, round_to in product(LOW, (None, torch.float16)):
        whole, cut = (torch.empty(1000, dtype=out_dtype) for _ in range(2))
        sum_parts(parts, whole, 1 / 3, round_to=round_to)
        monkeypatch.setattr(sums, "CPU_SLAB", 64)
        monkeypatch.setattr(sums, "_SMALL", 0)
        sum_parts(parts, cut, 1 / 3, round_to=round_to)
        monkeypatch.undo()
        assert same(whole, cut)


def test_parts_that_lie_anywhere_are_added_up_in_the_order_they_are_given_in():
    parts = [
        parts_for(1, 90, dtype, seed)[0]
        for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64, torch.float16))
    ]
    for order in (parts, parts[::-1]):
        out = torch.empty(90)
        add_up(order, out, 0.25, round_to=torch.bfloat16)
        assert same(out, one_by_one(order, out, 0.25, torch.bfloat16, torch.float32))


def test_the_sum_of_minus_zero_is_minus_zero():
    out = torch.ones(4)
    sum_parts(torch.full((3, 4), -0.0), out)
    assert out.signbit().all() and (out == 0).all(), out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            lambda: (torch.zeros(5), torch.zeros(5)),
            r"shape \(5,\) cannot be summed into \(5,\): expected \[ranks, n\] and \[n\]",
        ),
        (
            lambda: (torch.zeros(2, 5), torch.zeros(4)),
            r"shape \(2, 5\) cannot be summed into \(4,\)",
        ),
        (lambda: (torch.zeros(0, 5), torch.zeros(5)), r"shape \(0, 5\) cannot be summed"),
        (
            lambda: (torch.zeros(5, 2).t(), torch.zeros(5)),
            r"strides \(1, 2\) .* expected contiguous rows",
        ),
        (
            lambda: (torch.zeros(2, 5), torch.zeros(5, device="meta")),
            r"several devices \(cpu, meta\), expected one",
        ),
    ],
)
def test_what_cannot_be_summed_is_said(arguments, said):
    with pytest.raises(ValueError, match=said):
        sum_parts(*arguments())


def test_an_own_part_that_does_not_fit_is_said():
    with pytest.raises(ValueError, match=r"own of shape \(4,\) cannot be summed into \(5,\)"):
        sum_parts(torch.zeros(2, 5), torch.zeros(5), own=torch.zeros(4))
    with pytest.raises(
        ValueError,
        match=r"rank 3 was given with the parts of 3 ranks, expected a position from 0 to 2",
    ):
        sum_parts(torch.zeros(2, 5), torch.zeros(5), own=torch.zeros(5), rank=3)
    out = torch.zeros(5)
    sum_parts(torch.zeros(0, 5), out, own=torch.ones(5))  # a group of one rank
    assert (out == 1).all()
    sum_parts(torch.zeros(2, 0), torch.zeros(0))  # nothing to sum
