"""`benchmarks/wires`: two hosts for real, what crosses the link between them, and nothing left of
them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
from benchmarks.harness import Run
from benchmarks.on_gpu import chapters
from benchmarks.peers import model
from benchmarks.peers.settings import Setting
from benchmarks.wires import __main__ as wires
from benchmarks.wires import hosts, launch, worker
from benchmarks.wires.sides import SIDES, Link, chosen_sides, read_rate

from benchmarks import gpu, pages

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


def made_up_run(side: str, number: int, seconds: float, between: int, loss: float = 2.0) -> Run:
    """A run of four ranks and two steps; the last rank is a tenth slower, and each host's first
    knows what its link carried.
    """
    ranks: list[dict[str, Any]] = [
        {
            "rank": rank,
            "losses": [loss, loss, loss],
            "step_s": [seconds * (1.1 if rank == 3 else 1.0)] * 2,
            "inside_bytes": 500,
            "between_bytes": between,
        }
        | (
            {"interface_bytes": 2 * between + 100, "queue_bytes": 2 * between + 200, "dropped": 0}
            if rank % 2 == 0
            else {}
        )
        for rank in range(4)
    ]
    return Run(side, number, "ok", ranks)


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


def test_bytes_are_a_hosts_and_a_step_lasts_until_its_slowest_rank() -> None:
    elements = model.count_parameters("gpt-tiny")
    runs = [
        made_up_run(side, n, s * n, b)
        for n in (1, 2)
        for side, s, b in (("onefold-3", 3.0, 6 * elements), ("ddp", 1.5, elements))
    ]
    runs.append(Run("fsdp2", 1, "failed", error="Traceback\nValueError: boom\n"))
    ours, theirs, failed, absent = wires.rows(TINY, SLOW, runs, ["deepspeed-3"])
    assert ours["between_bytes"] == 2 * 6 * elements / 2 and ours["equivalents"] == 3.0
    assert ours["expected"] == pytest.approx(3 - model.count_at_the_turn("gpt-tiny") / elements)
    assert ours["inside_bytes"] == 500 and ours["interface_bytes"] == (12 * elements + 100) / 2
    assert ours["step_s"] == pytest.approx((3.3 + 6.6) / 2) and ours["faster"] == 1.0
    assert theirs["faster"] == pytest.approx(2.0) and theirs["loss_difference"] == 0.0
    assert ours["busy"] == pytest.approx(8 * (12 * elements + 200) / 2 / 100e6 / ours["step_s"])
    assert ours["ledger_between"] is None and ours["agree"]
    assert failed["status"] == "failed" and absent["status"] == "not installed"
    assert "fsdp2: failed: ValueError: boom" in pages.table(
        wires.COLUMNS, [ours, theirs, failed, absent]
    )
    runs[0].ranks[2]["losses"][-1] = 2.5
    apart = wires.rows(TINY, SLOW, runs)[0]
    assert apart["agree"] is False and "NO" in pages.cells(wires.COLUMNS, apart)


def test_a_move_is_divided_by_where_the_other_ranks_of_its_group_are() -> None:
    from onefold.comm.ledger import TrafficLedger

    traffic = TrafficLedger()
    counter = worker.LedgerCounter(traffic, ranks_a_host=2, rank=1)
    for group, nbytes in (("0-3", 300), ("0-1", 40), ("1,3", 5)):
        traffic.record("all-gather", "unit", nbytes, group=group)
    assert counter.bytes() == {"ledger_inside": 140, "ledger_between": 205, "control_bytes": 0}
    assert worker.read_ranks("0-1,4") == [0, 1, 4]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--rates", "fast"], "100M, 1G"),
        (["--sides", "zeropp++"], "onefold-3"),
        (["--steps", "0"], "at least 1"),
    ],
)
def test_a_wrong_command_line_is_told_what_to_write(
    asked: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wires.main(asked) == 2
    assert said in capsys.readouterr().err


def test_sides_are_chosen_in_the_order_of_a_round_and_a_family_takes_all_of_it() -> None:
    assert chosen_sides(list(SIDES)[::-1]) == list(SIDES)
    ours = [name for name, side in SIDES.items() if side.family == "onefold"]
    assert chosen_sides(["onefold"]) == ours
    assert chosen_sides(["fsdp2"]) == ["fsdp2"], "a side of that name is that side"
    assert [read_rate(text) for text in ("100M", "2.5G", "10G")] == [1e8, 2.5e9, 1e10]


def test_where_there_can_be_no_hosts_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(hosts.TOOLS, "tc", None)
    assert wires.main(["--output", str(tmp_path)]) == 0
    assert "skipped: tc cannot be found: install iproute2" in capsys.readouterr().out
    assert wires.main(["--output", str(tmp_path), "--json"]) == 0
    assert "install iproute2" in json.loads(capsys.readouterr().out)["skipped"]
    assert list(tmp_path.iterdir()) == [], "what was measured elsewhere is not overwritten"


def test_a_turn_that_fails_or_takes_too_long_is_told_and_ends(
    permitted: None, tmp_path: Path
) -> None:
    def python(text: str) -> str:
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        return str(script)

    told = '  File "/home/somebody/lib/site-packages/peer/engine.py", line 7: boom'
    failed = launch.run_side(
        "ddp", TINY, SLOW, python=python(f"echo '{told}'; exit 7"), timeout=300
    )
    assert (failed["status"], failed["error"]) == (
        "failed",
        'File "site-packages/peer/engine.py", line 7: boom',
    )
    late = launch.run_side("ddp", TINY, SLOW, python=python("echo waiting; sleep 600"), timeout=8)
    assert late["status"] == "timeout" and "last said: waiting" in late["error"]
    assert {child.name() for child in psutil.Process().children(recursive=True)}.isdisjoint(
        {"unshare", "nsenter", "sleep"}
    )


def test_the_chapter_of_the_gpu_benchmark_fails_where_streams_change_a_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, bool]] = []

    def run(
        name: str, setting: Setting, options: argparse.Namespace, **more: Any
    ) -> dict[str, Any]:
        changes = more.get("changes", {})
        asked.append((name, changes.get("overlap", True)))
        losses = [3.0, 2.5 if changes and name == "hsdp" else 2.0]
        return {
            "status": "ok",
            "ranks": [{"losses": losses, "between_bytes": 6 * 75, "numel": 100}] * setting.ranks,
        }

    monkeypatch.setattr(chapters, "run", run)
    table, outcomes = chapters.groups(argparse.Namespace(precisions=["bf16"], device="cpu"))
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == list(chapters.RECIPES) and set(asked) == {
        (n, True) for n in chapters.RECIPES
    } | {(n, False) for n in chapters.TWICE}
    assert rows["zeropp"] == ["bf16", "2.000000", "0.0e+00", "the same bits", "0.750", "0.375"]
    assert rows["hsdp"][3] == "DIFFERS" and [o["status"] for o in outcomes].count("differs") == 1
    assert set(chapters.RECIPES) <= set(SIDES) and "groups" in gpu.CHAPTERS
