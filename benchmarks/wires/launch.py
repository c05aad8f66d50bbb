"""One turn: two fresh hosts, torchrun on each, and what the ranks wrote. Nothing outlives it
(`hosts.py`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.launch import ROOT, environment, wait
from benchmarks.peers.settings import Setting
from benchmarks.wires.hosts import ADDRESS, INTERFACE, Host, HostError, joined
from benchmarks.wires.settings import HOSTS, Link
from benchmarks.wires.summary import Run

PORT = 29500
"""Where the first host's torchrun waits for the other: a new host has every port free."""


def run_side(
    name: str,
    setting: Setting,
    link: Link,
    number: int,
    *,
    python: str = sys.executable,
    timeout: float = 1800.0,
) -> Run:
    """Measure one side once, on hosts of its own. `timeout` in seconds, for all of the turn.

    Raises:
        HostError: there can be no hosts (any more).
    """
    started, ranks_a_host = time.monotonic(), setting.ranks // HOSTS
    job = {
        "side": name,
        "setting": setting.to_json(),
        "ranks_a_host": ranks_a_host,
        "timeout": timeout,
    }
    with tempfile.TemporaryDirectory(prefix="wires-") as folder, joined(link) as pair:
        path = Path(folder, "job.json")
        path.write_text(json.dumps(job))
        agents = [
            _agent(host, pair[0], path, ranks_a_host, setting.threads, python) for host in pair
        ]
        failed = wait(agents, started + timeout)
        written = [
            file
            for rank in range(setting.ranks)
            if (file := path.with_name(f"rank{rank}.json")).exists()
        ]
        wall = time.monotonic() - started
        if len(written) == setting.ranks:
            return Run(
                name,
                link.to_json(),
                number,
                "ok",
                [json.loads(file.read_text()) for file in written],
                wall_s=wall,
            )
        # The first is not a consequence
        failures = sorted(path.parent.glob("rank*.failed"), key=lambda file: file.stat().st_mtime)
        told = [
            file.read_text(errors="replace")
            for file in failures or [path.with_name(f"host{failed or 0}.log")]
        ]
    said = without_places(told[0]).strip()[-1500:]
    if failed is None:
        return Run(
            name,
            link.to_json(),
            number,
            "timeout",
            error=f"not finished after {timeout:g} s; last said: {said}",
            wall_s=wall,
        )
    return Run(name, link.to_json(), number, "failed", error=said, wall_s=wall)


def without_places(text: str) -> str:
    """A traceback without the folders of this machine: where packages are installed, and where the
    repository is.
    """
    return re.sub(r'(?<=File ")[^"]*/(?=(?:site-packages|benchmarks|src)/)', "", text)


def _agent(
    host: Host, first: Host, job: Path, ranks: int, threads: int, python: str
) -> subprocess.Popen[bytes]:
    """torchrun on one host; its rendezvous is on the first."""
    command = [
        *(
            python,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            str(HOSTS),
            "--nproc-per-node",
            str(ranks),
            "--max-restarts",
            "0",
        ),
        *(
            "--rdzv-backend",
            "c10d",
            "--rdzv-id",
            "wires",
            "--rdzv-endpoint",
            f"{first.address}:{PORT}",
        ),
        # Names resolve to nothing here
        *("--rdzv-conf", f"is_host={int(host is first)}", "--local-addr", host.address),
        *("--monitor-interval", "0.1", "-m", "benchmarks.wires.worker", str(job)),
    ]
    more = {"GLOO_SOCKET_IFNAME": INTERFACE, ADDRESS: host.address}
    with job.with_name(f"host{host.number}.log").open("wb") as log:
        return host.start(
            command,
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
    script = str(Path(__file__).with_name("stream.py"))
    how: dict[str, Any] = {
        "folder": ROOT,
        "environment": environment(1),
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
    }
    with joined(link) as (first, second):
        receiver = first.start([sys.executable, script, "receive"], **how)
        assert receiver.stdout is not None
        if receiver.stdout.readline() != b"ready\n":
            raise HostError("the plain stream that measures the link did not start.")
        sender = second.start([sys.executable, script, "send", first.address, str(seconds)], **how)
        try:
            told = [process.communicate(timeout=30 + seconds)[0] for process in (sender, receiver)]
            return {"bit_s": float(told[1]), "round_trip_ms": float(told[0])}
        except (subprocess.TimeoutExpired, ValueError):
            raise HostError(
                "the plain stream that measures the link did not get through."
            ) from None
