"""`benchmarks/wires`: two hosts for real, what crosses the link between them, and nothing left of
them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
from benchmarks.peers import model
from benchmarks.peers.settings import Setting
from benchmarks.wires import __main__ as wires
from benchmarks.wires import hosts
from benchmarks.wires.sides import Link

SLOW = Link(100e6)
TINY = Setting(model="gpt-tiny", tokens=32, precision="bf16", ranks=4, warmup=1, steps=2)


@pytest.fixture
def permitted() -> None:
    """Skips, with the reason, where there can be no hosts."""
    reason = hosts.permitted(SLOW)
    if reason:
        pytest.skip(reason)


def in_networks(namespaces: set[str]) -> list[int]:
    """Processes of the machine whose network is one of these."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns" / "net") in namespaces:
                found.append(int(process.name))
        except OSError:  # it has ended, or is not ours to look at
            continue
    return found


def test_what_four_ranks_send_over_the_link_is_what_the_ledger_says_and_no_host_is_left(
    permitted: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made: set[str] = set()

    class Seen(hosts.Host):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            made.add(self.namespace)

    monkeypatch.setattr(hosts, "Host", Seen)
    (own := tmp_path / "tmp").mkdir()  # another test's folders come and go beside this one
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    asked = (
        "--model",
        "gpt-tiny",
        "--tokens",
        "32",
        "--rates",
        "100M",
        "--sides",
        "onefold-3",
        "--steps",
        "3",
        "--output",
        str(tmp_path),
    )
    assert wires.main(asked) == 0, capsys.readouterr()
    document = json.loads((tmp_path / "wires.json").read_text())
    assert (
        document["schema"] == wires.Wires.schema
        and document["finished"] is True
        and str(tmp_path) not in document["command"]
    )
    (link,) = document["links"]
    assert Link(**link["link"]) == SLOW
    assert 0 < link["measured"]["bit_s"] < 2 * SLOW.rate, (
        "an unlimited link carries a hundred times that"
    )
    (run,) = link["runs"]
    shared = {rank["losses"][-1] for rank in run["ranks"]}
    assert len(run["ranks"]) == 4 and len(shared) == 1, (
        f"four ranks train one model, but its losses are {shared}"
    )
    assert len({rank["losses"][0] for rank in run["ranks"]}) == 4, "each rank has data of its own"
    row = link["rows"][0]
    told = row["ledger_between"]
    sent, interface, frames = row["between_bytes"], row["interface_bytes"], row["queue_bytes"]
    assert told and sent and interface and frames, row
    elements = model.count_parameters("gpt-tiny")
    least = 6 * elements - 2 * model.count_at_the_turn("gpt-tiny")
    assert least <= told < 1.01 * least, (
        f"3Ψ in 16 bits, less a gather of the last units, is {least}; the ledger says {told}"
    )
    assert told <= sent < 1.02 * told, (
        f"sockets sent {sent} bytes to the other host, the ledger says {told}"
    )
    assert sent < interface < 1.04 * told, (
        f"the interface counted {interface} bytes, the ledger {told}"
    )
    assert 1.04 * told < frames < 1.1 * told, (
        f"in frames of 1,500 bytes, of which 66 are headers, {frames} bytes went; the ledger says"
        f" {told}"
    )
    assert row["ledger_inside"] == pytest.approx(told / 2), (
        "of three other ranks two are on the other host"
    )
    assert row["dropped"] == 0 and row["agree"]
    assert (
        "onefold-3" in capsys.readouterr().out
        and "| onefold-3 |" in (tmp_path / "wires.md").read_text()
    )
    end = time.monotonic() + 60
    while in_networks(made) and time.monotonic() < end:  # processes that are ending
        time.sleep(0.1)
    assert len(made) >= 4 and in_networks(made) == []
    assert {child.name() for child in psutil.Process().children(recursive=True)}.isdisjoint(
        {"unshare", "nsenter", "cat", "torchrun"}
    )
    assert [name for name in os.listdir(own) if name.startswith("wires-")] == []


def test_a_launcher_that_is_killed_leaves_no_host_and_no_process(
    permitted: None, tmp_path: Path
) -> None:
    script = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.wires.hosts import joined
from benchmarks.wires.sides import Link
with joined(Link(100e6)) as pair:
    pair[1].start(["sleep", "600"], folder=Path("/"), environment=dict(os.environ))
    print(pair[0].namespace, pair[1].namespace, flush=True)
    time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    made = set(launcher.stdout.readline().split())
    held = [psutil.Process(pid) for pid in in_networks(made)]
    assert len(made) == 2 and len(held) >= 4, made
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()
    assert psutil.wait_procs(held, timeout=120)[1] == []
    end = time.monotonic() + 60
    while in_networks(made) and time.monotonic() < end:  # those that a host was about to start
        time.sleep(0.1)
    assert in_networks(made) == []
