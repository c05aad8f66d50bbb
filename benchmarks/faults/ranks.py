"""Ranks forked from a server that has imported torch once; they can be killed one by one."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

from benchmarks.launch import environment

PR_SET_PDEATHSIG = 1


def context() -> Any:
    """A fork server: one thread a process, gloo on the loopback interface."""
    os.environ.update(environment(1))
    os.environ.update(CUDA_VISIBLE_DEVICES="", TORCH_CPP_LOG_LEVEL="ERROR")
    found = multiprocessing.get_context("forkserver")
    needed = ("torch", "torch.distributed", "torch._dynamo", "onefold", "onefold.checkpoint")
    found.set_forkserver_preload([*needed, "benchmarks.faults.run"])
    return found


class Ranks:
    """Processes that run `function(rank, say, *args)`; `say` appends to the rank's lines."""

    def __init__(self, fork: Any, world: int, function: Callable[..., None], *args: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="faults-")
        self.folder = Path(self._folder.name)
        self.begun = time.monotonic()
        self.processes = [
            fork.Process(
                target=_rank_main, args=(str(self.folder), world, rank, function, args), daemon=True
            )
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def lines(self, rank: int) -> Path:
        return self.folder / f"lines-{rank}"

    def ended(self, timeout: float) -> bool:
        """Whether all have ended after at most `timeout` seconds, or one has failed."""
        end = time.monotonic() + timeout
        while any(p.exitcode is None for p in self.processes) and not self.failed():
            left = end - time.monotonic()
            if left <= 0:
                return False
            connection.wait([p.sentinel for p in self.processes if p.exitcode is None], left)
        return True

    def failed(self) -> str:
        """What a rank that ended by itself, badly, has said last; "" if there is none."""
        for rank, process in enumerate(self.processes):
            if process.exitcode not in (None, 0):
                output = (self.folder / f"output-{rank}").read_text(errors="replace").strip()
                return f"rank {rank} ended with status {process.exitcode}: {output[-1500:]}"
        return ""

    def kill(self, rank: int) -> None:
        if self.processes[rank].exitcode is None:
            os.kill(self.processes[rank].pid, signal.SIGKILL)

    def close(self) -> None:
        """Leave nothing behind. What was said must have been read."""
        for rank in range(len(self.processes)):
            self.kill(rank)
        for process in self.processes:
            process.join(10.0)
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rank_main(
    folder: str, world: int, rank: int, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(f"{folder}/output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch
    import torch.distributed as dist

    from benchmarks.faults.run import Log

    torch.set_num_threads(1)
    try:
        if world > 1:
            store = dist.FileStore(f"{folder}/rendezvous", world)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
            )
        function(rank, Log(Path(folder, f"lines-{rank}")), *args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
