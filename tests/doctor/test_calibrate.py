"""Which numbers of ranks a calibration measures with, and the threads of each."""

from __future__ import annotations

import pytest

from onefold.doctor.calibrate import default_ranks, threads_of


@pytest.mark.parametrize("most", [1, 2, 3, 4, 8, 64, 1000])
def test_a_few_numbers_of_ranks_are_measured_from_one_to_all(most: int) -> None:
    counts = default_ranks(most)
    assert counts[0] == 1 and counts[-1] == most
    assert counts == sorted(set(counts)) and len(counts) <= 4


def test_threads_are_those_of_a_training_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_of([1, 2, 8], 4) == {1: 4, 2: 2, 8: 1}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_of([1, 2], 4) == {1: 3, 2: 3}
