"""Runs that lose a rank, are ended by a scheduler, or change their ranks: nothing is lost, nobody
hangs, nothing is left running.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from onefold.processes.peers import Peer, PeerMonitor
from onefold.processes.signals import CONTROL, Stop, StopSignal
from onefold.train.config import resolve
from onefold.train.launch import _Signals
from onefold.train.loop import Row
from onefold.train.report import Console, json_lines
from onefold.train.worker import Rank, run_rank
from onefold.wording import TrainError
from ranks import outcomes_of, run_ranks
from started_runs import (
    JOB,
    a_free_port,
    alone,
    left_behind,
    losses_in_ranks,
    losses_on,
    options,
    pid_of,
    rows_of,
    runs,
    started,
    this_rank,
    wait_for,
    wait_for_step,
    wait_until,
)

SERVER = "libraries"


def kill(temporary: Path, rank: int) -> int:
    wait_until(lambda: pid_of(temporary, rank))  # while ranks start again, there is none
    pid = pid_of(temporary, rank)
    os.kill(pid, signal.SIGKILL)
    return pid


#: So many that the run cannot end while this test waits for its turn: it says each step on a pipe,
#: which holds some hundred.
MANY = 10**4


def test_a_run_that_loses_a_rank_goes_on_with_the_losses_of_an_undisturbed_one(
    tmp_path: Path,
    every: bool,
) -> None:
    """One run, since starting it takes longest: kills (in a step, in a save, with `--all` also
    before the first step) and a restart by itself after each, SIGUSR1, and going on elsewhere.
    """
    restarts = 3 if every else 2
    temporary, checkpoints = tmp_path / "tmp", tmp_path / "run" / "checkpoints"
    several = {
        **JOB,
        "steps": MANY,
        "model": "small_lm:slow_to_save",
        "nproc": 2,
        "output": "run",
        "max_restarts": 3,
    }
    with started(tmp_path, *options(several)) as process:
        wait_for_step(process, 25)
        survivor, first = pid_of(temporary, 0), kill(temporary, 1)  # in a step
        wait_until(lambda: not runs(survivor))
        wait_for(process, going_on)
        wait_until(lambda: list(checkpoints.glob(".step-*.unfinished")))
        # In a save; it is who meets the others, too
        survivor, second = pid_of(temporary, 1), kill(temporary, 0)
        wait_until(lambda: not runs(survivor))
        if every:
            wait_until(
                lambda: pid_of(temporary, 1) not in (survivor, 0) and runs(pid_of(temporary, 1))
            )
            kill(temporary, 1)  # before the first step
        notes = wait_for(process, going_on)
        wait_for_step(process, 40)
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=300)

    # the kills: who went and where the other stood is told, and the run goes on without a hand
    for rank, pid in ((1, first), (0, second)):
        assert f"rank {rank} (process {pid} on " in err and f"rank {1 - rank} " in err, err
    assert err.count("has gone") >= 2 and "Traceback" not in err, err
    assert any(f"restart {restarts} of at most 3" in row.get("text", "") for row in notes), notes
    rows = rows_of(tmp_path / "run")
    marks = [row for row in rows if row.get("resumed")]
    # The save of step 20 was begun, so that of step 10, which it waits for, was whole.
    assert marks[0]["from_step"] >= 10 and marks[-1]["restart"] == restarts, marks

    # SIGUSR1: a checkpoint and status 0
    done = json.loads(out.splitlines()[-1])
    assert process.returncode == 0, err
    assert (
        done["event"] == "done"
        and done["stopped"]
        and done["why"] == "SIGTERM or SIGUSR1"
        and done["model"] is None
    )
    assert (tmp_path / done["checkpoint"]).name == f"step-{done['steps']:08d}"
    assert (tmp_path / done["checkpoint"] / "onefold_tokenizer.json").is_file()
    assert left_behind(temporary) == []

    # going on: bit-equal on the same ranks at another stage
    output, whole = str(tmp_path / "run"), str(tmp_path / "whole")
    plain = {"output": output, "model": "small_lm:plain", "steps": done["steps"] + 20}
    until = done["steps"] + 15
    (uninterrupted, rest, two), _ = run_ranks(
        2,
        losses_in_ranks,
        {"output": whole, "steps": MANY, "until": until},
        {"output": output, "steps": MANY, "stage": "3", "until": until},
        plain,
    )
    before = [row["loss"] for row in rows if "step" in row]
    assert len(before) == done["steps"] >= 40 and len(uninterrupted) >= until
    assert before + rest == uninterrupted
    # and within rounding on other ranks; without dropout, which draws other numbers there
    one = losses_on(alone(), **plain, stage="0")
    assert one == pytest.approx(two, rel=1e-5) and len(one) == 20


def going_on(row: Row) -> bool:
    return bool(row["event"] == "note" and "going on from" in row["text"])


# -- the monitor of peers --------------------------------------------------------------------------


#: Seconds: two at most on an idle machine. A rank that learned of it by waiting for the others
#: would take its timeout, 30 minutes.
HEARD = 60.0


def notice_a_kill(victim: int) -> tuple[list[int], float, int]:
    """(ranks that this one learned have gone, seconds it took, process of the first of them) while
    nobody waits for anybody.
    """
    ranks = this_rank()
    heard: list[Peer] = []
    monitor = PeerMonitor.connect(ranks, heard.append)
    assert monitor is not None
    ranks.sum(0.0)  # all are here
    if ranks.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    while not heard and time.monotonic() - begun < HEARD:
        time.sleep(0.01)
    took = time.monotonic() - begun
    monitor.close()
    return [p.rank for p in heard], took, heard[0].pid if heard else 0


def test_every_rank_learns_within_seconds_which_rank_has_gone_though_it_waits_for_nobody() -> None:
    outcomes = outcomes_of(4, notice_a_kill, 2)
    assert outcomes[2].exitcode == -signal.SIGKILL
    values = [o.value for o in outcomes if o.rank != 2]
    assert [gone for gone, _, _ in values] == [[2]] * 3, outcomes
    assert all(took < HEARD for _, took, _ in values) and len({pid for _, _, pid in values}) == 1


def compute_for_minutes(victim: int, folder: str) -> None:
    """A rank of `onefold train` that waits for nobody: all it does is compute."""
    ranks = this_rank()
    sys.stderr = Path(folder, f"said-by-{ranks.rank}").open("w")  # noqa: SIM115, the process's own to its end
    me = Rank(resolve({**JOB, "output": folder}))
    me.watch(ranks)
    me.doing = "computing"
    if ranks.rank == victim:
        Path(folder, "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(4 * HEARD)


def test_a_rank_that_computes_when_another_goes_says_so_and_ends(
    tmp_path: Path,
) -> None:
    victim, survivor = outcomes_of(2, compute_for_minutes, 0, str(tmp_path))
    assert victim.exitcode == -signal.SIGKILL and survivor.exitcode == 1, survivor
    said = tmp_path / "said-by-1"
    assert said.stat().st_mtime - (tmp_path / "killed").stat().st_mtime < HEARD
    for words in (
        "rank 0 (process ",
        "has gone",
        "rank 1 ends while computing: it cannot go on alone",
    ):
        assert words in said.read_text(), said.read_text()


def speaks_slowly(folder: str) -> None:
    """A rank that reports why it fails, while the timer that was to end it runs out."""
    os.environ[CONTROL] = folder
    said = Path(folder, "said")
    sys.stderr = said.open("w")
    me = Rank(resolve({**JOB, "output": folder}))
    speak = me._say

    def slowly(error: BaseException) -> None:
        threading.Thread(target=me.fail, args=(TrainError("late"),), daemon=True).start()
        time.sleep(1.0)
        speak(error)

    me._say = slowly  # type: ignore[method-assign]
    me.fail(TrainError("the reason"))


def test_a_rank_that_is_reporting_is_not_ended_by_the_timer_in_the_midst_of_it(
    tmp_path: Path,
) -> None:
    (outcome,) = outcomes_of(1, speaks_slowly, str(tmp_path))
    assert outcome.exitcode == 1, outcome
    assert (tmp_path / "said").read_text() == "error: the reason\n"


def fails_behind_its_claim(folder: str, output: str | None) -> None:
    """A rank of a launcher, of a run that cannot start: it learns so once it holds the folder."""
    os.chdir(folder)
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(a_free_port())}
    run_rank(resolve({**JOB, "model": "no_such_module:build", "output": output}))


@pytest.mark.parametrize("output", ["run", None])
def test_a_run_that_cannot_start_leaves_no_folder_under_a_launcher_either(
    tmp_path: Path, output: str | None
) -> None:
    (outcome,) = outcomes_of(1, fails_behind_its_claim, str(tmp_path), output)
    assert outcome.exitcode == 1, outcome
    assert os.listdir(tmp_path) == []


# -- signals ---------------------------------------------------------------------------------------


def asked_of(
    folder: str, arm: bool, numbers: list[int], grace: float, ends: bool
) -> tuple[int, bool]:
    os.environ[CONTROL] = folder
    stop, arrived = StopSignal(0, 0, grace), []
    act = stop._arrived

    def noted(number: int) -> None:
        act(number)
        arrived.append(number)

    stop._arrived = noted  # type: ignore[method-assign]
    if arm:
        stop.arm()
    for count, number in enumerate(numbers, 1):
        os.kill(os.getpid(), number)
        # On a thread of its own, whenever that gets its turn
        wait_until(lambda count=count: len(arrived) == count)
    if ends:
        time.sleep(60.0)  # it is ended meanwhile
    return int(stop.asked), (Path(folder) / "training").exists()


@pytest.mark.parametrize(
    ("arm", "numbers", "grace", "found"),
    [
        (True, [signal.SIGTERM], 30.0, (Stop.PREEMPT, True)),
        (True, [signal.SIGUSR1, signal.SIGTERM], 30.0, (Stop.PREEMPT, True)),
        (True, [signal.SIGINT], 30.0, (Stop.INTERRUPT, True)),
        (True, [signal.SIGINT, signal.SIGINT], 30.0, 128 + signal.SIGINT),
        (True, [signal.SIGTERM], 0.1, 1),  # nothing was saved within the grace
        (False, [signal.SIGTERM], 30.0, 128 + signal.SIGTERM),  # nothing to save yet
    ],
)
def test_what_a_signal_asks_of_a_rank(
    tmp_path: Path, arm: bool, numbers: list[int], grace: float, found: Any
) -> None:
    ends = not isinstance(found, tuple)
    (outcome,) = outcomes_of(
        1, asked_of, str(tmp_path), arm, numbers, grace, ends, process_group=False
    )
    assert (outcome.value if outcome.value is not None else outcome.exitcode) == found, outcome


def told_to_nobody() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
    for make in (Console, lambda: json_lines):
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        for _ in range(2):
            make()("note", {"text": "the training goes on"})
        sys.stdout.flush()
        os.dup2(writing, 1)


def test_a_run_goes_on_if_nobody_reads_what_it_prints() -> None:
    (outcome,) = outcomes_of(1, told_to_nobody, process_group=False)
    assert outcome.exitcode == 0, outcome


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        signals = _Signals(tmp_path, silent=True)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signals._came
        signals.stop()
    finally:
        signal.signal(signal.SIGHUP, before)


# -- which rank ------------------------------------------------------------------------------------
