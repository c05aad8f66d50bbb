"""Runs that lose a rank, are ended by a scheduler, or change their ranks: nothing is lost, nobody hangs, nothing is left running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.train import resume
from onefold.train.config import resolve
from onefold.train.errors import TrainError
from onefold.train.loop import Row, train
from onefold.train.neighbours import Neighbours, Peer
from onefold.train.prepare import prepare
from onefold.train.ranks import Ranks
from onefold.train.slow import WINDOW
from onefold.train.stop import CONTROL, Stop, StopSignal
from ranks import outcomes_of, preload, run_ranks

preload("onefold.train.worker")
SOURCE = os.pathsep.join([str(Path(__file__).parents[2] / "src"), str(Path(__file__).parent)])
STEPS = 150  # of some 10 ms: long enough to be hit in the middle
JOB: dict[str, Any] = {
    "model": "small_lm:dropping", "tokenizer": "bytes", "seq": 64, "device": "cpu", "steps": STEPS, "save_every": 10, "eval_every": 0,
    "global_batch": 4, "micro_batch": 2, "seed": 3, "lr": 1e-3,
}  # fmt: skip


def options(job: dict[str, Any]) -> list[str]:
    return [part for key, value in job.items() for part in (f"--{key.replace('_', '-')}", str(value))]


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH", "")]))
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    (folder / "tmp").mkdir(exist_ok=True)
    return {**clean, "PYTHONPATH": path, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "onefold.cli", "train", *options(JOB), *arguments, "--json"],
        cwd=folder, env=environment(folder), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()  # the agent and its ranks follow
            process.communicate(timeout=30)


def wait_for(process: subprocess.Popen[str], wanted: Callable[[Row], bool]) -> list[Row]:
    """Read events until one is wanted; returns them all."""
    assert process.stdout is not None
    seen: list[Row] = []
    for line in process.stdout:
        seen.append(json.loads(line))
        if wanted(seen[-1]):
            return seen
    raise AssertionError(f"the run ended too early: {process.stderr.read() if process.stderr else ''}")


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    wait_for(process, lambda row: row["event"] == "step" and row["step"] >= step)


def left_behind(folder: Path) -> list[str]:
    mark = f"TMPDIR={folder / 'tmp'}".encode()
    found = [str(p) for p in (folder / "tmp").iterdir()]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


def rows_of(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_in_ranks(*variants: dict[str, Any]) -> list[list[float]]:
    """On one of several ranks: for each variant of the job, train to the end, from a checkpoint if there is one in its output."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = Ranks(rank, world, rank, world, torch.device("cpu"), "gloo", torch.distributed.new_group(backend="gloo"))
    return [losses_on(ranks, **variant) for variant in variants]


def losses_on(ranks: Ranks, **more: Any) -> list[float]:
    config = resolve({**JOB, "resume": "auto", **more})
    point = resume.find(config, restarted=False)
    run = prepare(config, ranks, lambda line: None, point)
    if point is not None:
        resume.load(run, point)
    rows: list[Row] = []
    train(run, lambda: 0, rows.append)
    return [row["loss"] for row in rows]


def kill_rank_1(folder: Path) -> int:
    (pid_file,) = (folder / "tmp").glob("onefold-*/rank-1.pid")
    pid = int(pid_file.read_text())
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_run_that_loses_a_rank_and_then_its_machines_goes_on_with_the_losses_of_one_that_was_left_alone(tmp_path: Path) -> None:
    """One run, since starting it takes longest: SIGKILL of a rank, a restart by itself, SIGTERM, and going on at other stages and ranks."""
    with started(tmp_path, "--nproc", "2", "--output", "run", "--max-restarts", "1") as process:
        wait_for_step(process, 25)
        pid = kill_rank_1(tmp_path)
        notes = wait_for(process, lambda row: row["event"] == "note" and "going on from" in row["text"])
        wait_for_step(process, 40)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)

    # the kill: who went and where the other stood is told, and the run goes on without a hand
    assert f"rank 1 (process {pid}" in err and "has gone" in err and "rank 0 " in err and "Traceback" not in err, err
    assert any("restart 1 of at most 1" in row.get("text", "") for row in notes)
    rows = rows_of(tmp_path / "run")
    (mark,) = (row for row in rows if row.get("resumed"))
    # The save of step 20 was begun, so that of step 10, which it waits for, was whole.
    assert mark["from_step"] >= 10 and mark["restart"] == 1

    # SIGTERM: a checkpoint and status 0
    done = json.loads(out.splitlines()[-1])
    assert process.returncode == 0, err
    assert done["event"] == "done" and done["stopped"] and done["why"] == "SIGTERM or SIGUSR1" and done["model"] is None
    assert (tmp_path / done["checkpoint"]).name == f"step-{done['steps']:08d}"
    assert left_behind(tmp_path) == []

    # going on: bit-equal on the same ranks at another stage
    output, whole = str(tmp_path / "run"), str(tmp_path / "whole")
    plain = {"output": output, "model": "small_lm:plain", "steps": done["steps"] + 20}
    (uninterrupted, rest, two), _ = run_ranks(2, losses_in_ranks, {"output": whole}, {"output": output, "stage": "3"}, plain)
    before = [row["loss"] for row in rows if "step" in row]
    assert len(before) == done["steps"] >= 40 and len(uninterrupted) == STEPS
    assert before + rest == uninterrupted
    # and within rounding on other ranks; without dropout, which draws other numbers there
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"), "gloo", None)
    one = losses_on(alone, **plain, stage="0")
    assert one == pytest.approx(two, rel=1e-5) and len(one) == 20


