"""Start, watch and end the doctor's ranks, and run a calibration with ranks. No process and no file
is left, whatever happens.

Each rank of a calibration is `python -m onefold.doctor.ranks FOLDER RANK`. The ranks rendezvous
through a file in FOLDER. Rank 0 prints on its standard output what is measured next, one line each,
and writes the figures into FOLDER.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold.processes.host import child_environment
from onefold.processes.signals import end_with_parent, noted_signals, quiet_third_parties

if TYPE_CHECKING:
    from onefold.doctor.benchmark_blocks import Sizes

JOB, RESULT = "job.json", "result.json"
#: Seconds between two looks at the ranks.
INTERVAL = 0.05
#: Seconds that ranks wait for each other at the start, while each imports torch.
RENDEZVOUS = 120.0


class MeasurementError(RuntimeError):
    """A rank failed. The message ends with the last line that the rank printed."""


class Stopped(Exception):
    """A signal asked to stop, and everything is cleaned up. `number` is the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class Children:
    """Ranks as child processes. Each has its own session, so a Ctrl-C reaches this process only.

    Attributes:
        folder: for the files of their output.
    """

    folder: Path
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_one(
        self, rank: int, module: str, arguments: Sequence[object], environment: Mapping[str, str]
    ) -> None:
        """Start `python -m module ARGUMENTS` as that rank."""
        with self.output(rank).open("wb") as out, self._errors(rank).open("wb") as errors:
            self.running[rank] = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)], env=environment,
                stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True,
            )  # fmt: skip

    def output(self, rank: int) -> Path:
        """Return the file with the rank's standard output."""
        return self.folder / f"rank-{rank}.out"

    def said(self, rank: int) -> str:
        """Return the text of the rank's standard error."""
        return self._errors(rank).read_text(encoding="utf-8", errors="replace")

    def statuses(self) -> dict[int, int]:
        """Return {rank: exit status} of the ranks that have ended."""
        found = {rank: child.poll() for rank, child in self.running.items()}
        return {rank: status for rank, status in found.items() if status is not None}

    def how(self, rank: int, killed: str = "") -> str:
        """Say how a rank ended, with the last line that it printed.
        `killed`: text to add if SIGKILL ended it.
        """
        status, lines = self.statuses()[rank], self.said(rank).strip().splitlines()
        how = f"ended with status {status}"
        if status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        how += killed if -status == signal.SIGKILL else ""
        return f"{how}: {lines[-1] if lines else 'it said nothing'}"

    def end(self) -> None:
        """Kill all children and wait for them."""
        for child in self.running.values():
            if child.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(child.pid, signal.SIGKILL)
        for child in self.running.values():
            child.wait()
        self.running = {}

    def _errors(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.err"


def measure_with_ranks(
    sizes: Sizes, threads: Mapping[int, int], device: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Start as many ranks as the greatest number in `threads`, and return rank 0's result, {"at":
    [...], "host_link": ...}.

    Args:
        threads: {number of ranks at work: threads of one rank on a CPU}.
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
        environment = child_environment(os.environ, world, folder, compiling=False, alone=True)
        ranks = Children(folder)
        try:
            for rank in range(world):
                ranks.start_one(rank, "onefold.doctor.ranks", (folder, rank), environment)
            _watch(ranks, arrived, say)
            if arrived:
                raise Stopped(arrived[0])
            result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
            return result
        finally:
            ranks.end()


def _watch(ranks: Children, arrived: list[int], say: Callable[[str], None]) -> None:
    """Wait until all ranks are done or a signal arrives, and pass rank 0's lines to `say`.
    Raises MeasurementError if a rank failed.
    """
    with ranks.output(0).open(encoding="utf-8", errors="replace") as progress:
        while not arrived:
            statuses = ranks.statuses()
            for line in progress:
                say(line.strip())
            failed = next((rank for rank, status in sorted(statuses.items()) if status), None)
            if failed is not None:
                hint = ""
                if -statuses[failed] == signal.SIGKILL:
                    hint = " Memory may have run out: use fewer --ranks, or --quick."
                raise MeasurementError(
                    f"rank {failed} of the measurement {ranks.how(failed)}.{hint}"
                )
            if len(statuses) == len(ranks.running):
                return
            time.sleep(INTERVAL)


# -- a rank --------------------------------------------------------------------------------------


def main(folder: Path, rank: int) -> None:
    """Measure with the other ranks, and end this process at once, without waiting for its group."""
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

    from onefold.doctor.benchmark_blocks import Sizes
    from onefold.doctor.measure import measure
    from onefold.doctor.reference_steps import take_steps
    from onefold.machine.measured import decode

    world = int(job["world"])
    device = torch.device("cuda", rank) if job["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        store = dist.FileStore(str(folder / "rendezvous"), world)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=RENDEZVOUS)
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
