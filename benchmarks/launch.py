"""Ranks in fresh processes: started, watched, reaped. Nothing outlives `run_ranks`, whatever happens
in it.

A rank is `python -m benchmarks.launch MODULE JOB.json RANK`, which `run_ranks` starts: it joins the
other ranks over gloo and writes what `MODULE.measure(job)` returns. A module may have two functions
more: `prepare(job)`, called before the ranks meet, and `join(job)`, in place of gloo. `job` has
"rank", "ranks" and "store" (where ranks meet) beside what was given.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]


class Refused(ValueError):
    """A wrong command line: what was given, and what to write instead."""


# -- those who start ranks -------------------------------------------------------------------------


def interpreter_has(python: str, package: str) -> bool:
    """Whether that interpreter finds the package; nothing is imported."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        asked = subprocess.run([python, "-c", code], env=environment(1), cwd=ROOT, check=False)
    except OSError as error:
        raise Refused(f"--deepspeed-python {python}: expected an interpreter ({error}).") from None
    return asked.returncode == 0


def on_deepspeed(side: str) -> bool:
    """Whether a side needs DeepSpeed, which may have an interpreter of its own."""
    return "deepspeed" in side.replace("-", " ").split()


def python_of(side: str, options: Any) -> str:
    """The interpreter that runs a side."""
    return str(options.deepspeed_python) if on_deepspeed(side) else sys.executable


def absent(sides: Iterable[str], options: Any) -> set[str]:
    """Those of the sides whose library is not installed."""
    theirs = {side for side in sides if on_deepspeed(side)}
    there = theirs and interpreter_has(options.deepspeed_python, "deepspeed")
    return set() if there else theirs


def environment(threads: int, source: Path = ROOT / "src") -> dict[str, str]:
    """The ranks' environment: threads, gloo on the loopback interface, Onefold from `source`."""
    launchers = {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
    kept = {name: value for name, value in os.environ.items() if name not in launchers}
    paths = [str(source), str(ROOT), *kept.get("PYTHONPATH", "").split(os.pathsep)]
    kept["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    kept["OMP_NUM_THREADS"] = str(threads)
    kept["PYTHONWARNINGS"] = "ignore"
    if sys.platform.startswith("linux"):
        kept.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return kept


def run_ranks(
    module: str,
    job: dict[str, Any],
    ranks: int,
    *,
    threads: int = 1,
    python: str = sys.executable,
    timeout: float = 600.0,
    source: Path = ROOT / "src",
    start: Callable[..., subprocess.Popen[bytes]] | None = None,
) -> dict[str, Any]:
    """Let every rank call `module.measure(job)`; answers `status` ("ok", "failed" or "timeout"),
    `ranks` (what each returned), `error`, `wall_s`.

    The ranks meet through a file in a temporary folder (no port is chosen). One that fails, or
    `timeout` seconds, ends all; the error carries its output's end. `start` may stand in for this
    module's, with the rank before the command.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        path = Path(folder, "job.json")
        path.write_text(json.dumps({**job, "ranks": ranks, "threads": threads}))
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                work = [python, "-m", "benchmarks.launch", module, str(path), str(rank)]
                how = (work, Path(folder, f"rank{rank}.log"), environment(threads, source))
                workers.append(start(rank, *how) if start else started_here(*how))
            failed = wait(workers, started + timeout)
        finally:
            for worker in workers:
                reap(worker)
        wall = time.monotonic() - started
        written = [file for r in range(ranks) if (file := Path(folder, f"rank{r}.json")).exists()]
        # All was measured; a library that stumbles at its exit has lost nothing
        if len(written) == ranks:
            told = [json.loads(file.read_text()) for file in written]
            return {"status": "ok", "ranks": told, "wall_s": wall}
        last = Path(folder, f"rank{failed or 0}.log").read_text(errors="replace").strip()[-1500:]
        if failed is None:
            error = f"not finished after {timeout:.0f} s; rank 0 last said: {last}"
            return {"status": "timeout", "error": error, "wall_s": wall}
        error = f"rank {failed} ended with status {workers[failed].returncode}: {last}"
        return {"status": "failed", "error": error, "wall_s": wall}


def run_side(
    module: str, side: str, setting: Any, options: Any, start: Any = None, **job: Any
) -> dict[str, Any]:
    """Measure a side in a setting once, with the interpreter that has its library."""
    return run_ranks(
        module,
        {"side": side, "setting": asdict(setting), "timeout": options.timeout, **job},
        setting.ranks,
        threads=setting.threads,
        python=python_of(side, options),
        timeout=options.timeout,
        start=start,
    )


def started_here(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process that ends with us: its standard input is a pipe that only we hold open."""
    with log.open("wb") as out:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait(workers: list[subprocess.Popen[bytes]], deadline: float) -> int | None:
    """The number of the worker that failed first, None if none did. Others get 3 s to notice."""
    failed: int | None = None
    while time.monotonic() < deadline and any(w.poll() is None for w in workers):
        if failed is None and (bad := [r for r, w in enumerate(workers) if w.poll()]):
            failed, deadline = bad[0], min(deadline, time.monotonic() + 3)
        time.sleep(0.05)
    if failed is None:
        failed = next((r for r, w in enumerate(workers) if w.poll()), None)
    return failed


def reap(worker: subprocess.Popen[Any]) -> None:
    """End a process and all that it has started."""
    if worker.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            # Its own session, so its compilers and helpers go too
            os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    if worker.stdin:
        worker.stdin.close()


# -- a rank ----------------------------------------------------------------------------------------


def join(job: dict[str, Any], device: str = "cpu", **more: Any) -> None:
    """Meet the other ranks: over NCCL where each has a GPU, else over gloo."""
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(job["rank"] % gpus)
        backend = "nccl" if job["ranks"] <= gpus else "gloo"
    given = {"init_method": job["store"], "rank": job["rank"], "world_size": job["ranks"]}
    dist.init_process_group(backend, **given, **more)


def leave(result: dict[str, Any], folder: Path, rank: int) -> NoReturn:
    """Write `rankN.json` whole, wait for the others, end this process."""
    import torch.distributed as dist

    written = folder / f"rank{rank}.part"
    written.write_text(json.dumps(result))
    written.rename(folder / f"rank{rank}.json")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    # What was measured is on disk; the order in which libraries take themselves apart is not our
    # subject
    os._exit(0)


def _exit_with_the_launcher() -> None:
    """End this process when the launcher is gone, which closes our standard input."""

    def watch() -> None:
        # Not sys.stdin: its lock, held here, would be fatal to an interpreter that is ending
        while os.read(0, 1):
            pass
        os._exit(3)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def main() -> NoReturn:
    """One rank."""
    _exit_with_the_launcher()
    path, rank = Path(sys.argv[2]), int(sys.argv[3])
    job: dict[str, Any] = json.loads(path.read_text())
    job |= {"rank": rank, "store": f"file://{path.with_name('store')}"}
    world = str(job["ranks"])
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world
    )
    module = importlib.import_module(sys.argv[1])
    if hasattr(module, "prepare"):
        module.prepare(job)
    import torch

    torch.set_num_threads(job["threads"])
    getattr(module, "join", join)(job)
    result = module.measure(job)
    gc.collect()  # `leave` ends the process at once: what is freed with a side must go before
    leave(result, path.parent, rank)


if __name__ == "__main__":
    main()
