"""`onefold doctor` as a user runs it: what it prints, what it refuses, and that it leaves nothing
behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from calibrations import calibration
from onefold.cli.doctor import doctor_command
from onefold.comm import MOVES
from onefold.machine.calibration import Calibration

SOURCE = str(Path(__file__).parents[2] / "src")
COMMAND = "import typer; from onefold.cli.doctor import doctor_command; typer.run(doctor_command)"
#: The same with the smallest sizes of each kind, two where a line is fitted through them: what is
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quick"], "--quick says how to measure: add --calibrate"),
        (["--ranks", "2", "--disk", "."], "--ranks and --disk say how to measure"),
        (["--calibrate", "--ranks", "two"], "--ranks two: expected numbers of ranks"),
        (["--calibrate", "--ranks", ""], "expected numbers of ranks"),
        (["--calibrate", "--ranks", "0,2"], "each 1 or more, such as 1,2,4"),
        (["--calibrate", "--ranks", "1,1000000"], "1000000 ranks take"),
        (
            ["--calibrate", "--ranks", "1", "--disk", "/nowhere/at/all"],
            "--disk /nowhere/at/all: there is no such folder",
        ),
        (["--calibrate", "--output", "."], "this is a folder"),
        (
            ["--calibrate", "--output", "/proc/doctor.json"],
            "cannot be written to /proc/doctor.json",
        ),
        (["--output", "nowhere.json"], "there is no calibration at nowhere.json"),
    ],
)
def test_what_cannot_be_gets_a_sentence(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctor("--device", "cpu", *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    as_json = json.loads(doctor("--device", "cpu", "--json", *arguments).stdout)
    assert as_json["event"] == "error" and said in as_json["message"]


# -- with ranks ------------------------------------------------------------------------------------


@dataclass
class Place:
    """A folder of its own for one command, and a way to find what it left behind."""

    folder: Path

    def start(self, *arguments: str, program: str = COMMAND) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH", "")]))
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "TMPDIR": str(self.folder / "tmp"),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-c", program, "--device", "cpu", "--output", str(self.folder / "doctor.json"), *arguments],
            cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def processes(self, containing: str = "") -> list[int]:
        """Process ids of what runs with this place's temporary folder."""
        mark = f"TMPDIR={self.folder / 'tmp'}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (
                    mark in (process / "environ").read_bytes().split(b"\0")
                    and containing in (process / "cmdline").read_text()
                ):
                    found.append(int(process.name))
        return found

    def files(self) -> list[str]:
        """What is in this place, but for the folder for temporary files itself."""
        return sorted(
            str(p.relative_to(self.folder))
            for p in self.folder.rglob("*")
            if p != self.folder / "tmp"
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "tmp").mkdir()
    return Place(tmp_path)


def until(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"nothing within {seconds} s")


@pytest.mark.slow
@pytest.mark.slow
def test_a_measurement_is_saved_printed_and_leaves_nothing_behind(place: Place) -> None:
    process = place.start("--calibrate", "--quick", "--ranks", "2,1", "--json", program=SMALLEST)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    found = Calibration.load(place.folder / "doctor.json")
    assert json.loads(out)["calibration"] == json.loads((place.folder / "doctor.json").read_text())
    assert (
        found.measured_ranks == (1, 2) and found.quick and found.dtypes == ("float32", "bfloat16")
    )
    for move in MOVES:
        times = [
            found.seconds_for(move, nbytes, 2) for nbytes in (1, 1 << 10, 1 << 16, 1 << 20, 1 << 26)
        ]
        assert times[0] > 0 and times == sorted(times), (move, times)
    assert found.disk is not None and found.disk.folder == str(place.folder)
    assert place.files() == ["doctor.json"]
    until(lambda: not place.processes())
