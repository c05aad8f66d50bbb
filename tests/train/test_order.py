"""Data order is a function of seed and step alone, and a step's batch is cut, never changed, by
ranks and micro-batches.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.train.data import DataOrder, eval_batches
from onefold.train.early import accumulation_steps
from onefold.train.errors import TrainError

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
