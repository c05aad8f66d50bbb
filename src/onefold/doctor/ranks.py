"""Start ranks on this machine with torchrun's agent, in the process of the command, and run a
calibration with ranks. No process and no file is left, whatever happens.

Each rank of a calibration is `python -m onefold.doctor.ranks FOLDER`. Rank 0 prints on its standard
output what is measured next, one line each, and writes the figures into FOLDER.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from onefold.processes.host import child_environment
from onefold.processes.signals import end_with_parent, quiet_third_parties
from onefold.wording import few

if TYPE_CHECKING:
    from onefold.doctor.benchmark_blocks import Sizes

JOB, RESULT = "job.json", "result.json"


class MeasurementError(RuntimeError):
    """A rank failed. The message ends with the last line that the rank printed."""


class Stopped(Exception):
    """A signal asked to stop, and everything is cleaned up. `number` is the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def launch(ranks: int, folder: Path, *arguments: str, say: Callable[[str], object] = bool) -> str:
    """Run Python with `arguments` as so many ranks until they end. Returns what became of those that
    failed, or "".

    Args:
        folder: for what the ranks print. say: called with each line that rank 0 prints.

    Raises:
        Stopped: a signal arrived; every rank is ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logs = DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL)
    repeatable = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}
    config = LaunchConfig(
        1,
        1,
        ranks,
        logs,
        "doctor",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    environment = child_environment(repeatable, ranks, folder, compiling=False, alone=True)
    logging.disable(logging.CRITICAL)  # the agent's own words
    over = threading.Event()
    reader = threading.Thread(target=_pass_on, args=(folder, say, over), daemon=True)
    reader.start()
    try:
        with patch.dict(os.environ, environment):
            elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        ended = {rank: failure.exitcode for rank, failure in error.failures.items()}
        lost = {rank: code for rank, code in ended.items() if code == -signal.SIGKILL}
        return few(_last_words(folder, rank, code) for rank, code in (lost or ended).items())
    except SignalException as stop:
        raise Stopped(stop.sigval) from None
    finally:
        over.set()
        reader.join()
        logging.disable(logging.NOTSET)
    return ""


def _pass_on(folder: Path, say: Callable[[str], object], over: threading.Event) -> None:
    """Call `say` with the lines that rank 0 prints."""
    passed = 0
    while not over.wait(0.1):
        for file in folder.glob("**/0/stdout.log"):
            lines = file.read_text(errors="replace").split("\n")[:-1]
            for line in lines[passed:]:
                say(line)
            passed = len(lines)


def _last_words(folder: Path, rank: int, status: int) -> str:
    """Say how a rank ended, or where it stood still."""
    files = sorted(folder.glob(f"**/{rank}/stderr.log"))
    said = files[0].read_text(errors="replace").strip() if files else ""
    frames = re.findall(r'File "(.*?)", line (\d+) in (\S+)', said.rpartition("call first)")[2])
    if "Timeout (" in said and frames:
        file, line, function = frames[0]
        return f"rank {rank} stood still in {function} ({Path(file).name}:{line})"
    how = f"ended with status {status}"
    if status < 0:
        how = f"was ended by {signal.Signals(-status).name}"
        how += " (memory may have run out)" if -status == signal.SIGKILL else ""
    return f"rank {rank} {how}: {said.splitlines()[-1] if said else 'it said nothing'}"


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
    with tempfile.TemporaryDirectory(prefix="onefold-doctor-", ignore_cleanup_errors=True) as name:
        job = {"device": device, "threads": dict(threads), "sizes": asdict(sizes)}
        Path(name, JOB).write_text(json.dumps(job), encoding="utf-8")
        failed = launch(max(threads), Path(name), "-m", __name__, name, say=say)
        if failed:
            hint = " Use fewer --ranks, or --quick." if "SIGKILL" in failed else ""
            raise MeasurementError(f"the measurement failed: {failed}.{hint}")
        result: dict[str, Any] = json.loads(Path(name, RESULT).read_text(encoding="utf-8"))
        return result


def main(folder: Path) -> None:
    """Measure as one rank."""
    from onefold.doctor.benchmark_blocks import Sizes
    from onefold.doctor.measure import measure
    from onefold.doctor.reference_steps import take_steps
    from onefold.machine.measured import decode
    from onefold.processes.ranks import join, leave

    job = json.loads((folder / JOB).read_text(encoding="utf-8"))
    ranks = join(job["device"], 0.0)
    threads = {int(count): int(number) for count, number in job["threads"].items()}
    sizes = decode(Sizes, job["sizes"])
    at, link = measure(sizes, threads, ranks.device, lambda t: print(t, flush=True), take_steps)
    if ranks.is_first:
        result = {"at": [asdict(a) for a in at], "host_link": asdict(link) if link else None}
        (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")
    leave()


if __name__ == "__main__":
    end_with_parent()
    quiet_third_parties()
    main(Path(sys.argv[1]))
