"""What a run leaves behind is read back as it was, and what cannot be read is named in a
sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from observed_loops import one_step, sharded
from synthetic_run import account, beyond, planned, recorded, write_run

from onefold.observe import (
    RunFileError,
    gather_ranks,
    measured,
    read_observed,
    reconciled,
    record,
    write_observed,
)
from onefold.plan.schema import Account
from onefold.recipe import Recipe


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
        assert seen.step.seconds == pytest.approx(step.seconds, abs=1e-6)
        assert seen.step.exposed == pytest.approx(step.exposed, abs=1e-6)
        assert len(seen.step.work) == len(step.work) and seen.step.work[0].unit == step.work[0].unit


def test_the_recipes_table_is_that_of_the_recipe(tmp_path: Path) -> None:
    for stage, placements in {
        0: ["replicated"] * 3,
        1: ["replicated", "replicated", "sharded"],
        3: ["sharded"] * 3,
    }.items():
        write_observed(tmp_path, 0, 1, Account(), recipe=Recipe.zero(stage, precision="bf16"))
        run = read_observed(tmp_path)
        assert [row.placement for row in run.recipe] == placements and run.stage == stage
        assert [row.at_rest for row in run.recipe] == ["bfloat16", "float32", "float32"]
        assert run.recipe[2].wire == "–" and run.recipe[1].wire == "bfloat16"
        assert any("reduced at the" in note for note in run.recipe_notes)


def test_a_real_step_survives_the_file(tmp_path: Path) -> None:
    model, optimizer = sharded(3, "bf16")
    one_step(model, optimizer)
    with record(model, optimizer, activations=True) as seen:
        one_step(model, optimizer)
    found = measured(model, optimizer, seen)
    write_observed(
        tmp_path, 0, 1, found, recipe=Recipe.zero(3), step=seen, machine=reconciled(model, found)
    )
    (rank,) = read_observed(tmp_path).ranks
    assert rank.measured == found
    assert (
        rank.step is not None and rank.step.peak() == seen.peak() and rank.step.activations_watched
    )
    assert rank.machine["resident"] > found.rest_bytes


def test_each_rank_writes_its_own_file_in_any_order(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        write_observed(tmp_path, rank, 12, Account(rest={"moments": rank}))
    assert [r.rank for r in gather_ranks(tmp_path)] == [0, 2, 10]
    assert read_observed(tmp_path).missing_ranks == [1, 3, 4, 5, 6, 7, 8, 9, 11]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")], "a draft was left behind"


def test_files_of_an_earlier_and_larger_run_go(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=4)
    other = tmp_path / "observed-rank9.json.bak"
    other.write_text("mine")
    write_run(tmp_path, ranks=2)
    assert [r.rank for r in read_observed(tmp_path).ranks] == [0, 1]
    assert other.exists(), "a file of another name is the user's"


def test_bytes_of_a_unit_are_those_of_one_step(tmp_path: Path) -> None:
    step = replace(recorded(), steps=2)
    write_observed(tmp_path, 0, 4, account(step), step=step)
    traffic = gather_ranks(tmp_path)[0].traffic
    assert traffic == {
        unit: {m: n // 2 for m, n in moves.items()} for unit, moves in recorded().by_unit().items()
    }


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
            "observed.json",
            changed(lambda v: v.update(plan=3)),
            "does not hold what its version promises",
        ),
        (
            "observed-rank1.json",
            changed(lambda v: v["step"]["moves"].append(["all-gather"])),
            "does not hold what its version promises",
        ),
        (
            "observed-rank1.json",
            changed(lambda v: v["measured"].pop("rest")),
            "an account without rest",
        ),
        ("observed-rank1.json", lambda text: "", "is not whole JSON"),
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


def test_a_figure_that_is_younger_than_the_file_has_its_default(tmp_path: Path) -> None:
    path = write_run(tmp_path, ranks=1) / "observed.json"
    path.write_text(changed(lambda v: v["plan"].pop("ledger"))(path.read_text()))
    assert read_observed(tmp_path).plan == replace(planned(), ledger={})


def test_a_folder_without_a_run_says_who_writes_one(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"onefold train.*write_observed"):
        read_observed(tmp_path)
    assert gather_ranks(tmp_path) == ()


def test_what_lay_on_other_tiers_survives_the_file_and_older_files_have_none(
    tmp_path: Path,
) -> None:
    step = beyond(recorded())
    write_observed(tmp_path, 0, 1, account(step), step=step)
    found = read_observed(tmp_path).ranks[0].step
    assert found is not None and found.io == step.io and found.moved() == step.moved()
    for tier in ("device", "host", "nvme"):
        assert found.peak(tier=tier) == step.peak(tier=tier)
    path = tmp_path / "observed-rank0.json"
    older = changed(
        lambda v: (
            v["step"].pop("tiers"),
            v["step"].pop("io"),
            [move.pop() for move in v["step"]["moves"]],
        )
    )
    path.write_text(older(path.read_text()))
    before = read_observed(tmp_path).ranks[0].step
    assert (
        before is not None
        and before.tiers == {}
        and before.io == 0
        and {m.group for m in before.moves} == {""}
    )
