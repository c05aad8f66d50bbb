"""The ranks of a calibration: started, watched, and what they measured brought back. Whatever
happens, no process and no file is left.

Each rank is `python -m onefold.cli.doctor_ranks FOLDER RANK`. They meet through a file in FOLDER.
Rank 0 says on its standard output what is measured next, a line each, and leaves the figures in
FOLDER.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold.train.launch import child_environment, noted_signals
from onefold.train.process import end_with_parent, quiet_third_parties

if TYPE_CHECKING:
    from onefold.plan.benchmark_blocks import Sizes

JOB, RESULT = "job.json", "result.json"
#: Seconds between two looks at the ranks.
INTERVAL = 0.05
#: Seconds that ranks wait for each other at the start, while each imports torch.
MEETING = 120.0


class MeasurementError(RuntimeError):
    """A rank failed; the message holds the last it said."""


class Stopped(Exception):
    """A signal asked to stop; everything is cleaned up. `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def measure_with_ranks(
    sizes: Sizes, threads: Mapping[int, int], device: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Start as many ranks as the greatest number in `threads`, and return {"at": [...],
    "host_link": ...} as rank 0 wrote it.

    Args:
        threads: of one rank on a CPU, by number of ranks at work.
        say: called with what is measured next.

    Raises:
        MeasurementError: a rank failed.
        Stopped: SIGINT, SIGTERM or SIGHUP arrived.
    """
    world = max(threads)
    with (
        noted_signals() as arrived,
        tempfile.TemporaryDirectory(prefix="onefold-doctor-", ignore_cleanup_errors=True) as name,
    ):
        folder = Path(name)
        job = {
            "parent": os.getpid(),
            "world": world,
            "device": device,
            "threads": {str(c): t for c, t in threads.items()},
            "sizes": asdict(sizes),
        }
        (folder / JOB).write_text(json.dumps(job), encoding="utf-8")
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                ranks.append(_start(folder, rank, world))
            _watch(ranks, folder, arrived, say)
            if arrived:
                raise Stopped(arrived[0])
            result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
            return result
        finally:
            _end(ranks)


def _start(folder: Path, rank: int, world: int) -> subprocess.Popen[bytes]:
    """One rank in a session of its own: a Ctrl-C in the terminal reaches this process only."""
    with (
        (folder / f"rank-{rank}.out").open("wb") as out,
        (folder / f"rank-{rank}.err").open("wb") as err,
    ):
        return subprocess.Popen(
            [sys.executable, "-m", "onefold.cli.doctor_ranks", str(folder), str(rank)],
            env=child_environment(os.environ, world, folder, compiling=False),
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip


def _watch(
    ranks: list[subprocess.Popen[bytes]],
    folder: Path,
    arrived: list[int],
    say: Callable[[str], None],
) -> None:
    """Until all ranks are done, one failed, or a signal came; passes on rank 0's lines."""
    with (folder / "rank-0.out").open(encoding="utf-8", errors="replace") as progress:
        while not arrived:
            running = [r for r in ranks if r.poll() is None]
            for line in progress:
                say(line.strip())
            failed = next((i for i, r in enumerate(ranks) if r.returncode not in (None, 0)), None)
            if failed is not None:
                raise MeasurementError(_why(failed, ranks[failed].returncode, folder))
            if not running:
                return
            time.sleep(INTERVAL)


def _why(rank: int, status: int, folder: Path) -> str:
    said = (
        (folder / f"rank-{rank}.err")
        .read_text(encoding="utf-8", errors="replace")
        .strip()
        .splitlines()
    )
    how = (
        f"was ended by {signal.Signals(-status).name}"
        if status < 0
        else f"ended with status {status}"
    )
    hint = (
        " Memory may have run out: use fewer --ranks, or --quick."
        if -status == signal.SIGKILL
        else ""
    )
    return f"rank {rank} of the measurement {how}: {said[-1] if said else 'it said nothing'}.{hint}"


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


# -- a rank --------------------------------------------------------------------------------------


def main(folder: Path, rank: int) -> None:
    """Measure with the others, and end this process at once: nobody waits for its group."""
    try:
        job = json.loads((folder / JOB).read_text(encoding="utf-8"))
        end_with_parent(job["parent"])
        quiet_third_parties()
        _measure(folder, rank, job)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _measure(folder: Path, rank: int, job: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from onefold.cli.doctor_steps import take_steps
    from onefold.plan.benchmark_blocks import Sizes
    from onefold.plan.measure import measure
    from onefold.plan.measured import decode

    world = int(job["world"])
    device = torch.device("cuda", rank) if job["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        store = dist.FileStore(str(folder / "rendezvous"), world)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=MEETING)
        )
    threads = {int(count): int(number) for count, number in job["threads"].items()}
    at, link = measure(
        decode(Sizes, job["sizes"]),
        threads,
        device,
        lambda text: print(text, flush=True),
        take_steps,
    )
    if rank == 0:
        result = {"at": [asdict(a) for a in at], "host_link": asdict(link) if link else None}
        (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
