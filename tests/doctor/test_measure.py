"""The measurement itself, at sizes that take a moment: everything asked for is there, positive, and
leaves nothing behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.comm import MOVES
from onefold.doctor.benchmark_blocks import MIB, Sizes
from onefold.doctor.disk import measure_disk
from onefold.doctor.measure import measure
from onefold.machine.measured import ADAMW_BYTES, AtRanks
from ranks import run_ranks

TINY = Sizes(
    dtypes=("float32",),
    matrices=((8, 8, 8), (16, 8, 32)),
    blocks=((16, 8),),
    gated=((16, 8),),
    chains=((8, 4),),
    copy_bytes=(1024, 65536),
    optimizer_numels=(256, 4096),
    move_bytes=(1024, 65536),
    overlap_bytes=65536,
    disk_bytes=MIB,
    budget_s=0.0,
)


def test_one_rank_measures_everything_but_moves() -> None:
    said: list[str] = []
    at, link = measure(TINY, {1: 1}, torch.device("cpu"), said.append)
    assert link is None
    assert "matrix products, 1 rank" in said
    check(at[0], 1)
    assert at[0].moves == {}
    assert at[0].overlap is None


def measured_on_a_rank(counts: dict[int, int]) -> tuple[tuple[AtRanks, ...], list[str]]:
    said: list[str] = []
    at, _ = measure(TINY, counts, torch.device("cpu"), said.append)
    return at, said


@pytest.mark.slow
def test_ranks_measure_together_and_agree() -> None:
    (first, said), (second, silence), (third, _) = run_ranks(3, measured_on_a_rank, {1: 1, 3: 1})
    assert [a.ranks for a in first] == [1, 3]
    assert second == third == first[1:]  # the slowest rank counts, and all know it
    assert "matrix products, 3 ranks" in said
    assert silence == []
    check(first[1], 3)
    assert set(first[1].moves) == set(MOVES)
    overlap = first[1].overlap
    assert overlap is not None
    assert 0 <= overlap.hidden <= 1 <= overlap.slowdown


def check(at: AtRanks, ranks: int) -> None:
    """The places are those asked for; that figures are positive their classes have checked."""
    assert (at.ranks, at.threads) == (ranks, 1)
    assert tuple((p.m, p.n, p.k) for p in at.matrices) == TINY.matrices
    assert tuple((p.hidden, p.tokens) for p in at.blocks) == TINY.blocks
    assert len(at.passes) == len(TINY.dtypes) * len((*TINY.blocks, *TINY.gated, *TINY.chains))
    assert all(p.kernels.others > 0 for p in at.passes)
    assert [x for x, _ in at.copies] == [2 * b for b in TINY.copy_bytes]
    assert [x for x, _ in at.optimizer] == [ADAMW_BYTES * n for n in TINY.optimizer_numels]


def test_a_disk_is_measured_and_left_as_it_was_also_where_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measure_disk(tmp_path, 8 * MIB)
    assert found.write > 0 < found.read
    with pytest.raises(ValueError, match="there is no such folder"):
        measure_disk(tmp_path / "nowhere", MIB)

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    with pytest.raises(ValueError, match="No space left on device"):
        measure_disk(tmp_path, 8 * MIB)
    assert list(tmp_path.iterdir()) == []
