"""Starting the ranks of a calibration and bringing back what they measured. Whatever happens, no
process and no file is left.
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
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold.cli.doctor_rank import JOB, RESULT
from onefold.train.launch import child_environment, noted_signals

if TYPE_CHECKING:
    from onefold.plan.benchmark_blocks import Sizes

#: Seconds between two looks at the ranks.
INTERVAL = 0.05


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
            [sys.executable, "-m", "onefold.cli.doctor_rank", str(folder), str(rank)],
            env=child_environment(os.environ, world, folder, compiling=False),
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip


def _watch(
    ranks: list[subprocess.Popen[bytes]],
    folder: Path,
    arrived: list[int],
    say: Callable[[str], None],
) -> None:
    """Until all ranks are done, one failed, or a signal came. What rank 0 writes is passed on line
    by line.
    """
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
