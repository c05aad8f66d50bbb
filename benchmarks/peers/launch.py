"""The ranks of one peer in one round: started, watched, reaped. Nothing outlives `run_peer`,
whatever happens in it.
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
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.peers import adapters
from benchmarks.peers.settings import Setting


@dataclass
class Run:
    """One peer in one round. `status` is "ok", "failed" or "timeout"; `ranks` holds what each
    worker wrote.
    """

    peer: str
    round: int
    status: str
    ranks: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    wall_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary that `Run(**d)` reads back."""
        return dict(self.__dict__)


def interpreter_has(python: str, package: str) -> bool:
    """Whether that interpreter finds the package; nothing is imported."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return (
        subprocess.run([python, "-c", code], env=environment(1), cwd=ROOT, check=False).returncode
        == 0
    )


def absent(sides: Iterable[str], deepspeed_python: str) -> set[str]:
    """Those of the sides whose library is not installed."""
    pythons = {"deepspeed": deepspeed_python, "onefold": sys.executable}
    needed = {side: adapters.requirement(side) for side in sides}
    there = {
        package: interpreter_has(pythons[package], package)
        for package in set(needed.values())
        if package
    }
    return {side for side, package in needed.items() if package and not there[package]}


def environment(threads: int) -> dict[str, str]:
    """The workers' environment: threads pinned down, gloo on the loopback interface, this
    repository importable.
    """
    launchers = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    kept = {name: value for name, value in os.environ.items() if name not in launchers}
    paths = [str(ROOT), str(ROOT / "src"), *kept.get("PYTHONPATH", "").split(os.pathsep)]
    kept["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    kept["OMP_NUM_THREADS"] = str(threads)
    kept["PYTHONWARNINGS"] = "ignore"
    if sys.platform.startswith("linux"):
        kept.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return kept


def run_peer(
    peer: str,
    setting: Setting,
    number: int,
    *,
    python: str = sys.executable,
    timeout: float = 600.0,
) -> Run:
    """Measure one peer once, in fresh processes."""
    job = {"peer": peer, "setting": setting.to_json()}
    outcome = run_ranks(
        "benchmarks.peers.worker",
        job,
        setting.ranks,
        threads=setting.threads,
        python=python,
        timeout=timeout,
    )
    return Run(peer, number, **outcome)


def run_ranks(
    module: str,
    job: dict[str, Any],
    ranks: int,
    *,
    threads: int,
    python: str = sys.executable,
    timeout: float = 600.0,
) -> dict[str, Any]:
    """Start `python -m module JOB.json RANK` on every rank; answers `status`, `ranks`, `error`,
    `wall_s` (see `Run`).

    The ranks meet through a file named `store` beside the job, in a temporary folder (no port is
    chosen), and each leaves `rankN.json` there. One that fails, or `timeout` seconds, ends all; the
    error carries its output's end.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        path = Path(folder, "job.json")
        path.write_text(json.dumps(job))
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                workers.append(
                    _start([python, "-m", module, str(path), str(rank)], path, rank, threads)
                )
            failed = wait(workers, started + timeout)
        finally:
            for worker in workers:
                _reap(worker)
        wall = time.monotonic() - started
        written = [file for r in range(ranks) if (file := Path(folder, f"rank{r}.json")).exists()]
        # All was measured; a library that stumbles at its exit has lost nothing
        if len(written) == ranks:
            return {
                "status": "ok",
                "ranks": [json.loads(file.read_text()) for file in written],
                "wall_s": wall,
            }
        logs = [_tail(Path(folder, f"rank{r}.log")) for r in range(ranks)]
        if failed is None:
            return {
                "status": "timeout",
                "error": f"not finished after {timeout:.0f} s; rank 0 last said: {logs[0]}",
                "wall_s": wall,
            }
        error = f"rank {failed} ended with status {workers[failed].returncode}: {logs[failed]}"
        return {"status": "failed", "error": error, "wall_s": wall}


def _start(command: list[str], job: Path, rank: int, threads: int) -> subprocess.Popen[bytes]:
    """Standard input is a pipe that only this process holds open: it closes with us, and the worker
    leaves.
    """
    with job.with_name(f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(threads),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait(workers: list[subprocess.Popen[bytes]], deadline: float) -> int | None:
    """The number of the worker (a rank, or an agent of a host) that failed first, None if all ended
    well or the time is up. Others get 3 s to notice a failure.
    """
    failed: int | None = None
    while time.monotonic() < deadline and any(w.poll() is None for w in workers):
        if failed is None and (bad := [r for r, w in enumerate(workers) if w.poll()]):
            failed, deadline = bad[0], min(deadline, time.monotonic() + 3)
        time.sleep(0.05)
    if failed is None:
        failed = next((r for r, w in enumerate(workers) if w.poll()), None)
    return failed


def _reap(worker: subprocess.Popen[bytes]) -> None:
    if worker.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            # Its own session, so its compilers and helpers go too
            os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    if worker.stdin:
        worker.stdin.close()


def _tail(log: Path, characters: int = 1500) -> str:
    try:
        return log.read_text(errors="replace").strip()[-characters:]
    except OSError:
        return "(nothing)"
