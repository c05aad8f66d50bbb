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

from onefold.observe import (
    RunFileError,
    gather_ranks,
    read_observed,
    write_observed,
)
from onefold.plan.schema import Account


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    run = read_observed(write_run(tmp_path))
    assert (run.world_size, run.stage, run.missing_ranks) == (4, 3, [])
    assert run.plan == planned()
    assert run.facts["model"] == "SmolLM2-135M"
    for seen in run.ranks:
        step = recorded(seen.rank)
        assert seen.measured == account(step)
        assert seen.traffic == step.by_unit()
        assert seen.step is not None
        assert seen.step.peak() == step.peak() and seen.step.wire() == step.wire()
        assert seen.step.exposed == pytest.approx(step.exposed, abs=1e-6)


def test_each_rank_writes_its_own_file_in_any_order(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        write_observed(tmp_path, rank, 12, Account(rest={"moments": rank}))
    assert [r.rank for r in gather_ranks(tmp_path)] == [0, 2, 10]
    assert read_observed(tmp_path).missing_ranks == [1, 3, 4, 5, 6, 7, 8, 9, 11]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")], "a draft was left behind"


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def act(text: str) -> str:
        values = json.loads(text)
        change(values)
        return json.dumps(values)

    return act


@pytest.mark.parametrize(
    ("file", "spoil", "said"),
    [
        (
            "observed.json",
            lambda text: text[: len(text) // 2],
            "is not whole JSON .* delete it, or run again",
        ),
        (
            "observed.json",
            changed(lambda v: v.update(version=99)),
            "has version 99, this Onefold reads version 1",
        ),
        ("observed.json", lambda text: "[1, 2]", "not a file that Onefold wrote"),
        ("observed.json", changed(lambda v: v.pop("recipe")), "'recipe' is missing"),
        (
            "observed-rank1.json",
            changed(lambda v: v["step"]["moves"].append(["all-gather"])),
            "does not hold what its version promises",
        ),
    ],
)
def test_a_spoilt_file_is_named_with_what_is_wrong(
    tmp_path: Path, file: str, spoil: Callable[[str], str], said: str
) -> None:
    path = write_run(tmp_path, ranks=2) / file
    path.write_text(spoil(path.read_text()))
    with pytest.raises(RunFileError, match=said) as caught:
        read_observed(tmp_path)
    assert str(path) in str(caught.value)
