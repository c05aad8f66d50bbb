"""The checks with ranks that torchrun started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onefold.doctor.checks import OK, WRONG
from ranks import absolute_path

pytestmark = [pytest.mark.one_in(16), pytest.mark.slow]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", absolute_path())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "broken", ["nothing=broken", "collectives=stands still", "ordered sums=dies"]
)
def test_under_torchrun_rank_0_tells_and_a_rank_that_is_lost_is_a_row(
    broken: str, tmp_path: Path
) -> None:
    script = tmp_path / "check.py"
    script.write_text(
        "import os, sys\nfrom dataclasses import replace\nfrom onefold.doctor import"
        " coordinator\nfrom onefold.doctor.checks import CHECKS\nlimits = {'collectives': 4.0"
        " if 'stands still' in os.environ['BROKEN'] else 60.0, 'ordered sums': 60.0, 'native sums':"
        " 60.0}\ncoordinator.CHECKS = tuple(replace(c, limit=limits[c.name]) for c in CHECKS if"
        " c.name in limits)\nrows = coordinator.check_with_launcher({'device': 'cpu', 'gpus': []},"
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
