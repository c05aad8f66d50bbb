"""A model too large for the memory it is given, as the documented example has it, watched from
outside.

The ranks run `examples/larger_than_memory.py` in processes of their own; this one reads their
resident memory every 50 milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.page_cache import page_cache_bytes
from benchmarks.peers import launch

EXAMPLE = launch.ROOT / "examples" / "larger_than_memory.py"
PYTHON = sys.executable
EVERY = 0.05
_STEP = re.compile(r"step (\d+): loss ([-+\d.naife]+), ([\d.]+) s")
_SIZE = re.compile(r"([\d.,]+) million parameters")
_ABOVE = re.compile(r"([\d,]+) MiB above")


def measure(
    folder: Path,
    *,
    options: Sequence[str],
    steps: int,
    tokens: int,
    ranks: int,
    threads: int,
    timeout: float,
) -> dict[str, Any]:
    """Run the example with `options`; "status" is "ok", "failed" or "timeout", the rest is there if
    it is ok.

    "resident_bytes": the largest sum over the ranks; "before_bytes": their sum when the first files
    appear on the disk; "disk_bytes": the largest sum of the files' sizes; "moved_bytes": read and
    written by all ranks in the median step, as the kernel counts them; "step_s": the median without
    the first; "page_cache_growth": of the machine, from then to the end of the last step;
    "above_bytes": the sum of what the ranks had in memory at most, beyond what they had before the
    model, as they say themselves.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="offload-large-", dir=folder) as place:
        states = Path(place, "states")
        states.mkdir()
        log = Path(place, "rank0.log")
        command = [
            PYTHON,
            "-u",
            str(EXAMPLE),
            str(states),
            *options,
            "--steps",
            str(steps),
            "--tokens",
            str(tokens),
        ]
        workers = [_start(command, rank, ranks, threads, Path(place)) for rank in range(ranks)]
        try:
            seen = _watch(workers, states, log, begun + timeout)
        finally:
            for worker in workers:
                _end(worker)
        text = log.read_text(errors="replace")
        left = sorted(p.name for p in states.iterdir())
        shutil.rmtree(states, ignore_errors=True)
    failed = next((w.returncode for w in workers if w.returncode), None)
    result = {
        "ranks": ranks,
        "tokens": tokens,
        "wall_s": time.monotonic() - begun,
        "left_on_disk": left,
    }
    if seen is None or failed is not None:
        what = (
            f"not finished after {timeout:.0f} s"
            if seen is None
            else f"a rank ended with status {failed}"
        )
        return {
            **result,
            "status": "timeout" if seen is None else "failed",
            "error": f"{what}: {text[-1500:]}",
        }
    steps_said = _STEP.findall(text)
    seconds = [float(s) for _, _, s in steps_said]
    found, above = _SIZE.search(text), _ABOVE.search(text)
    per_step = [
        b - a for a, b in zip(seen["moved_at_step"], seen["moved_at_step"][1:], strict=False)
    ]
    return {
        **result, "status": "ok", "error": "", "said": text.strip().splitlines()[-1],
        "parameters": float(found.group(1).replace(",", "")) * 1e6 if found else 0.0,
        "losses": [float(loss) for _, loss, _ in steps_said], "seconds": seconds, "step_s": median(seconds[1:] or seconds),
        "resident_bytes": seen["resident"], "before_bytes": seen["before"], "disk_bytes": seen["disk"],
        "above_bytes": int(above.group(1).replace(",", "")) << 20 if above else 0,
        "moved_bytes": median(per_step) if per_step else seen["moved_at_step"][-1], "page_cache_growth": seen["cache"],
    }  # fmt: skip


def _start(
    command: list[str], rank: int, ranks: int, threads: int, place: Path
) -> subprocess.Popen[bytes]:
    port = place / "port"
    if not port.exists():
        with socket.create_server(("127.0.0.1", 0)) as server:  # free a moment ago
            port.write_text(str(server.getsockname()[1]))
    launched = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
    }
    environment = {
        **launch.environment(threads),
        **{k: str(v) for k, v in launched.items()},
        "MASTER_PORT": port.read_text(),
    }
    with (place / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=launch.ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _watch(
    workers: list[subprocess.Popen[bytes]], states: Path, log: Path, deadline: float
) -> dict[str, Any] | None:
    """Until all have ended, or one has failed; None if the deadline came first."""
    resident = before = on_disk = 0
    cache = grown = 0
    moved: list[int] = []
    first = True
    while any(w.poll() is None for w in workers) and not any(w.poll() for w in workers):
        if time.monotonic() > deadline:
            return None
        now = sum(_resident(w.pid) for w in workers)
        resident = max(resident, now)
        if first and any(states.iterdir()):  # the model is about to be built
            first, before, cache = False, now, page_cache_bytes()
        done = len(_STEP.findall(log.read_text(errors="replace")))
        if done > len(moved):
            moved += [sum(_moved(w.pid) for w in workers)] * (done - len(moved))
            on_disk = max(on_disk, _allocated(states))
            grown = page_cache_bytes() - cache
        time.sleep(EVERY)
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(10)
    return {
        "resident": resident,
        "before": before,
        "disk": on_disk,
        "moved_at_step": moved or [0],
        "cache": grown,
    }


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _moved(pid: int) -> int:
    """Bytes that a process had the disk read and write so far."""
    try:
        found = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(found.get("read_bytes", 0)) + int(found.get("write_bytes", 0))


def _allocated(states: Path) -> int:
    total = 0
    # Which passes over a folder that is gone meanwhile
    for folder, folders, files in os.walk(states):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):  # gone meanwhile
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
    return total


def _end(worker: subprocess.Popen[bytes]) -> None:
    if worker.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
