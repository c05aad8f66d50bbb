"""The chapters of the first hour of `benchmarks/gpu.py` are those of `onefold doctor --check`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.on_gpu import chapters as gpu_chapters
from test_gpu_benchmark import options_of, tiny

from benchmarks import gpu
from onefold.doctor import chapters
from onefold.doctor.chapter_runs import FAILED, LIMIT, RanksRun


@pytest.mark.slow
def test_a_chapter_joins_the_report_of_the_others(tmp_path: Path) -> None:
    found = tiny(tmp_path, "--only", "exchange")
    (table,) = found["tables"]
    assert [row[1] for row in table["rows"]] == ["all-to-all and sum", "reduce-scatter"] * 2
    (outcome,) = found["runs"]["exchange"]
    assert (outcome["peer"], outcome["status"], len(outcome["ranks"])) == ("exchange", "ok", 2)


def test_the_first_hour_stands_before_the_comparisons_in_its_order() -> None:
    assert gpu.USUAL[:8] == ("check", *gpu_chapters.CHAPTERS) and "ranks" in gpu.USUAL[8:]


def test_a_chapter_runs_as_long_as_the_whole_run_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(name: str, scope: Any, ranks: int, *job: Any) -> RanksRun:
        asked.append((scope.tiny, ranks, scope.steps, scope.limit, scope.deadline))
        return RanksRun(name, FAILED, error="rank 0 raised", seconds=1.0)

    monkeypatch.setattr(chapters, "run_ranks", run)
    options = options_of("--device", "cpu", "--steps", "8")
    options.tiny, begun = True, time.monotonic()
    table, outcomes = gpu_chapters.of_the_first_hour("block", options, 100.0)
    assert [row[2] for row in table.rows] == [FAILED, FAILED]
    assert [(o["peer"], o["status"], o["error"]) for o in outcomes] == [
        ("block, 16 tokens", FAILED, "rank 0 raised"),
        ("block, 32 tokens", FAILED, "rank 0 raised"),
    ]
    tiny_, ranks, steps, limit, deadline = asked[0]
    assert (tiny_, ranks, steps, limit) == (True, 2, 4, LIMIT)
    assert begun + 100 <= deadline < begun + 160
