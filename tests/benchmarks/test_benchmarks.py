"""The smallest run of each benchmark ends well, measures every side, and leaves nothing behind."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.__main__ import NAMES, about
from benchmarks.harness import Study, parsed, parser
from benchmarks.pages import shown

from benchmarks import hosts
from on_ranks import slow
from ranks import absolute_path

ROOT = Path(__file__).parents[2]
#: Arguments of a run that takes seconds; `{folder}` is a temporary folder. DeepSpeed may not be there.
SMALLEST = {
    "peers": "--quick --model gpt-tiny --tokens 64 --sides ddp fsdp2 onefold-1 onefold-3 deepspeed-3",
    "axes": "--tiny --axes tp --sides fsdp2 onefold-3 --rounds 1 --steps 2 --warmup 2",
    "host_time": "--sides ddp fsdp2 3 --blocks 2 --fake 8 --rounds 1 --steps 2",
    "offload": "--quick --model=gpt-tiny --tokens=64 --copy-mib=2 --chunk-mib=1 --warmup=1 --disk {folder}"
    " --sides onefold-3 onefold-2-cpu-behind onefold-3-nvme-param fsdp2-cpu",
    "checkpoint": "--sides onefold-3 fsdp2 --model gpt-tiny --tokens 32 --ranks 1 --rounds 1 --saves 1"
    " --steps 1 --folder {folder} --behind 2",
    "whole": "--model gpt-tiny --tokens 32 --ranks 2 --rounds 1 --iterations 5"
    " --sides onefold-1-muon onefold-3-muon fsdp2-muon",
    "trainer": "--rounds 1 --steps 2 --warmup 1 --layers 2 --width 32 --sides 'loop 3' 'trainer 3'"
    " 'trainer fsdp2'",
    "convergence": "--cases stages --model llama:tiny --tokenizer bytes --steps 3 --seq 16"
    " --held-out 2 --every 3 --sides stage-3",
    "wires": "--model gpt-tiny --tokens 32 --rates 100M --sides onefold-3 --steps 3",
    "exports": "--shape toy --ranks 2 --rounds 1",
    "predicted": "--model llama:tiny --only 'states on NVMe'",
    "nvme": "{folder} --mib 32 --rounds 1",
    "codecs": "--device cpu --elements 65536 --rounds 1",
    "gpu": "--tiny --rounds 1 --steps 2",
}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_benchmark_uses_is_there(name: str) -> None:
    """Those that need a calibrated machine, or hours, have no smallest run."""
    assert callable(importlib.import_module(f"benchmarks.{name}").main) and about(name)


def found_in(document: Any, key: str) -> Iterator[Any]:
    """Every value under `key`, wherever it stands."""
    if isinstance(document, dict):
        yield from (value for name, value in document.items() if name == key)
        document = list(document.values())
    if isinstance(document, list):
        for each in document:
            yield from found_in(each, key)


@slow
@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_run_measures_every_side_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    if name == "wires" and (reason := hosts.permitted(1e8)):
        pytest.skip(reason)
    arguments = shlex.split(SMALLEST[name].format(folder=tmp_path))
    (temporary := tmp_path / "tmp").mkdir()
    environment = {**os.environ, "PYTHONPATH": absolute_path(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, *arguments, "--output", str(tmp_path / "out")],
        cwd=ROOT,
        env=environment | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left = [p.name for p in temporary.iterdir() if not p.name.startswith("torchinductor")]
    assert not left, f"temporary files were left behind: {left}"
    written = max((tmp_path / "out").glob("*.json"), key=lambda path: path.stat().st_mtime)
    document = json.loads(written.read_text())
    assert str(tmp_path) not in document["command"] and document.get("finished", True)
    bad = set(found_in(document, "status")) - {"ok", "not installed", "left out"}
    assert not bad, document
    # Autocast and bf16 weights, which gpu.py compares too, are other numbers
    alike = document["found"]["step in fp32"] if name == "gpu" else document
    off = [d for d in found_in(alike, "loss_difference") if d is not None and d >= 1e-5]
    assert not off, f"losses differ by {off}"
    if name == "wires":
        (row,) = document["comparisons"][0]["rows"]
        told, sent, frames = row["ledger_between"], row["between_bytes"], row["queue_bytes"]
        assert told <= sent < 1.02 * told and 1.04 * told < frames < 1.1 * told, row
        assert row["agree"] and row["dropped"] == 0


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


@slow
def test_a_launcher_that_is_killed_leaves_no_host_and_no_process() -> None:
    if reason := hosts.permitted(1e8):
        pytest.skip(reason)
    script = """
