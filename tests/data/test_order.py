"""Data order is a function of seed and step alone, and a step's batch is cut, never changed, by
ranks and micro-batches.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.data import order as shuffle
from onefold.data.order import HELD_OUT, DataOrder, Share, split
from onefold.data.samples import eval_batches
from onefold.train.early import accumulation_steps
from onefold.wording import TrainError

sizes = st.tuples(
    st.integers(1, 50), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 30)
)


@given(sizes)
def test_ranks_and_micro_batches_only_cut_the_global_batch(
    size: tuple[int, int, int, int, int],
) -> None:
    samples, micro, world, accumulation, step = size
    order = DataOrder(samples, micro * world * accumulation, seed=7)
    parts = [order.micro_batches(step, rank, world, micro) for rank in range(world)]
    assert {len(part) for part in parts} == {accumulation}
    together = np.concatenate(
        [parts[rank][m] for m in range(accumulation) for rank in range(world)]
    )
    assert together.tolist() == order.at(step).tolist()
    assert (
        together.tolist()
        == DataOrder(samples, micro * world * accumulation, seed=7).at(step).tolist()
    )


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 5))
def test_every_epoch_reads_every_sample_once(samples: int, batch: int, seed: int) -> None:
    order = DataOrder(samples, batch, seed)
    read = np.concatenate([order.at(step) for step in range(3 * samples)])
    for epoch in range(len(read) // samples):
        assert sorted(read[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


def test_an_epoch_of_few_samples_is_the_permutation_that_numpy_draws() -> None:
    order = DataOrder(10, 10, seed=5)
    for epoch in (0, 1, 3):
        drawn = np.random.default_rng([5, epoch]).permutation(10)
        assert order.at(epoch).tolist() == drawn.tolist()
    mixed = DataOrder(10, 10, seed=5, mix=(Share(0, 3, 8), Share(3, 9, 2)))
    draw = np.random.default_rng([5, 1])
    some, others = draw.permutation(3)[:2], 3 + draw.permutation(9)[:2]
    parts = np.concatenate([np.tile(np.arange(3), 2), some, others])
    assert mixed.at(1).tolist() == draw.permutation(parts).tolist()


@given(st.integers(1, 3000), st.integers(0, 1 << 30))
def test_a_computed_permutation_has_every_number_once(count: int, seed: int) -> None:
    some = shuffle.Computed(count, np.random.default_rng(seed).integers(0, 1 << 64, 6, np.uint64))
    whole = some[np.arange(count)]
    assert np.array_equal(np.sort(whole), np.arange(count))
    assert np.array_equal(some[np.arange(count)[::-1]], whole[::-1])


def test_a_computed_permutation_is_as_random_as_a_drawn_one() -> None:
    count, keys = 100_000, np.random.default_rng(1).integers(0, 1 << 64, (2, 6), np.uint64)
    one, other = (shuffle.Computed(count, key)[np.arange(count)] for key in keys)
    # Of 10 bins of positions and 10 of numbers each pair has 1,000, give or take
    pairs = np.histogram2d(np.arange(count), one, bins=10)[0]
    assert abs(pairs - count / 100).max() < 5 * (count / 100) ** 0.5
    steps, fixed = np.diff(one), int((one == np.arange(count)).sum())
    assert abs((steps > 0).mean() - 0.5) < 0.01 and (abs(steps) == 1).sum() < 20 and fixed < 10
    assert (one == other).sum() < 10  # another key, another order


@given(st.integers(0, 60), st.data())
def test_what_stays_is_found_without_a_list_of_it(count: int, data: st.DataObject) -> None:
    out = data.draw(st.sets(st.integers(0, count - 1))) if count else set()
    left = [number for number in range(count) if number not in out]
    some = shuffle.AllBut(count, np.array(sorted(out), np.int64))
    assert len(some) == len(left) and some[np.arange(len(left))].tolist() == left
    for edge in range(count + 1):
        assert some.below(edge) == sum(number < edge for number in left)


@pytest.mark.parametrize("weights", [(None, None), (0.2, 0.8)])
def test_large_data_is_split_and_ordered_as_small_data_is(
    weights: tuple[float | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, seed = (700, 300), 4
    for large in (1 << 20, 100):  # drawn, computed
        monkeypatch.setattr(shuffle, "LARGE", large)
        training, held_out, mix = split(counts, weights, 0.1, seed)
        trained = training[np.arange(len(training))]
        assert len(trained) == 900 and len(held_out) == 100
        assert not set(trained.tolist()) & set(held_out.tolist())
        # With shares: 20 of the 70 that the first part holds out, and all 30 of the other
        assert len(np.unique(held_out)) == (50 if mix else 100)
        order = DataOrder(len(training), 30, seed, mix=mix)
        epochs = [
            np.concatenate([order.at(30 * epoch + step) for step in range(30)]) for epoch in (0, 1)
        ]
        assert not np.array_equal(*epochs)
        for epoch in epochs:
            if mix:
                first = (trained[epoch] < 700).sum()
                assert first == 180 and np.bincount(epoch[epoch >= mix[1].first]).max() == 3
            else:
                assert np.array_equal(np.sort(epoch), np.arange(900))


def test_a_billion_samples_are_ordered_in_little_memory() -> None:
    tracemalloc.start()
    training, held_out, mix = split([9 * 10**8, 10**8], (0.5, 0.5), 0.05, seed=1)
    order = DataOrder(len(training), 64, seed=1, mix=mix)
    read = training[np.concatenate([order.at(step) for step in (0, 7, 10**7)])]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20, peak  # 8 GB as an array
    assert len(np.unique(read)) == 192 and 60 < (read < 9 * 10**8).sum() < 132
    assert len(held_out) == 2 * HELD_OUT and not np.isin(read, held_out).any()


def test_steps_can_be_asked_for_in_any_order() -> None:
    order = DataOrder(10, 4, seed=1)
    forwards = [order.at(step).tolist() for step in range(8)]
    assert [order.at(step).tolist() for step in reversed(range(8))] == forwards[::-1]


def test_another_seed_or_epoch_is_another_order() -> None:
    first, second = DataOrder(100, 100, seed=0), DataOrder(100, 100, seed=1)
    assert first.at(0).tolist() != second.at(0).tolist()
    assert first.at(0).tolist() != first.at(1).tolist()


def test_a_global_batch_that_cannot_be_cut_names_those_that_can() -> None:
    with pytest.raises(TrainError, match=r"global-batch 10 .* use 8 or 12"):
        accumulation_steps(10, micro_batch=2, world_size=2)
    with pytest.raises(TrainError, match=r"use 4, or another"):
        accumulation_steps(3, micro_batch=2, world_size=2)
    assert accumulation_steps(12, micro_batch=2, world_size=2) == 3


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 4), st.integers(1, 4))
def test_held_out_samples_count_once_and_ranks_have_equally_many_batches(
    held: int, limit: int, world: int, micro: int
) -> None:
    batches = [eval_batches(held, limit, rank, world, micro) for rank in range(world)]
    assert len({len(b) for b in batches}) == 1
    counted = [int(i) for rank in batches for indices, real in rank for i in indices[:real]]
    assert sorted(counted) == list(range(min(held, limit)))
    assert all(
        len(indices) == micro and (indices < held).all() for rank in batches for indices, _ in rank
    )
