"""A calibration comes back from its file as it was saved, and refuses what it does not know."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from calibrations import calibration
from onefold.machine.calibration import FRESH_DAYS, Calibration, CalibrationError, this_machine
from onefold.plan.hardware import calibrated


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    found, path = calibration(), tmp_path / "new" / "machine.toml"
    found.save(path)
    assert Calibration.load(path) == found
    assert [p.name for p in path.parent.iterdir()] == ["machine.toml"]


def test_a_file_from_elsewhere_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    calibration(machine=this_machine() | {"cpu": "Abacus 3000"}).save(path)
    with pytest.raises(CalibrationError, match="measured on another machine: cpu Abacus 3000"):
        Calibration.load(path)


def test_another_torch_or_an_old_date_makes_it_stale_but_not_foreign(tmp_path: Path) -> None:
    assert calibration().stale() == ""
    path = tmp_path / "machine.toml"
    calibration(machine=this_machine() | {"torch": "1.0"}).save(path)
    assert Calibration.load(path).stale().startswith("The machine was measured with torch 1.0")
    later = datetime.now(UTC) + timedelta(days=FRESH_DAYS + 2)
    assert re.search(f"{FRESH_DAYS + 1}|{FRESH_DAYS + 2} days ago", calibration().stale(later))
    assert "other programs took 60%" in calibration(busy=0.6).stale()


@pytest.mark.parametrize(
    ("line", "by", "said"),
    [
        ("[gpu.here]", "[gpu.there]", "here"),
        ("ranks = 2", "", "ranks"),
        ("ranks = 2", "ranks = 0", "ranks is 0"),
        ("ranks = 2", 'ranks = 2\ncolour = "red"', "colour"),
        ("fp32 = ", "fp33 = ", "gpu.here.fp33"),
        ("link = 2", "link = -2", "gpu.here.link is -2"),
        ("kernel_share = 0.5", 'kernel_share = "half"', "kernel_share is 'half'"),
        ('Z"', '"', "measured_at"),
        ("[measured]", "[measured", "no calibration"),
    ],
)
def test_a_wrong_file_names_the_key(tmp_path: Path, line: str, by: str, said: str) -> None:
    file = tmp_path / "machine.toml"
    calibration().save(file)
    text = file.read_text()
    assert line in text
    file.write_text(text.replace(line, by))
    with pytest.raises(ValueError, match=said):
        calibrated(Calibration.load(file))
