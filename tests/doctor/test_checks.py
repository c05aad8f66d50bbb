"""`onefold doctor --check`: where something is really broken, the check of it says so; where a rank
dies or stands still, a row does.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from broken_doctor import BREAKINGS
from onefold.doctor import coordinator
from onefold.doctor.checks import (
    CHECKS,
    LEFT_OUT,
    OK,
    WRONG,
    Here,
    Outcome,
    answer,
    merge,
)
from onefold.doctor.coordinator import check_here, report_of
from ranks import absolute_path, run_ranks

pytestmark = pytest.mark.one_in(9)

KNOWN = {check.name: check for check in CHECKS}
CPU = {"device": "cpu", "gpus": [], "cuda": None}


@contextmanager
def here(per_node: int = 0) -> Iterator[Here]:
    """This rank of a test, with a folder that all of them see while it lasts."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        if world > 1:
            dist.broadcast_object_list(names)
        yield Here(rank, world, torch.device("cpu"), "gloo", per_node or world, names[0])
        if world > 1:
            dist.barrier()


def answers(checks: list[str], broken: str = "", per_node: int = 0) -> list[Outcome]:
    """On a rank: outcomes of the checks, `broken` being broken."""
    if broken:
        BREAKINGS[broken]()
    with here(per_node) as there:
        return [answer(KNOWN[name], there) for name in checks]


def rows(world: int, checks: list[str], broken: str = "", per_node: int = 0) -> list[Outcome]:
    """The same of all ranks, merged as the command does it."""
    found = run_ranks(world, answers, checks, broken, per_node)
    return [
        merge(KNOWN[name], {rank: outcomes[i] for rank, outcomes in enumerate(found)})
        for i, name in enumerate(checks)
    ]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", absolute_path())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# -- each check ------------------------------------------------------------------------------------

ON_TWO_RANKS = [
    "collectives",
    "ordered sums",
    "native sums",
    "stages",
    "offload",
    "save and reload",
    "memory at rest",
    "overlap",
    "lost peer",
]


def test_where_nothing_is_broken_every_check_is_ok(sample: Any) -> None:
    for row in rows(2, sample(ON_TWO_RANKS, 4)):
        assert row.status == OK and row.said and not row.advice and not row.ended, row


def test_what_cannot_run_is_left_out_with_a_reason() -> None:
    two, wait = rows(2, ["two levels", "no synchronization"])
    assert two.status == LEFT_OUT and "use 4 ranks" in two.said
    assert wait.status == LEFT_OUT and "a CPU has no streams" in wait.said


@pytest.mark.parametrize(
    ("check", "broken", "said"),
    [
        ("collectives", "all-gather", "all-gather of 1 float32 on gloo brings wrong numbers"),
        ("ordered sums", "one bit of a sum", "stage 1: the mean gradient of"),
        ("ordered sums", "a gather is not waited for", "the pass computed with other weights"),
        ("native sums", "reduce-scatter", "differs from their sum by more than rounding"),
        ("stages", "one bit of a sum at stage 3", "fp32: stage 3 and stage 0 differ in"),
        ("stages", "sums a hundredth too large", "fp32: stage 0 and DDP: norms by 1.0e-02"),
        (
            "offload",
            "an offloaded step",
            "fp32: stage 2, optimizer on the host and nothing on the host differ",
        ),
        ("offload", "activations", "activations on the host and on the device differ in"),
        ("save and reload", "a wrong load", "after the load"),
        ("memory at rest", "a buffer stays", "bytes are held, the formula says"),
        ("overlap", "no prefetch", "nothing is prefetched"),
    ],
)
def test_what_is_broken_is_wrong(check: str, broken: str, said: str) -> None:
    (row,) = rows(2, [check], broken)
    assert row.status == WRONG, f"{broken} was not noticed: {row}"
    assert said in row.said, row.said
    assert row.advice == KNOWN[check].advice and not row.ended, row


# -- ranks that die, stand still, raise, or never start --------------------------------------------


def check_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str, checks: dict[str, float]
) -> list[Outcome]:
    """Rows of `checks` ({name: limit in seconds}) with two ranks of which BROKEN names what is
    broken.
    """
    chosen = tuple(replace(KNOWN[name], limit=limit) for name, limit in checks.items())
    monkeypatch.setattr(coordinator, "CHECKS", chosen)
    monkeypatch.setattr(coordinator.casts_of, "__defaults__", (chosen,))
    monkeypatch.setenv("BROKEN", broken)
    monkeypatch.setenv("PYTHONPATH", absolute_path())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    begun = time.monotonic()
    found = check_here(CPU, None, lambda name: None, "broken_doctor")
    assert time.monotonic() - begun < 200
    assert not list(tmp_path.iterdir()), "a folder was left behind"
    assert not children(), "a rank was left behind"
    return found


def children() -> list[str]:
    """Command lines of ranks that this process started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                command = (stat.parent / "cmdline").read_text()
                found += (
                    [command]
                    if "broken_doctor" in command or "onefold.doctor.checks" in command
                    else []
                )
        except (OSError, IndexError):
            continue
    return found


@pytest.mark.slow
def test_a_rank_that_dies_stands_still_or_raises_is_a_row_and_the_next_checks_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = "collectives=dies,ordered sums=stands still,offload=raises"
    checks = {
        "collectives": 60.0,
        "ordered sums": 10.0,  # rank 1 comes to where it stands still also on a busy machine
        "native sums": 60.0,
        "offload": 60.0,
    }
    found = {row.name: row for row in check_broken(monkeypatch, tmp_path, broken, checks)}
    assert list(found) == list(checks)
    assert found["collectives"].status == WRONG
    assert "rank 1: was ended by SIGKILL (memory may have run out)" in found["collectives"].said, (
        found["collectives"]
    )
    hung = found["ordered sums"]
    assert (
        hung.status == WRONG
        and hung.said.startswith("rank 0: not finished after 10 s")
        and "rank 1 in " in hung.said
    ), hung
    assert "broken_doctor.py" in hung.said and "in stands_still" in hung.said, hung
    assert (
        found["offload"].status == WRONG
        and "rank 1: ValueError: a wheel came off" in found["offload"].said
    ), found["offload"]
    # Of a generation of ranks that began after the one that hung
    assert found["native sums"].status == OK, found["native sums"]
    assert all(row.advice for row in found.values() if row.status == WRONG)
    assert report_of(CPU, list(found.values()), "onefold doctor --check", 1.0)["ok"] is False
