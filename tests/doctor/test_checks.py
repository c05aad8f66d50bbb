"""`onefold doctor --check`: where something is really broken, the check of it says so; where a rank
dies or stands still, a row does.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from broken_doctor import BREAKINGS
from onefold.doctor import checks
from onefold.doctor.checks import (
    CHECKS,
    LEFT_OUT,
    OK,
    WRONG,
    Outcome,
    check_here,
    run_checks,
)
from onefold.doctor.model import Here
from ranks import absolute_path, run_ranks

pytestmark = pytest.mark.one_in(9)

KNOWN = {check.name: check for check in CHECKS}


def checked(names: list[str], broken: str, folder: str) -> list[Outcome]:
    """What a rank that has joined says of the checks, `broken` being broken."""
    if broken:
        BREAKINGS[broken]()
    size, control = dist.get_world_size(), dist.new_group(backend="gloo")
    rank = dist.get_rank()
    where = rank, size, rank, size, torch.device("cpu"), "gloo"
    found: list[Outcome] = []
    run_checks(Here(*where, control, folder), [KNOWN[name] for name in names], found.append)
    return found


def rows(names: list[str], broken: str = "") -> list[Outcome]:
    """What two ranks that the doctor starts say of the checks, `broken` being broken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "CHECKS", tuple(KNOWN[name] for name in names))
        patch.setenv("BROKEN", broken)
        return list(check_here("cpu", 0, None, "broken_doctor"))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", absolute_path())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# -- each check ------------------------------------------------------------------------------------

ON_TWO_RANKS = [
    "collectives",
    "stages",
    "offload",
    "save and reload",
    "memory at rest",
    "overlap",
    "lost peer",
]


def test_where_nothing_is_broken_every_check_is_ok(sample: Any) -> None:
    found = rows(sample(ON_TWO_RANKS, 4))
    assert found
    for row in found:
        assert row.status == OK and row.said and not row.advice, row


def test_what_cannot_run_is_left_out_with_a_reason(tmp_path: Path) -> None:
    names = ["two levels", "no synchronization"]
    two, wait = run_ranks(2, checked, names, "", str(tmp_path))[0]
    assert two.status == LEFT_OUT and "use 4 ranks" in two.said
    assert wait.status == LEFT_OUT and "on CUDA and ROCm only" in wait.said


def test_nodes_that_share_no_folder_tell_what_is_wrong_too(tmp_path: Path) -> None:
    absent = str(tmp_path / "of another node")
    ((row,), _) = run_ranks(2, checked, ["collectives"], "all-gather", absent)
    assert row.status == WRONG and "brings wrong numbers" in row.said, row


@pytest.mark.parametrize(
    ("check", "broken", "said"),
    [
        ("collectives", "all-gather", "all-gather of 1 float32 on gloo brings wrong numbers"),
        (
            "collectives",
            "reduce-scatter",
            "reduce-scatter of 1 float32 on gloo brings wrong numbers",
        ),
        ("stages", "a gather is not waited for", "fp32: stage 1 and stage 0"),
        ("stages", "one bit of a sum at stage 3", "fp32: stage 3 and stage 0"),
        ("stages", "sums a hundredth too large", "fp32: stage 0 and DDP"),
        ("offload", "an offloaded step", "fp32: optimizer on the host and on the device"),
        ("offload", "activations", "activations on the host and on the device"),
        ("save and reload", "a wrong load", "two steps after the load"),
        ("memory at rest", "a buffer stays", "bytes are held, the formula says"),
        ("overlap", "no prefetch", "nothing is prefetched"),
    ],
)
def test_what_is_broken_is_wrong(check: str, broken: str, said: str, tmp_path: Path) -> None:
    ((row,), _) = run_ranks(2, checked, [check], broken, str(tmp_path))
    assert row.status == WRONG, f"{broken} was not noticed: {row}"
    assert said in row.said, row.said
    assert row.advice == KNOWN[check].advice, row


# -- ranks that die, stand still, raise, or never start --------------------------------------------


def children() -> list[str]:
    """Command lines of ranks that this process started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append((stat.parent / "cmdline").read_text())
        except (OSError, IndexError):
            continue
    return [command for command in found if "broken_doctor" in command]


@pytest.mark.slow
def test_a_rank_that_dies_stands_still_or_raises_is_a_row_and_the_next_checks_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = "collectives=dies,two levels=stands still,offload=raises"
    # Rank 1 comes to where it stands still also on a busy machine
    names = ["collectives", "two levels", "overlap", "offload"]
    monkeypatch.setenv("LIMIT", "10")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = {row.name: row for row in rows(names, broken)}
    assert not list(tmp_path.iterdir()), "a folder was left behind"
    assert not children(), "a rank was left behind"
    assert list(found) == names
    assert found["collectives"].status == WRONG
    assert "rank 1 was ended by SIGKILL (memory may have run out)" in found["collectives"].said
    hung = found["two levels"]
    assert hung.status == WRONG and "stood still in stands_still (broken_doctor.py:" in hung.said, (
        hung
    )
    # Of ranks that began after the one that hung
    assert found["overlap"].status == OK, found["overlap"]
    assert found["offload"].status == WRONG
    assert "rank 1: ValueError: a wheel came off" in found["offload"].said, found["offload"]
    assert all(row.advice for row in found.values() if row.status == WRONG)
