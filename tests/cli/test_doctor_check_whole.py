"""`onefold doctor --check` as a user runs it, alone and under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onefold.cli.doctor_checks import CHECKS, LEFT_OUT, OK, WRONG
from ranks import absolute_path


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", absolute_path())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_machine_without_a_gpu_is_checked(ranks: int, tmp_path: Path) -> None:
    """Whole, as a user runs it."""
    command = [
        sys.executable,
        "-m",
        "onefold",
        "doctor",
        "--device",
        "cpu",
        "--check",
        "--ranks",
        str(ranks),
        "--json",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    status = {check["name"]: check["status"] for check in report["checks"]}
    left_out = {"no synchronization"} | (
        {"kernels"} if "kernels" in status and status["kernels"] == LEFT_OUT else set()
    )
    left_out |= {"two levels"} if ranks < 4 else set()
    left_out |= (
        {"collectives", "ordered sums", "native sums", "stages", "overlap"} if ranks == 1 else set()
    )
    assert status == {
        name: LEFT_OUT if name in left_out else OK for name in (check.name for check in CHECKS)
    }, report["checks"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "broken", ["nothing=broken", "collectives=stands still", "ordered sums=dies"]
)
def test_under_torchrun_rank_0_tells_and_a_rank_that_is_lost_is_a_row(
    broken: str, tmp_path: Path
) -> None:
    script = tmp_path / "check.py"
    script.write_text(
        "import os, sys\nfrom dataclasses import replace\nfrom onefold.cli import"
        " doctor_check\nfrom onefold.cli.doctor_checks import CHECKS\nlimits = {'collectives': 4.0"
        " if 'stands still' in os.environ['BROKEN'] else 60.0, 'ordered sums': 60.0, 'native sums':"
        " 60.0}\ndoctor_check.CHECKS = tuple(replace(c, limit=limits[c.name]) for c in CHECKS if"
        " c.name in limits)\nrows = doctor_check.check_with_launcher({'device': 'cpu', 'gpus': []},"
        " lambda name: None, 'broken_doctor')\nprint([(row.name, row.status, row.said) for row in"
        " rows] if rows else 'a silent rank')\n"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "BROKEN": broken},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("a silent rank") == 1 and done.stdout.count("collectives") == 1, (
        done.stdout
    )
    lost, _, how = broken.partition("=")
    for name in ("collectives", "ordered sums", "native sums"):
        assert f"('{name}', '{WRONG if name == lost else OK}'" in done.stdout, done.stdout
    assert {"dies": "SIGKILL", "stands still": "in stands_still"}.get(how, "") in done.stdout
