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
    assert any("takes" in line and "gathered units" in line for line in lines)


@pytest.mark.slow
def test_a_mesh_is_simulated_as_a_rank_of_each_stage_that_differs() -> None:
    ask = ["plan", "gpt2", "--gpus", "16", "--tp", "2", "--pp", "4", "--stage", "1", "--seq", "128"]
    ask += ["--global-batch", "8", "--simulate"]
    shown = CliRunner().invoke(app, ask)
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    for name in ("at rest: master weights", "sent along dp", "sent along pp"):
        row = next(line for line in lines if name in line)
        assert row.rstrip().endswith("exact") and len(row.split("  ")) > 4, row
    assert "stage 0" in shown.output and "stage 3" in shown.output
    shown = CliRunner().invoke(app, [*ask, "--rank", "13", "--json"])
    (found,) = json.loads(shown.stdout)["simulation"]
    assert (found["rank"], found["stage"], found["exact"]) == (13, 3, True)
    shown = CliRunner().invoke(app, [*ask, "--rank", "16", "--json"])
    assert shown.exit_code == 2 and "rank 16 of 16" in shown.stdout


def test_json_has_every_event_of_the_asked_rank() -> None:
    shown = CliRunner().invoke(app, [*ASK, "--rank", "63", "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)["simulation"]
    assert found["exact"] is True and found["rank"] == 63 and found["ranks"] == 64
    assert found["account"]["wire"] == found["predicted"]["wire"]
    assert sum(nbytes for _, _, nbytes, moved in found["events"] if moved) == sum(
        found["account"]["wire"].values()
    )
    held = sum(nbytes for _, _, nbytes, moved in found["events"] if not moved)
    assert held == 0  # a step ends as it began


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rank", "64"], "rank 64 of 64"),
        (["--optimizer", "lion"], "expected one of"),
    ],
    ids=str,
)
def test_what_cannot_be_simulated_gets_a_sentence(options: list[str], says: str) -> None:
    shown = CliRunner().invoke(app, [*ASK, *options])
    assert shown.exit_code == 2
    assert says in shown.output
    assert "at rest" in shown.output, "the plan stands all the same"
    found = json.loads(CliRunner().invoke(app, [*ASK, *options, "--json"]).stdout)
    assert found["event"] == "error" and says in found["message"] and len(found["stages"]) == 4
