"""`onefold report`: what it prints, in words and in JSON, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

typer = pytest.importorskip("typer", reason="typer is not installed")
pytest.importorskip("plotly", reason="plotly is not installed")
from synthetic_run import write_run
from typer.testing import CliRunner

from onefold.cli.app import app


def test_it_writes_the_page_and_says_where(tmp_path: Path) -> None:
    write_run(tmp_path)
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (
        done.output == f"report {tmp_path / 'report.html'}\n"
        and (tmp_path / "report.html").stat().st_size > 1e6
    )


def test_json_holds_the_path(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=1)
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--json"])
    assert json.loads(done.output) == {"event": "report", "report": str(tmp_path / "report.html")}


def test_a_folder_that_is_no_run_ends_with_a_sentence_and_status_2(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path / "nothing")])
    assert done.exit_code == 2 and "is not the output folder of a run" in done.output
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--json"])
    assert done.exit_code == 2
    assert json.loads(done.stdout)["event"] == "error"