# -- the ranks' ring -----------------------------------------------------------------------------------------------------------


def notice_a_kill(victim: int) -> tuple[list[int], float, int]:
    """(ranks that this one learned have gone, seconds it took, process of the first of them) while nobody waits for anybody."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = Ranks(rank, world, rank, world, torch.device("cpu"), "gloo", torch.distributed.new_group(backend="gloo"))
    heard: list[Peer] = []
    ring = Neighbours.connect(ranks, heard.append)
    assert ring is not None
    ranks.wait()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    while not heard and time.monotonic() - begun < 10:
        time.sleep(0.01)
    took = time.monotonic() - begun
    ring.close()
    return [p.rank for p in heard], took, heard[0].pid if heard else 0


def test_every_rank_learns_within_seconds_which_rank_has_gone_though_it_waits_for_nobody() -> None:
    outcomes = outcomes_of(4, notice_a_kill, 2, timeout=30)
    assert outcomes[2].exitcode == -signal.SIGKILL
    values = [o.value for o in outcomes if o.rank != 2]
    assert [gone for gone, _, _ in values] == [[2]] * 3, outcomes
    assert all(took < 10 for _, took, _ in values) and len({pid for _, _, pid in values}) == 1


def leave_in_turn() -> list[int]:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = Ranks(rank, world, rank, world, torch.device("cpu"), "gloo", torch.distributed.new_group(backend="gloo"))
    heard: list[Peer] = []
    ring = Neighbours.connect(ranks, heard.append)
    assert ring is not None
    time.sleep(0.2 * rank)
    ring.close()
    time.sleep(0.2 * (world - rank))
    return [p.rank for p in heard]


def test_ranks_that_leave_with_a_word_have_not_gone() -> None:
    assert run_ranks(3, leave_in_turn) == [[], [], []]


# -- signals -------------------------------------------------------------------------------------------------------------------


def asked_of(folder: str, arm: bool, numbers: list[int], grace: float = 30.0, wait: float = 0.3) -> tuple[int, bool]:
    os.environ[CONTROL] = folder
    stop = StopSignal(0, 0, grace)
    if arm:
        stop.arm()
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.05)
    time.sleep(wait)
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
def test_what_a_signal_asks_of_a_rank(tmp_path: Path, arm: bool, numbers: list[int], grace: float, found: Any) -> None:
    (outcome,) = outcomes_of(1, asked_of, str(tmp_path), arm, numbers, grace, timeout=20, process_group=False)
    assert (outcome.value if outcome.value is not None else outcome.exitcode) == found, outcome


def test_one_rank_of_a_machine_speaks_and_the_next_start_may_speak_again(tmp_path: Path) -> None:
    def speaking(generation: str) -> list[bool]:
        stops = []
        for rank in (0, 1):
            stop = StopSignal.__new__(StopSignal)
            stop.control, stop.rank, stop.generation = tmp_path, rank, generation
            stops.append(stop)
        return [stop.speak_first() for stop in stops]

    assert speaking("a") == [True, False] and speaking("b") == [True, False]


# -- which rank ----------------------------------------------------------------------------------------------------------------


def one_rank_is_slow_then_wrong(output: str) -> tuple[list[str], list[Row], str]:
    """On one of two ranks: rank 1 sleeps in each forward pass, and puts out a NaN in the last step."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = Ranks(rank, world, rank, world, torch.device("cpu"), "gloo", torch.distributed.new_group(backend="gloo"))
    run = prepare(resolve({**JOB, "output": output, "stage": "3", "model": "small_lm:plain", "units": "Block"}), ranks, lambda line: None)
    rows: list[Row] = []
    alerts: list[str] = []

    def after_block_1(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            time.sleep(0.05)
        return output * float("nan") if rank == 1 and len(rows) == WINDOW + 2 else output

    model: Any = run.model
    model.blocks[1].register_forward_hook(after_block_1)
    try:
        train(run, lambda: 0, rows.append, alert=alerts.append)
    except TrainError as error:
        return alerts, rows, str(error)
    return alerts, rows, ""


def test_the_rank_that_is_slow_and_the_rank_that_went_wrong_are_named_on_every_rank(tmp_path: Path) -> None:
    for alerts, rows, error in run_ranks(2, one_rank_is_slow_then_wrong, str(tmp_path)):
        assert len(alerts) == 1 and "rank 1 is slow" in alerts[0], alerts
        assert rows[-1]["slow_rank"] == 1 and rows[-1]["own_ms"][1] > rows[-1]["own_ms"][0]
        assert f"the loss at step {WINDOW + 3} is nan" in error and "unit 'blocks.1', on rank 1 in micro-batch 1" in error, error
