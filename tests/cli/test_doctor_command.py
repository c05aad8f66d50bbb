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
from typer.testing import CliRunner, Result

from calibrations import calibration
from onefold.cli.app import app
from onefold.machine.calibration import Calibration, default_path
from onefold.plan.hardware import catalogue

SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own; the terminal is wide enough for every table."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_it_says_what_the_machine_has_without_measuring(cache: Path) -> None:
    result = doctor("--json", "--device", "cpu")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    machine = said["machine"]
    assert machine["ranks"] == machine["cpu"]["physical_cores"] >= 1
    assert machine["backend"] == "gloo" and "gloo" in machine["backends"]
    assert 0 < machine["memory"]["free"] <= machine["memory"]["total"]
    assert machine["packages"]["torch"]
    assert "gpu.here" not in said and "onefold doctor --calibrate" in said["note"]
    assert not cache.exists()


def test_a_saved_calibration_is_shown() -> None:
    calibration().save(default_path())
    shown = doctor("--device", "cpu").stdout
    for words in ("gpu.here", "fp32", "9e+10", "host.default", "measured", "kernel_share", "/data"):
        assert words in shown
    said = json.loads(doctor("--device", "cpu", "--json").stdout)
    assert said["measured"]["ranks"] == 2 and said["note"] == ""


# -- with ranks ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_measurement_is_saved_printed_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    path = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH", "")]))
    own = {"PYTHONPATH": path, "TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
    asked = ["--device", "cpu", "--calibrate", "--ranks", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "onefold", "doctor", *asked, "--output", str(tmp_path / "machine.toml")],
        cwd=tmp_path, env=os.environ | own, text=True, capture_output=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = Calibration.load(tmp_path / "machine.toml")
    assert json.loads(done.stdout)["gpu.here"] == found.gpu
    assert (found.ranks, found.disk) == (2, str(tmp_path))
    # The row is one of the table's form: a plan takes it by name too
    assert catalogue(tmp_path / "machine.toml").gpu("here").rates["fp32"] == found.gpu["fp32"]
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))
    assert left == ["machine.toml", "tmp"]
