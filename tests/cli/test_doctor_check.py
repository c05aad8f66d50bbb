"""`onefold doctor --check`: the table, the JSON and the exit status say the same, and what cannot be
gets a sentence.
"""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner, Result

from onefold.cli.app import app
from onefold.doctor import checks
from onefold.doctor.checks import LEFT_OUT, OK, WRONG, Outcome


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", "--device", "cpu", *arguments])


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


def test_a_rank_of_a_launcher_that_shows_nothing_asks_no_gpu_for_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The question alone takes hundreds of megabytes of that GPU, for as long as the rank lives."""
    asked, seen = list[int](), list[tuple[str, int]]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: asked.append(index) or (1, 2))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Gpu())
    monkeypatch.setattr(
        checks, "check_launched", lambda device, gpus: seen.append((device, gpus)) or []
    )
    for rank, due in (("1", []), ("0", [0, 1])):
        launcher = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
        for name, value in launcher.items():
            monkeypatch.setenv(name, value)
        result = doctor("--check")
        assert result.exit_code == 0, result.output
        assert asked == due and bool(result.stdout) is bool(due), (rank, asked, result.stdout)
    assert seen == [("cpu", 2)] * 2


class Gpu:
    """What torch says of one."""

    name, major, minor = "a GPU", 9, 0
