"""A peer that is killed, or stopped, in the middle of training: how long until the others are told,
and in which words. `python -m onefold.doctor.lost_peer FOLDER RANK`.

Each rank is a process below the one that is started, so its end is not the end of the run:

    run_ranks ──► minder of rank 0 ──► rank 0    trains until it is told
             └──► minder of rank 1 ──► rank 1    is killed or stopped after `job["after"]` steps
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from onefold.doctor.chapter_runs import JOB, as_a_rank, join, put
from onefold.processes.signals import end_with_parent

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
MODULE = "onefold.doctor.lost_peer"


def minder(job: dict[str, Any], folder: Path, rank: int) -> dict[str, Any]:
    """Start this rank, send the signal if it is the last, and say how it ended."""
    ranks, limit = job["ranks"], time.monotonic() + job["limit_s"]
    log = folder / f"inner{rank}.log"
    command = [sys.executable, "-m", MODULE, str(folder), str(rank), str(os.getpid())]
    with log.open("wb") as said:
        inner = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        if rank == ranks - 1:
            wait(lambda: (folder / "reached").exists() or inner.poll() is not None, limit)
            time.sleep(0.1)  # into the next step
            put(folder / "signalled", {"at": time.time()})
            inner.send_signal(SIGNALS[job["how"]])
            others = [folder / f"minded{other}" for other in range(ranks - 1)]
            wait(lambda: all(file.exists() for file in others), limit)
            return {"victim": True}
        wait(lambda: inner.poll() is not None, limit)
        told = folder / f"told{rank}"
        found = json.loads(told.read_text()) if told.exists() else {"kind": "", "text": ""}
        found["ended"] = inner.poll()
        if not found["text"]:
            found["text"] = log.read_text(errors="replace")[-1500:]
        return {"victim": False, **found}
    finally:
        (folder / f"minded{rank}").touch()
        inner.kill()
        inner.wait()


def wait(over: Callable[[], bool], limit: float) -> None:
    """Wait until `over()`, or until the moment `limit`."""
    while not over() and time.monotonic() < limit:
        time.sleep(0.02)


def train(job: dict[str, Any], folder: Path, rank: int) -> NoReturn:
    """Train until an error says that a peer is lost; write it with the seconds since the signal."""
    import torch

    import onefold
    from onefold.doctor.chapter_rank import LlamaBlocks

    join(job, folder, rank)
    recipe = onefold.Recipe.zero(3, precision="bf16", stall_timeout=job["stall_timeout"])
    blocks = LlamaBlocks(job["shape"], 2)
    model = onefold.shard(blocks, recipe, units=["LlamaBlock"], device=job["device"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(1, job["tokens"], job["shape"][0], device=job["device"])
    step = 0
    try:
        while True:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == job["after"] and rank == job["ranks"] - 1:
                (folder / "reached").touch()
    except Exception as error:
        begun = folder / "signalled"
        seconds = time.time() - json.loads(begun.read_text())["at"] if begun.exists() else None
        said = {"kind": type(error).__name__, "text": str(error), "seconds": seconds, "step": step}
        put(folder / f"told{rank}", said)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[3:]:
        place = Path(sys.argv[1])
        end_with_parent(int(sys.argv[3]))
        train(json.loads((place / JOB).read_text()), place, int(sys.argv[2]))
    as_a_rank(minder)
