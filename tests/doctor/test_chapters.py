"""The chapters of `onefold doctor --check`: what is expected of them, what each row says, and what
becomes of ranks that fail.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from onefold.doctor import chapter_runs, chapters
from onefold.doctor.chapter_runs import (
    CHAPTERS,
    CUT_OFF,
    DONE,
    FAILED,
    MEMORY,
    TIMEOUT,
    RanksRun,
    Scope,
    run_ranks,
)
from onefold.doctor.chapters import Chapter, measure_chapters
from onefold.doctor.checks import LEFT_OUT, OK, WRONG
from onefold.doctor.ranks import Stopped
from ranks import absolute_path

# -- what is expected ------------------------------------------------------------------------------


# -- what each row says ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        ([DONE, DONE], OK),
        ([DONE, FAILED], WRONG),
        ([TIMEOUT, MEMORY], WRONG),
        ([DONE, MEMORY], LEFT_OUT),
        ([CUT_OFF], LEFT_OUT),
    ],
)
def test_a_chapter_is_wrong_if_ranks_fail_and_left_out_if_the_machine_is_too_small(
    ended: list[str], status: str
) -> None:
    runs = [RanksRun(f"number {n}", how, error=f"Error: {how}") for n, how in enumerate(ended)]
    found = Chapter("block", "Blocks", ("a",), [["1"]], [*runs])
    assert found.status == status
    wrong = [run for run in runs if run.status != DONE]
    assert all(f"{run.name}: {run.status}: Error: {run.status}" in found.said for run in wrong)
    written = json.loads(json.dumps(found.to_json()))
    assert (written["name"], written["status"], written["rows"]) == ("block", status, [["1"]])
    assert [run["status"] for run in written["runs"]] == ended


# -- which chapters run, and until when ------------------------------------------------------------


def test_no_chapter_begins_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chapters, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    over = Scope("cpu", 2, tiny=True, deadline=time.monotonic() + 5)
    found = list(measure_chapters(over))
    assert [chapter.name for chapter in found] == list(CHAPTERS)
    assert all(c.status == LEFT_OUT and "before its turn" in c.said for c in found)


# -- ranks that fail -------------------------------------------------------------------------------


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where temporary folders are made."""
    monkeypatch.setenv("PYTHONPATH", absolute_path())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def nothing_left(place: Path) -> bool:
    running = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            running.append(command.read_bytes())
        except OSError:
            continue
    return not list(place.iterdir()) and not any(str(place).encode() in one for one in running)


@pytest.mark.parametrize(
    ("how", "status", "error"),
    [
        ("well", DONE, ""),
        ("raises", FAILED, "rank 1 ended with status 1: "),
        ("dies", FAILED, "rank 1 was ended by SIGKILL"),
        ("has no memory", MEMORY, "CUDA out of memory. Tried 20 GiB"),
    ],
)
def test_how_ranks_end_is_told_and_nothing_is_left(
    how: str, status: str, error: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chapter_runs, "GRACE", 0.5)
    # As a launcher of another run would have left them
    monkeypatch.setenv("WORLD_SIZE", "64")
    said: list[str] = []
    scope = Scope("cpu", 2, say=said.append)
    found = run_ranks("trial", scope, 2, {"how": how}, "broken_chapter")
    assert found.status == status and error in found.error, found
    assert said[-1].startswith(f"trial: {status} in ") and nothing_left(place)
    if how == "well":
        assert [(rank["rank"], rank["world"]) for rank in found.ranks] == [(0, "2"), (1, "2")]
    if how == "raises":
        assert chapters.essence(found.error) == "RuntimeError: a wheel came off"


def test_a_signal_ends_the_ranks_of_a_chapter(place: Path) -> None:
    def start(rank: int, *_: Any) -> None:
        real(rank, *_)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    made = chapter_runs.Children
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped, match="SIGTERM"):
        children: list[Any] = []

        def of(folder: Path) -> Any:
            nonlocal real
            children.append(made(folder))
            real = children[0].start_one
            children[0].start_one = start
            return children[0]

        real: Any = None
        patch.setattr(chapter_runs, "Children", of)
        run_ranks("trial", Scope("cpu", 2), 2, {"how": "stands still"}, "broken_chapter")
    assert nothing_left(place)
