"""The benchmark of memory beside the size of the data: what it writes, what it reads, what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from benchmarks.harness import RESULTS

from benchmarks import large_data, probes

MIB = 1 << 20


def test_the_text_has_the_size_that_is_asked_for_and_no_line_twice(tmp_path: Path) -> None:
    large_data.write_text(tmp_path / "text.txt", 3 * MIB)
    text = (tmp_path / "text.txt").read_text(encoding="utf-8")
    assert 3 * MIB <= len(text.encode()) < 5 * MIB
    lines = text.splitlines()
    assert len(set(lines)) == len(lines) > 10_000


def test_memory_of_a_process_is_its_own_and_its_children_are_found() -> None:
    before = probes.own_bytes(os.getpid())
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    assert 60 * MIB < probes.own_bytes(os.getpid()) - before < 80 * MIB
    del held
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen([sys.executable, "-c", nested], stdin=subprocess.PIPE)
    try:
        while len(probes.family(child.pid)) < 2:
            assert child.poll() is None
        assert set(probes.family(child.pid)) < set(probes.family(os.getpid()))
    finally:
        child.communicate(b"\n", timeout=300)
    assert probes.own_bytes(child.pid) == 0 and probes.family(child.pid) == [child.pid]


def test_gigabytes_of_text_took_the_memory_of_megabytes() -> None:
    found = json.loads((RESULTS / "large_data.json").read_text())
    runs = {run["megabytes"]: run for run in found["runs"]}
    least, most = runs[min(runs)], runs[max(runs)]
    assert most["megabytes"] >= 2048 and most["samples"] > 100 * least["samples"]
    assert most["cache_bytes"] > 4 * most["megabytes"] * 10**6 * 0.95
    assert max(most["peak_bytes"]) < 1.1 * max(least["peak_bytes"])
    assert all(len(run["peak_bytes"]) == large_data.RANKS for run in found["runs"])
