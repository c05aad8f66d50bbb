"""`onefold doctor` as a user runs it: what it prints, what it refuses, and that it leaves nothing
behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from calibrations import calibration
from onefold.cli.doctor import doctor_command
from onefold.comm import MOVES
from onefold.machine.calibration import Calibration

SOURCE = str(Path(__file__).parents[2] / "src")
COMMAND = "import typer; from onefold.cli.doctor import doctor_command; typer.run(doctor_command)"
#: The command with the smallest sizes of each kind, two where a line is fitted through them: what is
#: measured is no matter here.
SMALLEST = (
    """
from dataclasses import replace
from onefold.doctor.benchmark_blocks import Sizes
def smallest(device, quick, half, real=Sizes.for_device):
    s = real(device, quick, half)
    fewer = {name: getattr(s, name)[:2] for name in ("matrices", "blocks", "gated", "chains", "optimizer_numels", "move_bytes")}
    lone = {"copy_bytes": s.copy_bytes[:1], "overlap_bytes": s.move_bytes[1], "steps": ((64, 16),)}
    return replace(s, **fewer, **lone, disk_bytes=1 << 22, budget_s=0)
Sizes.for_device = smallest
"""
    + COMMAND
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own; the terminal is wide enough for every table."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def doctor(*arguments: str) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(doctor_command)
    return CliRunner().invoke(app, list(arguments))


def test_it_says_what_the_machine_has_without_measuring(cache: Path) -> None:
    result = doctor("--json", "--device", "cpu")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    machine = said["machine"]
    assert machine["ranks"] == machine["cpu"]["physical_cores"] >= 1
    assert machine["backend"] == "gloo" and "gloo" in machine["backends"]
    assert 0 < machine["memory"]["free"] <= machine["memory"]["total"]
    assert machine["packages"]["torch"] and [d["use"] for d in machine["disks"]] == [
        "working folder",
        "temporary files",
        "cache",
    ]
    assert all(d["free"] > 0 for d in machine["disks"])
    assert said["calibration"] is None and "onefold doctor --calibrate" in said["note"]
    assert not cache.exists()


def test_a_saved_calibration_is_shown() -> None:
    calibration().save()
    shown = doctor("--device", "cpu").stdout
    for words in (
        "Rates of one rank",
        "all-gather",
        "reduce-scatter",
        "all-reduce",
        "4 ranks: 50% of a gather vanishes",
        "disk at /data",
    ):
        assert words in shown
    said = json.loads(doctor("--device", "cpu", "--json").stdout)
    assert Calibration.from_json(said["calibration"]).measured_ranks == (1, 2, 4)
    assert said["note"] == ""


# -- with ranks ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_measurement_is_saved_printed_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    path = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH", "")]))
    own = {"PYTHONPATH": path, "TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
    asked = ["--device", "cpu", "--calibrate", "--quick", "--ranks", "2,1", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", SMALLEST, *asked, "--output", str(tmp_path / "doctor.json")],
        cwd=tmp_path, env=os.environ | own, text=True, capture_output=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = Calibration.load(tmp_path / "doctor.json")
    saved = json.loads((tmp_path / "doctor.json").read_text())
    assert json.loads(done.stdout)["calibration"] == saved
    assert found.measured_ranks == (1, 2) and found.quick
    for move in MOVES:
        times = [found.seconds_for(move, nbytes, 2) for nbytes in (1, 1 << 10, 1 << 20, 1 << 26)]
        assert times[0] > 0 and times == sorted(times), (move, times)
    assert found.disk is not None and found.disk.folder == str(tmp_path)
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))
    assert left == ["doctor.json", "tmp"]
