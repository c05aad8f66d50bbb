"""A calibration answers as it was measured, comes back from its file, and refuses what it does not
know.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from calibrations import BANDWIDTH, LATENCY, calibration, elsewhere
from onefold.comm import MOVES
from onefold.machine.calibration import FRESH_DAYS, Calibration, CalibrationError


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    found = calibration()
    path = found.save(tmp_path / "new" / "doctor.json")
    assert Calibration.load(path) == found
    assert [p.name for p in path.parent.iterdir()] == ["doctor.json"]


def test_a_file_from_elsewhere_is_refused_by_name(tmp_path: Path) -> None:
    found = elsewhere(calibration())
    path = found.save(tmp_path / "doctor.json")
    with pytest.raises(
        CalibrationError, match="measured on another machine: a processor 'Abacus 3000'"
    ):
        Calibration.load(path)
    assert Calibration.load(path, anywhere=True) == found


def test_another_torch_or_an_old_date_makes_it_stale_but_not_foreign(tmp_path: Path) -> None:
    found = calibration()
    assert found.stale() == ""
    old = replace(found, identity=replace(found.identity, torch="1.0"))
    assert (
        Calibration.load(old.save(tmp_path / "doctor.json"))
        .stale()
        .startswith("The machine was measured with torch 1.0")
    )
    later = datetime.now(UTC) + timedelta(days=FRESH_DAYS + 2)
    assert f"{FRESH_DAYS + 2} days ago" in found.stale(
        later
    ) or f"{FRESH_DAYS + 1} days ago" in found.stale(later)
    assert "other programs took 60%" in replace(found, busy=0.6).stale()


def spoil(values: dict[str, Any], *path: str | int, to: Any = None) -> dict[str, Any]:
    """A copy with the value at `path` replaced, or removed where `to` is None."""
    copy = json.loads(json.dumps(values))
    at = copy
    for key in path[:-1]:
        at = at[key]
    if to is None:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    return copy  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("path", "to", "said"),
    [
        (("kind",), "shopping list", "no calibration"),
        (("version",), 99, "version 99"),
        (("backend",), 7, "backend: expected a text, found 7"),
        (("colour",), "red", "colour: unknown key"),
        (("at",), [], "at least one number of ranks"),
        (
            ("at", 1, "matrices", 0, "flops_per_s"),
            -1.0,
            r"at\[1\].matrices\[0\]: flops_per_s is -1.0",
        ),
        (("at", 2, "ranks"), 2, "ascending"),
        (("at", 1, "moves", "all-reduce"), None, "moves of 2 ranks"),
        (("at", 1, "moves", "all-reduce", 0, 1), 0.0, "not a measurement"),
        (("measured_at",), "2026-01-01T00:00:00", "measured_at: expected a time"),
    ],
)
def test_a_wrong_file_names_the_key(
    tmp_path: Path, path: tuple[str | int, ...], to: Any, said: str
) -> None:
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps(spoil(calibration().to_json(), *path, to=to)))
    with pytest.raises(CalibrationError, match=said):
        Calibration.load(file)


# -- questions -------------------------------------------------------------------------------------


def test_rates_are_those_measured_at_measured_places() -> None:
    found = calibration()
    assert found.block_rate(256, 256, ranks=2) == 1e10
    assert found.block_rate(64, 64, ranks=4) == 5e9 / 4
    assert found.peak_rate(ranks=1) == 9e10
    assert found.copy_rate(2) == pytest.approx(1e8 / 2e-2)


@pytest.mark.parametrize("move", MOVES)
def test_a_move_takes_latency_and_bytes_over_bandwidth(move: str) -> None:
    found = calibration()
    for nbytes in (1e5, 3e6, 5e7):
        assert found.seconds_for(move, nbytes, 2) == pytest.approx(
            LATENCY + nbytes / (BANDWIDTH / 2), rel=1e-6
        )
    assert found.fit(move, 2).latency_s == pytest.approx(LATENCY, rel=1e-6)
    assert found.fit(move, 2).bytes_per_s == pytest.approx(BANDWIDTH / 2, rel=1e-6)
