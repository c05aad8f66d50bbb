"""`onefold doctor --check`: the table, the JSON and the exit status say the same, and what cannot be
gets a sentence.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from onefold.cli import doctor as command
from onefold.cli import doctor_check
from onefold.cli.doctor import doctor_command
from onefold.doctor import chapters, coordinator
from onefold.doctor.chapter_runs import CHAPTERS, DONE, RanksRun, Scope
from onefold.doctor.chapters import Chapter
from onefold.doctor.checks import LEFT_OUT, OK, WRONG, Outcome
from onefold.doctor.ranks import Stopped


def doctor(*arguments: str) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(doctor_command)
    return CliRunner().invoke(app, ["--device", "cpu", *arguments])


def told(monkeypatch: pytest.MonkeyPatch, *rows: Outcome) -> None:
    """The command gets these rows without any rank."""
    monkeypatch.setattr(doctor_check, "check_here", lambda found, ranks, say: list(rows))


@pytest.mark.parametrize(("status", "code"), [(OK, 0), (LEFT_OUT, 0), (WRONG, 1)])
def test_the_table_and_the_json_say_the_same(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    advice = "Do [this]." if status == WRONG else ""
    row = Outcome("stages", status, "a [sentence] of it", advice, 1.25, {"weights": 1e-3})
    told(monkeypatch, Outcome("collectives", OK, "fine", seconds=0.5), row)
    result = doctor("--check", "--json", str(tmp_path / "check.json"))
    assert result.exit_code == code, result.output
    for words in (
        "Checks",
        "collectives",
        status,
        "a [sentence] of it",
        advice,
        "1.2",
        f"saved to {tmp_path / 'check.json'}",
    ):
        assert words in result.stdout, (words, result.stdout)
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["schema"] == coordinator.SCHEMA and report["ok"] is (code == 0)
    assert (
        report["machine"]["packages"]["torch"]
        and report["machine"]["cpu"]["name"]
        and "date" in report
    )
    assert [(c["name"], c["status"], c["seconds"]) for c in report["checks"]] == [
        ("collectives", OK, 0.5),
        ("stages", status, 1.25),
    ]
    assert report["checks"][1]["figures"] == {"weights": 1e-3}
    printed = doctor("--check", "--json")
    assert printed.exit_code == code and json.loads(printed.stdout)["checks"] == report["checks"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--check", "--calibrate"], "--check and --calibrate: one at a time"),
        (["--check", "--output", "f", "--disk", "."], "--check and --output and --disk"),
        (["--rehearse"], "--rehearse: add --check"),
        (["--check", "--quick", "--rehearse"], "--rehearse: --quick leaves out what it rehearses"),
        (["--check", "here.json"], "a file is written by --check --json FILE only"),
        (["--json", "here.json"], "a file is written by --check --json FILE only"),
        (["--check", "--json", "."], "this is a folder"),
        (["--check", "--json", "/nowhere/at/all.json"], "its folder is not there"),
        (["--check", "--ranks", "1,2"], "--ranks 1,2: expected one number"),
        (["--check", "--ranks", "0"], "--ranks 0: expected a number of ranks, 1 or more"),
    ],
)
def test_what_cannot_be_gets_a_sentence(arguments: list[str], said: str) -> None:
    result = doctor(*arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr, result.stderr


# -- the chapters ----------------------------------------------------------------------------------


FINE = Outcome("collectives", OK, "fine", seconds=0.5)


def with_gpus(monkeypatch: pytest.MonkeyPatch, *found: Chapter, ends: Any = None) -> list[Scope]:
    """The machine has two GPUs, all checks are fine, and the chapters find this. Returns with which
    scopes they were asked.
    """
    real, asked = command._facts, []
    two = {
        "device": "cuda",
        "gpus": 2 * [{"name": "H100", "capability": "9.0", "total": 1, "free": 1}],
    }
    monkeypatch.setattr(command, "_facts", lambda device: real("cpu") | two)
    told(monkeypatch, FINE)

    def measure(scope: Scope) -> Iterator[Chapter]:
        asked.append(scope)
        yield from found
        if ends is not None:
            raise ends

    monkeypatch.setattr(chapters, "measure_chapters", measure)
    return asked


def found(name: str, status: str) -> Chapter:
    error = "" if status == DONE else "RuntimeError: a [wheel] came off"
    runs = [RanksRun(f"{name} 1", status, [{"step_s": 0.5}], error, 1.0)]
    return Chapter(name, f"The [{name}]", ("step ms", "expected"), [["512.25", "500"]], runs, 2.0)


def test_a_signal_keeps_what_was_found_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_gpus(monkeypatch, found("block", DONE), ends=Stopped(signal.SIGTERM))
    result = doctor("--check", "--json", str(tmp_path / "check.json"))
    assert result.exit_code == 128 + signal.SIGTERM
    assert "collectives" in result.stdout and "512.25" in result.stdout
    rest = ", ".join(name for name in CHAPTERS if name != "block")
    assert f"not measured ({rest}): stopped by SIGTERM" in result.stdout
    report = json.loads((tmp_path / "check.json").read_text())
    assert [c["name"] for c in report["checks"]] == ["collectives"]
    assert [c["name"] for c in report["chapters"]] == ["block"]
    assert report["chapters_left_out"] == "stopped by SIGTERM"
