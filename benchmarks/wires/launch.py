"""One turn: two fresh hosts, torchrun on each, what the ranks wrote. Nothing outlives it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.launch import environment, wait
from benchmarks.peers.settings import Setting
from benchmarks.wires.hosts import ADDRESS, INTERFACE, Host, HostError, joined
from benchmarks.wires.sides import HOSTS, Link

PORT = 29500
"""Where the first host's torchrun waits for the other: a new host has every port free."""


def run_side(
    name: str,
    setting: Setting,
    link: Link,
    *,
    python: str = sys.executable,
    timeout: float = 1800.0,
) -> dict[str, Any]:
    """Measure one side once, on hosts of its own; answers as `launch.run_ranks` does.

    Raises:
        HostError: there can be no hosts (any more).
    """
    started, ranks_a_host = time.monotonic(), setting.ranks // HOSTS
    about = {"side": name, "setting": asdict(setting), "timeout": timeout}
    with tempfile.TemporaryDirectory(prefix="wires-") as folder, joined(link) as pair:
        path = Path(folder, "job.json")
        path.write_text(json.dumps({**about, "ranks_a_host": ranks_a_host}))
        agents = [
            _agent(host, pair[0], path, ranks_a_host, setting.threads, python) for host in pair
        ]
        failed = wait(agents, started + timeout)
        files = [path.with_name(f"rank{rank}.json") for rank in range(setting.ranks)]
        wall = time.monotonic() - started
        if all(file.exists() for file in files):
            ranks = [json.loads(file.read_text()) for file in files]
            return {"status": "ok", "ranks": ranks, "wall_s": wall}
        # The first is not a consequence
        failures = sorted(path.parent.glob("rank*.failed"), key=lambda file: file.stat().st_mtime)
        told = failures[0] if failures else path.with_name(f"host{failed or 0}.log")
        said = without_places(told.read_text(errors="replace")).strip()[-1500:]
    if failed is None:
        said = f"not finished after {timeout:g} s; last said: {said}"
    status = "timeout" if failed is None else "failed"
    return {"status": status, "error": said, "wall_s": wall}


def without_places(text: str) -> str:
    """A traceback without the folders of this machine."""
    return re.sub(r'(?<=File ")[^"]*/(?=(?:site-packages|benchmarks|src)/)', "", text)


def _agent(
    host: Host, first: Host, job: Path, ranks: int, threads: int, python: str
) -> subprocess.Popen[bytes]:
    """torchrun on one host; its rendezvous is on the first."""
    how: dict[str, object] = {
        "nnodes": HOSTS,
        "nproc-per-node": ranks,
        "max-restarts": 0,
        "rdzv-backend": "c10d",
        "rdzv-id": "wires",
        "rdzv-endpoint": f"{first.address}:{PORT}",
        # Names resolve to nothing here
        "rdzv-conf": f"is_host={int(host is first)}",
        "local-addr": host.address,
        "monitor-interval": 0.1,
    }
    options = [word for name, value in how.items() for word in (f"--{name}", str(value))]
    work = ["-m", "benchmarks.wires.worker", str(job)]
    more = {"GLOO_SOCKET_IFNAME": INTERFACE, ADDRESS: host.address}
    with job.with_name(f"host{host.number}.log").open("wb") as log:
        return host.start(
            [python, "-m", "torch.distributed.run", *options, *work],
            folder=ROOT,
            environment=environment(threads) | more,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def measured(link: Link, seconds: float = 0.5) -> dict[str, Any]:
    """What one plain stream gets from the link: payload "bit_s" a second, and "round_trip_ms" of
    its first words.

    Raises:
        HostError: there can be no hosts, or the stream did not get through.
    """
    script = [sys.executable, str(Path(__file__).with_name("stream.py"))]
    how: dict[str, Any] = {"folder": ROOT, "environment": environment(1)}
    how |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    with joined(link) as (first, second):
        receiver = first.start([*script, "receive"], **how)
        assert receiver.stdout is not None
        if receiver.stdout.readline() != b"ready\n":
            raise HostError("the plain stream that measures the link did not start.")
        sender = second.start([*script, "send", first.address, str(seconds)], **how)
        try:
            told = [process.communicate(timeout=30 + seconds)[0] for process in (sender, receiver)]
            return {"bit_s": float(told[1]), "round_trip_ms": float(told[0])}
        except (subprocess.TimeoutExpired, ValueError):
            raise HostError(
                "the plain stream that measures the link did not get through."
            ) from None
