"""`onefold doctor --check` as a user runs it, alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onefold.doctor.checks import CHECKS, LEFT_OUT, OK
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
