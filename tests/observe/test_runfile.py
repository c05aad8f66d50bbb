"""What a run leaves behind is read back as it was, and what cannot be read is named in a
sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import account, planned, recorded, write_run

from onefold.observe.runfile import RunFileError, read_observed, write_observed
from onefold.plan.schema import Account
from onefold.recipe import Recipe


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    run = read_observed(write_run(tmp_path))
    assert run.world_size == 4 and run.facts["recipe"] == Recipe.zero(3).describe()
    assert run.plan == planned()
    assert run.facts["model"] == "SmolLM2-135M"
    for seen in run.ranks:
        step = recorded(seen.rank)
        assert seen.measured == account(step)
        assert seen.step == step


def test_each_rank_writes_its_own_file_in_any_order(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        write_observed(tmp_path, rank, 12, Account(rest={"moments": rank}))
    assert [r.rank for r in read_observed(tmp_path).ranks] == [0, 2, 10]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")], "a draft was left behind"
    write_observed(tmp_path, 0, 3, Account())
    assert [r.rank for r in read_observed(tmp_path).ranks] == [0, 2], "of this run alone"


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def act(text: str) -> str:
        values = json.loads(text)
        change(values)
        return json.dumps(values)

    return act


@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        ("observed.json", lambda text: text[: len(text) // 2]),
        ("observed.json", lambda text: "[1, 2]"),
        ("observed.json", changed(lambda v: v.pop("world_size"))),
        ("observed-rank1.json", changed(lambda v: v["step"]["moves"].append(["all-gather"]))),
    ],
)
def test_a_spoilt_file_is_named(tmp_path: Path, file: str, spoil: Callable[[str], str]) -> None:
    path = write_run(tmp_path, ranks=2) / file
    path.write_text(spoil(path.read_text()))
    with pytest.raises(RunFileError, match="was cut short, changed, or written by another"):
        read_observed(tmp_path)
