"""The smallest run of each benchmark ends well, measures every side, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ranks import absolute_path

ROOT = Path(__file__).parents[2]
#: Arguments of a run that takes seconds; `{folder}` is a temporary folder.
SMALLEST = {
    "peers": "--quick --model gpt-tiny --tokens 64 --peers ddp fsdp2 onefold-1 onefold-3",
    "axes": "--tiny --axes tp --sides fsdp2 onefold-3 --rounds 1 --steps 2 --warmup 2",
    "host_time": "--sides ddp fsdp2 3 --blocks 2 --fake 8 --rounds 1 --steps 2",
    "offload": "--quick --model=gpt-tiny --tokens=64 --copy-mib=2 --chunk-mib=1 --warmup=1"
    " --disk {folder} --sides onefold-3 onefold-2-cpu-behind onefold-3-nvme-param fsdp2-cpu",
    "checkpoint": "--peers onefold-3 --ways --model gpt-tiny --tokens 32 --ranks 1 --rounds 1"
    " --saves 1 --steps 1 --folder {folder} --behind 2",
    "whole": "--model gpt-tiny --tokens 32 --ranks 2 --rounds 1 --iterations 5"
    " --sides onefold-1-muon onefold-3-muon fsdp2-muon",
    "trainer": "--rounds 1 --steps 2 --warmup 1 --layers 2 --width 32 --sides"
    " 'loop 3' 'trainer 3' 'trainer fsdp2'",
}


def found_in(document: Any, key: str) -> Iterator[Any]:
    """Every value under `key`, wherever it stands."""
    if isinstance(document, dict):
        yield from (value for name, value in document.items() if name == key)
        document = list(document.values())
    if isinstance(document, list):
        for each in document:
            yield from found_in(each, key)


def run(command: list[str], folder: Path) -> dict[str, Any]:
    """Run a benchmark and return the document that it wrote into folder/out."""
    (folder / "tmp").mkdir()
    environment = {**os.environ, "PYTHONPATH": absolute_path(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, "--output", str(folder / "out")],
        cwd=ROOT,
        env=environment | {"TMPDIR": str(folder / "tmp")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left = [p.name for p in (folder / "tmp").iterdir() if not p.name.startswith("torchinductor")]
    assert not left, f"temporary files were left behind: {left}"
    written = max((folder / "out").glob("*.json"), key=lambda path: path.stat().st_mtime)
    document: dict[str, Any] = json.loads(written.read_text())
    fine = "ok", "not installed", "left out"
    failed = [s for s in found_in(document, "status") if s not in fine]
    assert not failed and document.get("finished", True) is True, document
    off = [d for d in found_in(document, "loss_difference") if d is not None and d >= 1e-5]
    assert not off, f"losses differ by {off}"
    return document


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_run_measures_every_side_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    arguments = shlex.split(SMALLEST[name].format(folder=tmp_path))
    document = run(["-m", f"benchmarks.{name}", *arguments], tmp_path)
    assert str(tmp_path) not in document.get("command", "")


@pytest.mark.slow
def test_the_gpu_benchmark_measures_every_chapter_on_the_cpu(tmp_path: Path) -> None:
    document = run(["benchmarks/gpu.py", "--tiny"], tmp_path)
    assert document["tables"] and all(table["rows"] for table in document["tables"])
