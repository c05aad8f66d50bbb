"""`onefold plan --simulate`: the engine's ledgers beside the plan."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from onefold.cli.app import app

pytestmark = pytest.mark.one_in(2)

ASK = ["plan", "--params", "2e7", "--gpus", "64", "--stage", "3", "--offload", "none", "--simulate"]


def test_the_table_says_exact_line_by_line() -> None:
    shown = CliRunner().invoke(app, ASK)
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    for name in (
        "at rest: master weights",
        "at rest: moments",
        "sent: all-gather",
        "sent: reduce-scatter",
    ):
        row = next(line for line in lines if name in line)
        assert row.rstrip().endswith("exact"), row


@pytest.mark.slow
def test_a_mesh_is_simulated_as_a_rank_of_each_stage_that_differs() -> None:
    ask = ["plan", "gpt2", "--gpus", "16", "--tp", "2", "--pp", "4", "--stage", "1", "--seq", "128"]
    ask += ["--global-batch", "8", "--simulate"]
    shown = CliRunner().invoke(app, ask)
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    for name in ("at rest: master weights", "sent: dp", "sent: pp"):
        rows = [line for line in lines if name in line]
        assert len(rows) > 1 and all(row.rstrip().endswith("exact") for row in rows), rows
    shown = CliRunner().invoke(app, [*ask, "--rank", "13", "--json"])
    (found,) = json.loads(shown.stdout)["simulation"]
    assert (found["rank"], found["stage"], found["exact"]) == (13, 3, True)
    shown = CliRunner().invoke(app, [*ask, "--rank", "16", "--json"])
    assert shown.exit_code == 2 and "rank 16 of 16" in shown.stdout


def test_what_cannot_be_simulated_gets_a_sentence_below_the_plan() -> None:
    shown = CliRunner().invoke(app, [*ASK, "--rank", "64"])
    assert shown.exit_code == 2 and "rank 64 of 64" in shown.output and "at rest" in shown.output