import os, time
from pathlib import Path
from benchmarks.hosts import joined
with joined(1e8) as pair:
    pair[1].start(["sleep", "600"], folder=Path("/"), environment=dict(os.environ))
    print(pair[0].namespace, pair[1].namespace, flush=True)
    time.sleep(600)
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with launcher:
        assert launcher.stdout is not None
        made = set(launcher.stdout.readline().split())
        held = [psutil.Process(pid) for pid in in_networks(made)]
        assert len(made) == 2 and len(held) >= 4, made
        launcher.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(held, timeout=120)[1] == []
    end = time.monotonic() + 60
    while in_networks(made) and time.monotonic() < end:  # those that a host was about to start
        time.sleep(0.1)
    assert in_networks(made) == []


@dataclass(frozen=True)
class Setting:
    title: str


class Tried(Study):
    """Two sides, of which one fails at first; seconds are said and not measured."""

    schema, known, reference, notes, read = "tried/1", ("a", "b"), "a", {}, Setting
    broken = True
    taken: list[str]

    def take(self, setting: Setting, side: str) -> dict[str, Any]:
        self.taken.append(f"{setting.title} {side}")
        if side == "b" and self.broken:
            return {"status": "failed", "error": "Traceback\nValueError: boom\nbye"}
        rank = {"step_s": [1.0 if side == "a" else 3.0], "losses": [2.0]}
        return {"status": "ok", "ranks": [rank, rank], "wall_s": 60.0}

    def row(self, comparison: Any, side: str, good: Any) -> dict[str, Any]:
        from benchmarks.harness import timings

        return timings(good, self.references(comparison))

    def columns(self, setting: Setting) -> Any:
        return {"side": shown("side"), "ratio": shown("ratio", "{:.1f}")}


@slow
def test_sides_take_turns_failures_keep_their_row_and_a_study_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def study(broken: bool, *arguments: str) -> tuple[int, list[str], dict[str, Any]]:
        how: dict[str, Any] = {"output": tmp_path, "rounds": 1, "budget": None, "resume": False}
        p = parser("tried", None, **how, sides=(["a", "b"], ""))
        tried = Tried(parsed(p, arguments), [Setting("x"), Setting("y")])
        tried.taken, tried.broken, tried.whole_rounds = [], broken, False
        status = tried.run()
        return status, tried.taken, json.loads((tmp_path / "tried.json").read_text())

    status, taken, document = study(True)
    assert (status, taken) == (1, ["x a", "x b", "y a", "y b"])
    assert [row["status"] for row in document["comparisons"][0]["rows"]] == ["ok", "failed"]
    assert "b: failed: ValueError: boom" in capsys.readouterr().out
    Tried.whole_rounds = False
    status, taken, document = study(False, "--resume", "--rounds", "2", "--budget", "0.5")
    assert (status, taken) == (0, ["x b", "y b"]), "what failed is measured; the budget is spent"
    assert document["comparisons"][1]["rows"][1]["ratio"] == 3.0
    assert "budget of 0.5 minutes is spent" in capsys.readouterr().err
    with pytest.raises(ValueError, match="there is no such name; choose from a, b"):
        study(False, "--sides", "c")
