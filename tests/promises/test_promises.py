"""Every row of the table keeps every promise (jobs.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from on_ranks import on_ranks, slow
from promises import jobs
from promises.jobs import Row, Seen, ask
from promises.table import table

ROWS = table()
#: Rows that `make test` may run. Who needs another one takes `ci` from one of the same group.
BUDGET = 130


def rows_on(ranks: int) -> Any:
    """Rows of a family are neighbours, so that its first is trained once in a start."""
    rows = sorted((r for r in ROWS if r.mesh.ranks == ranks), key=lambda r: (not r.ci, str(r.key)))
    found = [pytest.param(r, id=r.name, marks=() if r.ci else slow) for r in rows]
    return pytest.mark.parametrize("row", found)


def keep(row: Row, folder: Path, every: bool) -> None:
    broken = ask(row, ROWS, folder, every)
    assert not broken, "\n".join(broken)


@on_ranks(1)
@rows_on(1)
def test_one_rank_keeps_every_promise(row: Row, folder: Path, every: bool) -> None:
    keep(row, folder, every)


@on_ranks(2)
@rows_on(2)
def test_two_ranks_keep_every_promise(row: Row, folder: Path, every: bool) -> None:
    keep(row, folder, every)


@on_ranks(3)
@rows_on(3)
def test_three_ranks_keep_every_promise(row: Row, folder: Path, every: bool) -> None:
    keep(row, folder, every)


@on_ranks(4)
@rows_on(4)
def test_four_ranks_keep_every_promise(row: Row, folder: Path, every: bool) -> None:
    keep(row, folder, every)


@on_ranks(6)
@rows_on(6)
def test_six_ranks_keep_every_promise(row: Row, folder: Path, every: bool) -> None:
    keep(row, folder, every)


@on_ranks(8)
@rows_on(8)
def test_eight_ranks_keep_every_promise(row: Row, folder: Path, every: bool) -> None:
    keep(row, folder, every)


def test_the_table_keeps_its_budget() -> None:
    assert sum(row.ci for row in ROWS) <= BUDGET


#: What a rank may see wrong, and words of the sentence that says so.
PLANTED: list[tuple[str, Callable[[Seen], None]]] = [
    ("same bits: losses", lambda seen: seen.losses.__setitem__(0, seen.losses[0] + 1e-7)),
    ("one process: losses", lambda seen: seen.losses.__setitem__(-1, seen.losses[-1] + 1e-3)),
    ("one process: a step later", lambda seen: seen.next.__setitem__(0, seen.next[0] * 1.001)),
    ("same bits: 1 of", lambda seen: seen.weights["head.weight"][0].mul_(1 + 1e-6)),
    ("one process: head.weight", lambda seen: seen.weights["head.weight"].add_(1e-3)),
    ("one process: 0: exp_avg ", lambda seen: seen.states["0: exp_avg"].mul_(0.5).add_(1e-3)),
    ("same bits: 2 of", lambda seen: (seen.states.pop("0: step"), seen.states.pop("1: step"))),
    ("wire: sent", lambda seen: seen.sent.__setitem__("all-gather", seen.sent["all-gather"] + 1)),
    ("wire: by link", lambda seen: seen.by_link.__setitem__("between", 1)),
    ("counted outside", lambda seen: setattr(seen.counted, "payload", seen.counted.payload - 4)),
    ("not counted", lambda seen: seen.counted.others.append("all_reduce")),
    ("not tiny", lambda seen: setattr(seen, "control", 1 << 20)),
    ("an evaluation sent", lambda seen: setattr(seen, "evaluated", seen.evaluated + 4)),
    ("rest: {", lambda seen: seen.rest["device"].__setitem__("master weights", 4)),
    ("living tensors", lambda seen: setattr(seen, "living", seen.living + (20 << 10))),
    ("gradients behind", lambda seen: seen.gradients.__setitem__(0, 0)),
    ("moved", lambda seen: seen.moved.__setitem__("down", 4)),
    ("peak", lambda seen: setattr(seen, "peak", seen.peak + 4)),
    ("more than 5 %", lambda seen: setattr(seen, "peak", 9 * seen.peak)),
    ("left behind", lambda seen: setattr(seen, "left", (True, 0, 0))),
    ("left behind", lambda seen: setattr(seen, "left", (False, 20 << 10, 0))),
    ("left behind", lambda seen: setattr(seen, "left", (False, 0, 1))),
]


@on_ranks(2)
def test_what_is_wrong_is_told(folder: Path) -> None:
    row = next(r for r in ROWS if r.stage == 3 and r.mesh.ranks == 2 and r.model == "gpt")
    one, seen = jobs.in_one_process(row)[dist.get_rank()], jobs.train(row, folder)
    planned = jobs.planned_of(row, folder)
    assert jobs.broken(row, copy.deepcopy(seen), one, seen, planned) == []
    for words, plant in PLANTED:
        other = copy.deepcopy(seen)
        if seen.weights or not ("weight" in words or " of" in words or "exp_avg" in words):
            plant(other)
            told = jobs.broken(row, seen, one, other, planned)
            assert any(words in sentence for sentence in told), (words, told)


@on_ranks(2)
def test_a_checkpoint_with_another_number_in_it_is_told(folder: Path) -> None:
    row = next(r for r in ROWS if r.stage == 3 and r.mesh.ranks == 2 and r.model == "gpt")
    seen = jobs.train(row, folder)
    seen.next[0] += 1e-6
    if seen.weights:
        seen.weights["head.weight"][0, 0] += 1e-6
        seen.states["0: step"] += 1
    told = jobs.checkpoint(row, [row], seen, folder)
    assert len(told) == (5 if seen.weights else 1), told
