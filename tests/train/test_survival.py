"""Runs that lose a rank, are ended by a scheduler, or change their ranks: nothing is lost, nobody
hangs, nothing is left running.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from onefold import engine_of
from onefold.checkpoint.background import running
from onefold.processes.peers import Peer, PeerMonitor
from onefold.processes.ranks import Ranks
from onefold.processes.signals import CONTROL, STARTED, Stop, StopSignal
from onefold.train.config import resolve
from onefold.train.faults import WINDOW
from onefold.train.keeper import Keeper
from onefold.train.loop import Row, train
from onefold.train.prepare import prepare
from onefold.train.report import Reporter
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


def leave_in_turn() -> list[int]:
    ranks = this_rank()
    heard: list[Peer] = []
    monitor = PeerMonitor.connect(ranks, heard.append)
    assert monitor is not None
    time.sleep(0.2 * ranks.rank)
    monitor.close()
    time.sleep(0.2 * (ranks.world_size - ranks.rank))
    return [p.rank for p in heard]


def test_ranks_that_leave_with_a_word_have_not_gone() -> None:
    assert run_ranks(3, leave_in_turn) == [[], [], []]


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


def ends_in_time(folder: str) -> int:
    """A rank that a launcher started 100 s ago; returns its exit status."""
    os.environ.update(
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(a_free_port()),
            STARTED: str(time.time() - 100),
        }
    )
    sys.stdout = Path(folder, "said").open("w")  # noqa: SIM115, the process's own to its end
    given = {
        "model": "small_lm:plain",
        "output": f"{folder}/run",
        "save_every": None,
        "save_before": "107s",
        "json": True,
        "steps": 10**6,
    }
    return run_rank(resolve({**JOB, **given}))


@pytest.mark.slow
def test_save_before_ends_a_run_by_itself_with_a_checkpoint_and_status_0(tmp_path: Path) -> None:
    (outcome,) = outcomes_of(1, ends_in_time, str(tmp_path), process_group=False)
    done = json.loads((tmp_path / "said").read_text().splitlines()[-1])
    assert outcome.value == 0, outcome
    assert (
        done["event"] == "done"
        and done["stopped"]
        and done["why"] == "--save-before"
        and 0 < done["steps"] < 10**6
    ), done
    assert (
        Path(done["checkpoint"]).name == f"step-{done['steps']:08d}"
        and Path(done["checkpoint"]).is_dir()
    )


def test_one_rank_of_a_machine_speaks_and_the_next_start_may_speak_again(tmp_path: Path) -> None:
    def speaking(generation: str) -> list[bool]:
        stops = []
        for rank in (0, 1):
            stop = StopSignal.__new__(StopSignal)
            stop.control, stop.rank, stop.generation = tmp_path, rank, generation
            stops.append(stop)
        return [stop.speak_first() for stop in stops]

    assert speaking("a") == [True, False] and speaking("b") == [True, False]


# -- which rank ------------------------------------------------------------------------------------


def one_rank_is_slow_then_wrong(output: str) -> tuple[list[str], list[Row], str]:
    """On one of two ranks: rank 1 sleeps in each forward pass, and puts out a NaN in the last
    step.
    """
    ranks = this_rank()
    run = prepare(
        resolve(
            {**JOB, "output": output, "stage": "3", "model": "small_lm:plain", "units": "Block"}
        ),
        ranks,
        lambda line: None,
    )
    rows: list[Row] = []
    alerts: list[str] = []

    def after_block_1(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if ranks.rank == 1:
            time.sleep(0.2)  # far more than what a busy machine keeps either rank waiting
        return output * float("nan") if ranks.rank == 1 and len(rows) == WINDOW + 2 else output

    model: Any = run.model
    model.blocks[1].register_forward_hook(after_block_1)
    try:
        train(run, lambda: 0, rows.append, alert=alerts.append)
    except TrainError as error:
        return alerts, rows, str(error)
    return alerts, rows, ""


def test_the_rank_that_is_slow_and_the_rank_that_went_wrong_are_named_on_every_rank(
    tmp_path: Path,
) -> None:
    for alerts, rows, error in run_ranks(2, one_rank_is_slow_then_wrong, str(tmp_path)):
        assert len(alerts) == 1 and "rank 1 is slow" in alerts[0], alerts
        assert rows[-1]["slow_rank"] == 1 and rows[-1]["own_ms"][1] > rows[-1]["own_ms"][0]
        assert (
            f"the loss at step {WINDOW + 3} is nan" in error
            and "unit 'blocks.1', on rank 1 in micro-batch 1" in error
        ), error


def goes_back(ranks: Ranks | None, output: str) -> tuple[list[int], list[float], list[bool]]:
    """(steps gone back to, losses, whether a save was under way when it went wrong): the last rank
    puts out NaN once, behind a save.
    """
    from onefold.checkpoint import parts

    ranks = ranks or this_rank()
    given = {
        "output": output,
        "model": "small_lm:plain",
        "units": "Block",
        "on_nonfinite": "rollback",
        "save_every": 4,
        "steps": 12,
    }
    run = prepare(
        resolve({**JOB, **given, "stage": 3 if ranks.world_size > 1 else 0}),
        ranks,
        lambda line: None,
    )
    keeper, write = Keeper(run, Path(output), Reporter(), begun=time.time()), parts.write_tensors
    rows: list[Row] = []
    went_back: list[int] = []
    under_way: list[bool] = []

    def slowly(path: Path, *args: Any, **kwargs: Any) -> Any:
        if "step-00000008" in str(path) and ranks.rank == ranks.world_size - 1:
            wait_until(lambda: under_way)
        return write(path, *args, **kwargs)

    def spoiled(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if ranks.rank < ranks.world_size - 1 or len(rows) != 8 or went_back:
            return output
        under_way.append(running(engine_of(run.model)) is not None)
        return output * float("nan")

    def forget(step: int) -> None:
        went_back.append(step)
        del rows[step:]

    model: Any = run.model
    model.blocks[1].register_forward_hook(spoiled)
    with patch.object(parts, "write_tensors", slowly):
        train(run, lambda: 0, rows.append, keeper=keeper, forget=forget)
        keeper.close()
    return went_back, [row["loss"] for row in rows], under_way


@pytest.mark.slow
def test_all_ranks_go_back_together_to_a_checkpoint_that_is_still_being_written(
    tmp_path: Path,
) -> None:
    one = goes_back(alone(), str(tmp_path / "one"))
    first, second = run_ranks(2, goes_back, None, str(tmp_path / "two"))
    assert one[2][0] and second[2][0] and first[2] == [], (
        "the save behind step 8 was under way in step 9"
    )
    assert one[0] == first[0] == second[0] == [8]
    assert len(first[1]) == 12 and first[1] == second[1] == pytest.approx(one[1], rel=1e-5)
