"""A peer that is killed, or stopped, in the middle of training: how long until the others know, and
what they are told. `python -m benchmarks.on_gpu.lost JOB.json RANK`.

Each rank is a process below the one that is started, so that its end is not the end of the run:

    launch.run_ranks ──► minder of rank 0 ──► rank 0    trains until it is told
                    └──► minder of rank 1 ──► rank 1    is killed or stopped after `job["after"]` steps
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.peers import worker
from benchmarks.peers.settings import Setting

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def minder(job: dict[str, Any], path: Path, rank: int) -> dict[str, Any]:
    """Start this rank, send the signal if it is the last, and say how it ended."""
    ranks, limit = job["setting"]["ranks"], time.monotonic() + job["limit_s"]
    log = path.with_name(f"inner{rank}.log")
    command = [sys.executable, "-m", "benchmarks.on_gpu.lost", str(path), str(rank), "rank"]
    with log.open("wb") as said:
        inner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=said)
    try:
        if rank == ranks - 1:
            wait(lambda: path.with_name("reached").exists() or inner.poll() is not None, limit)
            time.sleep(0.1)  # into the next step
            put(path.with_name("signalled"), {"at": time.time()})
            inner.send_signal(SIGNALS[job["how"]])
            others = [path.with_name(f"minded{other}") for other in range(ranks - 1)]
            wait(lambda: all(file.exists() for file in others), limit)
            return {"victim": True}
        wait(lambda: inner.poll() is not None, limit)
        told = path.with_name(f"told{rank}")
        found = json.loads(told.read_text()) if told.exists() else {"kind": "", "text": ""}
        found["ended"] = inner.poll()
        if not found["text"]:
            found["text"] = log.read_text(errors="replace")[-1500:]
        return {"victim": False, **found}
    finally:
        path.with_name(f"minded{rank}").touch()
        inner.kill()
        inner.wait()


def wait(over: Any, limit: float) -> None:
    while not over() and time.monotonic() < limit:
        time.sleep(0.02)


def put(file: Path, value: Any) -> None:
    """Write a file that is whole at any moment."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(file)


def train(job: dict[str, Any], path: Path, rank: int) -> None:
    """Train until an error says that a peer is lost; write it with the seconds since the signal."""
    import torch

    import onefold
    from benchmarks.on_gpu.first_worker import Blocks
    from benchmarks.on_gpu.worker import join

    setting = Setting(**job["setting"])
    join(setting, path, rank)
    device = "cuda" if setting.device == "cuda" else "cpu"
    recipe = onefold.Recipe.zero(3, precision="bf16", stall_timeout=job["stall_timeout"])
    model = onefold.shard(Blocks(job["shape"], 2), recipe, units=["Block"], device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(1, setting.tokens, job["shape"][0], device=device)
    step = 0
    try:
        while True:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == job["after"] and rank == setting.ranks - 1:
                path.with_name("reached").touch()
    except Exception as error:
        begun = path.with_name("signalled")
        seconds = time.time() - json.loads(begun.read_text())["at"] if begun.exists() else None
        said = {"kind": type(error).__name__, "text": str(error), "seconds": seconds, "step": step}
        put(path.with_name(f"told{rank}"), said)
    os._exit(0)


def work() -> NoReturn:
    """A rank's minder, or the rank itself."""
    job, path, rank = worker.read_job()
    if sys.argv[3:] == ["rank"]:
        train(job, path, rank)
        raise AssertionError
    worker.leave(minder(job, path, rank), path, rank)


if __name__ == "__main__":
    work()
