"""A sample of the drill: kills at random moments, random injuries. `python -m benchmarks.faults`
does 200 of each.
"""

from __future__ import annotations

import os
import tempfile

from benchmarks.faults.injuries import KINDS, drill
from benchmarks.faults.kills import Drill
from benchmarks.faults.report import markdown

import ranks
from benchmarks import harness


def left() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("faults-")}


def test_a_killed_run_goes_on_bit_equal_from_whole_checkpoints() -> None:
    before = left()
    found = Drill(ranks._context(), kills=4, seed=7)
    found.go()
    assert len(found.kills) >= 4 and sum(k.moment == "save" for k in found.kills) >= 2
    assert [k for k in found.kills if k.wrong] == [] and not any(found.runs), found.runs
    assert left() <= before


def test_every_injury_is_found_and_none_loads_as_something_else() -> None:
    before = left()
    found = drill(ranks._context(), 36, seed=3)
    assert [(i.kind, i.files, i.what, i.wrong, i.found) for i in found if i.wrong] == []
    assert {i.kind for i in found} == set(KINDS) and all(i.found for i in found)
    assert {"refused"} <= {outcome for i in found for outcome in i.loaded}
    assert left() <= before


def test_the_table_counts_what_was_wrong() -> None:
    kill = {
        "stage": 3,
        "asynchronous": True,
        "moment": "save",
        "first": 0,
        "wrong": ["rank 1: the loss of step 4 is 1.0, undisturbed 2.0"],
    }
    injury = {
        "kind": "flip",
        "files": ["state.json"],
        "what": "",
        "found": ["state.json: its"],
        "loaded": ["refused"] * 2,
        "wrong": [],
    }
    where = {
        "command": "x",
        "date": "d",
        "machine": harness.machine() | {"cpu": "a processor"},
        "versions": {"torch": "t", "commit": "0123abc"},
        "seconds": 1.0,
    }
    text = markdown({**where, "kills": [kill], "runs": [""], "injuries": [injury]})
    assert "on a processor, " in text and "; torch t, commit 0123abc. `x`" in text
    assert (
        "| 3 | behind the training | 0 | 0 | 1 | 1 |" in text
        and "| flip | 1 | 1 | 1 | 0 | 0 |" in text
    )
    assert "kill of rank 0 at stage 3: rank 1: the loss of step 4" in text
