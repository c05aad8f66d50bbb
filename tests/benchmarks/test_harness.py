"""`benchmarks/harness.py`: turns, figures, files and tables that every benchmark has alike."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness import Run
from benchmarks.study import Comparison, take_over
from benchmarks.study import turns as turns_of

from benchmarks import harness, pages

of_a_peer = partial(Run.of, key="peer")


def run(side: str, number: int, step: float = 1.0, **how: Any) -> Run:
    """A run of two ranks, the second twice as slow."""
    ranks = [{"step_s": [step, step * slower], "losses": [2.0, 1.0]} for slower in (1, 2)]
    return Run(side, number, **{"status": "ok", "ranks": ranks, "wall_s": 60.0, **how})


COLUMNS = {"side": pages.shown("side"), "ms": pages.shown("step", "{:.1f}", 1e-3)}


def options(folder: Path, *arguments: str, **shared: Any) -> Any:
    p = harness.parser("tried", None, name="tried", output=folder, **shared)
    return harness.parsed(p, ["--output", str(folder), *arguments])


def test_every_part_gets_a_round_before_any_gets_a_second_and_a_budget_ends_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def turns(*arguments: str) -> list[tuple[int, str]]:
        found = options(tmp_path, *arguments, rounds=2, budget=None)
        taken = []
        for part, number, side in turns_of(
            found, [Comparison("a"), Comparison("b")], lambda _: ["x"]
        ):
            part.runs.append(run(side, number))
            taken.append((number, part.setting))
        return taken

    assert turns() == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert turns("--budget", "0.5") == [(1, "a"), (1, "b")]
    assert "the budget of 0.5 minutes is spent" in capsys.readouterr().err


def test_sides_run_in_the_other_direction_every_other_round() -> None:
    assert [name for _, name in harness.in_turns("ab", 3)] == ["a", "b", "b", "a", "a", "b"]


def test_a_signal_ends_the_measuring_and_not_the_command() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with harness.stoppable() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.status == 130
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_ratio_is_of_one_round_and_a_side_that_failed_keeps_its_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [
        run("ours", 1, 3.0),
        run("theirs", 1, 1.0),
        run("ours", 2, 20.0),
        run("theirs", 2, 10.0),
    ]
    theirs = harness.by_round(runs, "theirs")
    ratios = harness.ratios(harness.by_round(runs, "ours").values(), theirs)
    assert harness.spread(ratios) == (2.5, 2.0, 3.0)
    assert harness.spread([]) == (None, None, None)
    assert harness.loss_difference(runs, theirs) == 0.0
    runs.append(run("broken", 1, status="failed", error="Traceback\nValueError: boom\nbye"))
    rows = harness.rows_of(
        runs, lambda _, good: {"step": harness.step_seconds(good[0])[0]}, ["gone"]
    )
    assert all(list(row) == ["side", "status", "rounds", "step", "error"] for row in rows)
    assert [(row["side"], row["status"]) for row in rows] == [
        ("ours", "ok"),
        ("theirs", "ok"),
        ("broken", "failed"),
        ("gone", "not installed"),
    ]
    text = pages.table(COLUMNS, rows)
    assert "3000.0" in text and "broken: failed: ValueError: boom" in text
    assert "| gone | not installed |" in text
    pages.show(text)
    told = capsys.readouterr().out
    assert told.startswith("side               ms\n------  -------------\nours           3000.0\n")
    assert "gone    not installed\n\nbroken: failed" in told


def test_results_name_the_command_without_paths_and_are_taken_up_again(tmp_path: Path) -> None:
    found = options(tmp_path, "--rounds", "3", rounds=1, resume=False)
    assert found.command == "python -m benchmarks.tried --output PATH --rounds 3"
    harness.keep(found, "tried/1", lambda result: "page\n", setting=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tried.json", "tried.md"]
    document = json.loads((tmp_path / "tried.json").read_text())
    assert {"schema", "command", "date", "machine", "versions"} <= set(document)
    assert document["command"] in pages.where(document)
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


def test_a_round_of_which_a_part_is_there_is_measured_again_where_its_sides_must_meet(
    tmp_path: Path,
) -> None:
    found = options(tmp_path, rounds=1)
    for whole, expected in ((False, ["b"]), (True, ["a", "b"])):
        part = Comparison("s", [run("a", 1)], missing=["c"])
        turns = turns_of(found, [part], lambda _: "abc", whole_rounds=whole)
        assert [side for _, _, side in turns] == expected


def test_what_an_earlier_command_measured_goes_to_the_comparison_of_the_same_setting() -> None:
    mine = Comparison("s")
    old = [("s", [run("a", 1).to_json("peer"), run("b", 1, status="failed").to_json("peer")])]
    others = take_over([mine], [*old, ("t", [run("c", 1).to_json("peer")])], ["b"], of_a_peer)
    assert [run.side for run in mine.runs] == ["a"], "what failed is measured again"
    assert [(other.setting, other.runs) for other in others] == [("t", [run("c", 1)])]


def test_names_are_chosen_in_their_order_and_the_beginning_of_some_takes_them() -> None:
    known = ("ddp", "ddp-wire", "onefold-1", "onefold-3")
    assert harness.chosen(["onefold", "ddp"], known) == ["ddp", "onefold-1", "onefold-3"]
    with pytest.raises(harness.Refused, match=r"--peers fsdp3: .*ddp-wire"):
        harness.chosen(["fsdp3"], known, "peers")


def test_an_option_is_read_as_its_default_says() -> None:
    p = harness.parser(
        "tried", None, rounds=1, flag=(False, ""), sizes=([1, 2], ""), rate=(0.5, ""),
        kind=("a", "", ["a", "b"]), other=(None, "", int),
    )  # fmt: skip
    found = p.parse_args(["--flag", "--sizes", "3", "4", "--rate", "2", "--other", "5"])
    assert (found.flag, found.sizes, found.rate, found.other) == (True, [3, 4], 2.0, 5)
    assert (found.rounds, found.kind, found.name) == (1, "a", "tried")
    with pytest.raises(SystemExit):
        p.parse_args(["--kind", "c"])


def test_a_plot_is_drawn_of_bars_and_of_curves_and_of_nothing_it_is_none(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bars = pages.Panel("s", "title", {"ddp": 1.0, "ours": 2.0}, marks={"ours": 2.5}, levels=[1])
    curves = pages.Panel("loss", curves={"a": [(0, 2.0), (1, 1.0)]}, dotted=["a"])
    assert pages.plot(tmp_path / "it.png", [[bars, curves]])
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
    assert not pages.plot(tmp_path / "none.png", []) and len(list(tmp_path.iterdir())) == 1
