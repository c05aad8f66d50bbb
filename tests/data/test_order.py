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
from onefold.data.order import HELD_OUT, DataOrder, split
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


@given(st.integers(1, 3000), st.integers(0, 1 << 30))
def test_a_computed_permutation_has_every_number_once(count: int, seed: int) -> None:
    some = shuffle.Computed(count, np.random.default_rng(seed).integers(0, 1 << 64, 6, np.uint64))
    whole = some[np.arange(count)]
    assert np.array_equal(np.sort(whole), np.arange(count))
    assert np.array_equal(some[np.arange(count)[::-1]], whole[::-1])


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


@pytest.mark.slow
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
