"""`benchmarks/harness.py`: turns, figures, files and tables that every benchmark has alike."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness


@dataclass
class Run:
    side: str
    round: int
    step: float = 1.0
    status: str = "ok"
    error: str = ""
    wall_s: float = 60.0
    ranks: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = [
            {"step_s": [self.step, self.step * slower], "losses": [2.0, 1.0]} for slower in (1, 2)
        ]


@dataclass
class Row:
    side: str
    status: str
    step: float | None = None
    error: str = ""


COLUMNS = {"side": harness.shown("side"), "ms": harness.shown("step", "{:.1f}", 1e-3)}


def options(folder: Path, *arguments: str, **shared: Any) -> Any:
    p = harness.parser("tried", None, name="tried", output=folder, **shared)
    return harness.parsed(p, ["--output", str(folder), *arguments])


def test_every_part_gets_a_round_before_any_gets_a_second_and_a_budget_ends_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def turns(*arguments: str) -> list[tuple[int, str]]:
        found = options(tmp_path, *arguments, rounds=2, budget=None)
        taken = harness.rounds(
            found,
            ["a", "b"],
            lambda part, number: ["x"],
            lambda part, number, _: [Run("x", number)],
        )
        return [(number, part) for number, part, _ in taken]

    assert turns() == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert turns("--budget", "0.5") == []
    assert "the budget of 0.5 minutes is spent" in capsys.readouterr().err


def test_sides_run_in_the_other_direction_every_other_round() -> None:
    assert [name for _, name in harness.in_turns("ab", 3)] == ["a", "b", "b", "a", "a", "b"]


def test_a_signal_ends_the_measuring_and_not_the_command() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with harness.stoppable() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.status == 130
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_ratio_is_of_one_round_and_a_side_that_failed_keeps_its_row() -> None:
    runs = [
        Run("ours", 1, 3.0),
        Run("theirs", 1, 1.0),
        Run("ours", 2, 20.0),
        Run("theirs", 2, 10.0),
    ]
    theirs = harness.by_round(runs, "theirs")
    ratios = harness.ratios(harness.by_round(runs, "ours").values(), theirs)
    assert harness.spread(ratios) == (2.5, 2.0, 3.0)
    assert harness.spread([]) == (None, None, None)
    assert harness.loss_difference(runs, theirs) == 0.0
    runs.append(Run("broken", 1, status="failed", error="Traceback\nValueError: boom\nbye"))
    rows = harness.sides_of(
        runs, lambda side, good: Row(side, "ok", harness.step_seconds(good[0])[0]), Row, ["gone"]
    )
    assert [(row.side, row.status) for row in rows] == [
        ("ours", "ok"),
        ("theirs", "ok"),
        ("broken", "failed"),
        ("gone", "not installed"),
    ]
    text = harness.text_table(COLUMNS, rows)
    assert "3000.0" in text and "broken: failed: ValueError: boom" in text
    assert "| gone | not installed |" in harness.markdown_table(COLUMNS, rows)


def test_results_name_the_command_without_paths_and_are_taken_up_again(tmp_path: Path) -> None:
    found = options(tmp_path, "--rounds", "3", rounds=1, resume=False)
    assert found.command == "python -m benchmarks.tried --output PATH --rounds 3"
    harness.keep(found, {**harness.about(found, "tried/1"), "setting": 1}, "page\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tried.json", "tried.md"]
    document = json.loads((tmp_path / "tried.json").read_text())
    assert {"schema", "command", "date", "machine", "versions"} <= set(document)
    assert document["command"] in harness.where(document)
    assert harness.earlier(found, "tried/1") is None, "not asked for"
    again = options(tmp_path, "--resume", resume=False)
    old = harness.earlier(again, "tried/1", setting=1)
    assert old is not None and old["setting"] == 1
    for schema, setting in (("tried/2", 1), ("tried/1", 2)):
        with pytest.raises(ValueError, match="choose another --name"):
            harness.earlier(again, schema, setting=setting)


def test_a_number_that_is_too_small_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--rounds 0: expected at least 1"):
        harness.check_at_least(options(tmp_path, "--rounds", "0", rounds=1), 1, "rounds")
