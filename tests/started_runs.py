"""Runs started as users start them, through the command, and what tests ask of their processes and
rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from onefold.processes.ranks import Ranks
from onefold.processes.signals import Stop
from onefold.train import checkpoints
from onefold.train.config import TrainConfig, resolve
from onefold.train.loop import Row, train
from onefold.train.prepare import Run, prepare

SOURCE = os.pathsep.join([str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)])
STEPS = 250
JOB: dict[str, Any] = {
    "model": "small_lm:dropping", "tokenizer": "bytes", "seq": 64, "device": "cpu", "steps": STEPS, "save_every": 10, "eval_every": 0,
    "global_batch": 4, "micro_batch": 2, "seed": 3, "lr": 1e-3,
}  # fmt: skip


def options(job: dict[str, Any]) -> list[str]:
    return [
        part for key, value in job.items() for part in (f"--{key.replace('_', '-')}", str(value))
    ]


def environment(temporary: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH", "")]))
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    temporary.mkdir(exist_ok=True)
    return {**clean, "PYTHONPATH": path, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def started(
    folder: Path, *arguments: str, temporary: str = "tmp"
) -> Iterator[subprocess.Popen[str]]:
    """The command in `folder`; a folder for temporary files in it tells its processes from those of
    others.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "onefold", "train", *arguments, "--json"],
        cwd=folder, env=environment(folder / temporary), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()  # its ranks follow
            process.communicate(timeout=300)


def a_free_port() -> int:
    """One that the system gives to no connection by itself (those begin at 32768), so that it is
    still free when it is used.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(process: subprocess.Popen[str], wanted: Callable[[Row], bool]) -> list[Row]:
    """Read events until one is wanted; returns them all."""
    assert process.stdout is not None
    seen: list[Row] = []
    for line in process.stdout:
        seen.append(json.loads(line))
        if wanted(seen[-1]):
            return seen
    raise AssertionError(
        f"the run ended too early: {process.stderr.read() if process.stderr else ''}"
    )


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    wait_for(process, lambda row: row["event"] == "step" and row["step"] >= step)


def wait_until(wanted: Callable[[], object], seconds: float = 300.0, pause: float = 0.001) -> float:
    """Seconds until `wanted()` is true, asked every `pause` seconds; fails after `seconds`, which
    only bound a hang: a busy machine takes its time.
    """
    begun = time.monotonic()
    while not wanted():
        assert time.monotonic() - begun < seconds, f"not within {seconds} s"
        time.sleep(pause)
    return time.monotonic() - begun


def pid_of(temporary: Path, rank: int) -> int:
    """The process of a rank of the machine whose temporary files are there; 0 if it has not started
    yet.
    """
    for pid, command in processes_of(temporary).items():
        with contextlib.suppress(OSError):
            told = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if "onefold.train.worker" in command and f"RANK={rank}".encode() in told and runs(pid):
                return pid
    return 0


def runs(pid: int) -> bool:
    """Whether the process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def processes_of(temporary: Path) -> dict[int, str]:
    """{process id: command} of all that was started with these temporary files."""
    mark, found = f"TMPDIR={temporary}".encode(), {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    return found


def left_behind(temporary: Path) -> list[str]:
    """Files and processes; what is being ended gets its time."""
    patience = time.monotonic() + 120
    while (
        found := [*(str(p) for p in temporary.iterdir()), *processes_of(temporary).values()]
    ) and time.monotonic() < patience:
        time.sleep(0.1)
    return found


def rows_of(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def alone() -> Ranks:
    return Ranks(0, 1, 0, 1, torch.device("cpu"), "gloo", None)


def this_rank() -> Ranks:
    """In one of several ranks that a test has forked."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Ranks(
        rank,
        world,
        rank,
        world,
        torch.device("cpu"),
        "gloo",
        torch.distributed.new_group(backend="gloo"),
    )


def begun(config: TrainConfig, ranks: Ranks) -> tuple[Run, list[str]]:
    """(a start of the run as the command makes it, what is said of going on)."""
    point = ranks.on_first(lambda: checkpoints.find(config, restarted=False))
    run = prepare(config, ranks, lambda line: None, point)
    return run, checkpoints.load(run, point) if point is not None else []


def losses_on(ranks: Ranks, until: int = STEPS, **more: Any) -> list[float]:
    """Train the job to its end in this process, from a checkpoint if there is one in its output; or
    stop at about step `until`.
    """
    config = resolve({**JOB, "resume": "auto", **more})
    run, _ = begun(config, ranks)
    rows: list[Row] = []
    train(
        run,
        lambda: Stop.INTERRUPT if rows and rows[-1]["step"] >= until else Stop.NONE,
        rows.append,
    )
    return [row["loss"] for row in rows]


def losses_in_ranks(*variants: dict[str, Any]) -> list[list[float]]:
    """The same on one of several ranks, for each variant of the job."""
    ranks = this_rank()
    return [losses_on(ranks, **variant) for variant in variants]
