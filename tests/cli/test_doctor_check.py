"""`onefold doctor --check`: the table, the JSON and the exit status say the same, and what cannot be
gets a sentence.
"""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner, Result

from onefold.cli.doctor import doctor_command
from onefold.doctor import checks
from onefold.doctor.checks import LEFT_OUT, OK, WRONG, Outcome


def doctor(*arguments: str) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(doctor_command)
    return CliRunner().invoke(app, ["--device", "cpu", *arguments])


def told(monkeypatch: pytest.MonkeyPatch, *rows: Outcome) -> None:
    """The command gets these rows without any rank."""
    monkeypatch.setattr(checks, "check_here", lambda device, gpus, ranks: list(rows))


@pytest.mark.parametrize(("status", "code"), [(OK, 0), (LEFT_OUT, 0), (WRONG, 1)])
def test_the_table_and_the_json_say_the_same(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = "Do [this]." if status == WRONG else ""
    row = Outcome("stages", status, "a [sentence] of it", advice, 1.25)
    told(monkeypatch, Outcome("collectives", OK, "fine", seconds=0.5), row)
    result = doctor("--check")
    assert result.exit_code == code, result.output
    for words in (
        "checks",
        "collectives",
        status,
        "a [sentence] of it",
        advice,
        "1.25",
    ):
        assert words in result.stdout, (words, result.stdout)
    printed = doctor("--check", "--json")
    report = json.loads(printed.stdout)
    assert printed.exit_code == code
    assert report["ok"] is (code == 0)
    assert (
        report["machine"]["packages"]["torch"]
        and report["machine"]["cpu"]["name"]
        and "date" in report
    )
    assert [(c["name"], c["status"], c["seconds"]) for c in report["checks"]] == [
        ("collectives", OK, 0.5),
        ("stages", status, 1.25),
    ]
