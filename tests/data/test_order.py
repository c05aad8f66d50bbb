"""Data order is a function of seed and step alone, and a step's batch is cut, never changed, by
ranks and micro-batches.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.data.order import BLOCK, HELD_OUT, DataOrder, Part, Permutation, parts_of
from onefold.data.samples import eval_batches

sizes = st.tuples(
    st.integers(1, 50), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 30)
)


@given(sizes)
def test_ranks_and_micro_batches_only_cut_the_global_batch(
    size: tuple[int, int, int, int, int],
) -> None:
    samples, micro, world, accumulation, step = size
    order = DataOrder([Part(0, samples)], micro * world * accumulation, seed=7)
    parts = [order.micro_batches(step, rank, world, micro) for rank in range(world)]
    assert {len(part) for part in parts} == {accumulation}
    together = np.concatenate(
        [parts[rank][m] for m in range(accumulation) for rank in range(world)]
    )
    assert together.tolist() == order.at(step).tolist()
    assert (
        together.tolist()
        == DataOrder([Part(0, samples)], micro * world * accumulation, seed=7).at(step).tolist()
    )


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 5))
def test_every_epoch_reads_every_sample_once(samples: int, batch: int, seed: int) -> None:
    order = DataOrder([Part(0, samples)], batch, seed)
    read = np.concatenate([order.at(step) for step in range(3 * samples)])
    for epoch in range(len(read) // samples):
        assert sorted(read[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@given(st.integers(1, 3000), st.integers(0, 1 << 30))
def test_a_permutation_has_every_number_once(count: int, seed: int) -> None:
    some = Permutation.drawn(count, seed)
    whole = some[np.arange(count)]
    assert np.array_equal(np.sort(whole), np.arange(count))
    assert np.array_equal(some[np.arange(count)[::-1]], whole[::-1])


@pytest.mark.parametrize("weights", [(None, None), (0.25, 0.75)])
def test_what_is_held_out_is_never_read_and_parts_have_their_shares(
    weights: tuple[float | None, ...],
) -> None:
    parts = parts_of([700, 300], weights, 0.1, seed=4)
    order = DataOrder(parts, 30, seed=4)
    held = order.read(np.arange(order.samples), held_out=True)
    assert order.samples == 900 and len(np.unique(held)) == 100
    assert np.array_equal(
        np.unique(DataOrder(parts, 7, seed=5).read(np.arange(900), True)), np.unique(held)
    )
    epochs = [order.read(np.arange(900) + 900 * epoch) for epoch in (0, 1)]
    assert not np.array_equal(*epochs) and not np.isin(epochs, held).any()
    if None in weights:
        for epoch in epochs:
            assert len(np.unique(epoch)) == 900
        return
    for first in (0, BLOCK, 7 * BLOCK):
        block = order.read(np.arange(first, first + BLOCK))
        assert (block < 700).sum() == BLOCK // 4, "every block has the shares"
        assert abs((block[:64] < 700).sum() - 16) <= 1, "and nearly so its beginning"
    small = order.read(np.arange(3 * BLOCK))
    small = small[small >= 700]
    for epoch in range(len(small) // 270):
        assert len(np.unique(small[270 * epoch : 270 * (epoch + 1)])) == 270, "read evenly"


@pytest.mark.slow
def test_a_billion_samples_are_ordered_in_little_memory() -> None:
    tracemalloc.start()
    order = DataOrder(parts_of([9 * 10**8, 10**8], (0.5, 0.5), 0.05, seed=1), 64, seed=1)
    read = np.concatenate([order.at(step) for step in (0, 7, 10**7)])
    held = order.read(np.arange(1000), held_out=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20, peak  # 8 GB as an array
    assert len(np.unique(read)) == 192 and 90 < (read < 9 * 10**8).sum() < 102
    assert [part.held for part in order.parts] == [HELD_OUT, HELD_OUT]
    assert len(np.unique(held)) == 1000 and not np.isin(read, held).any()


def test_steps_can_be_asked_for_in_any_order() -> None:
    order = DataOrder([Part(0, 10)], 4, seed=1)
    forwards = [order.at(step).tolist() for step in range(8)]
    assert [order.at(step).tolist() for step in reversed(range(8))] == forwards[::-1]


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
