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
from onefold.machine.calibration import FRESH_DAYS, Calibration, CalibrationError, default_path
from onefold.machine.measured import AtRanks, Overlap


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    found = calibration()
    path = found.save(tmp_path / "new" / "doctor.json")
    assert Calibration.load(path) == found
    assert [p.name for p in path.parent.iterdir()] == ["doctor.json"]


def test_the_file_is_in_the_cache_folder_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration().save() == default_path() == tmp_path / "onefold" / "doctor.json"
    assert Calibration.load().measured_ranks == (1, 2, 4)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/folder")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_path() == tmp_path / "home" / ".cache" / "onefold" / "doctor.json"


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = calibration(1).save(tmp_path / "doctor.json")
    before = path.read_bytes()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(CalibrationError, match="No space left"):
        calibration(1, 2).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_from_elsewhere_is_refused_by_name(tmp_path: Path) -> None:
    found = elsewhere(calibration())
    path = found.save(tmp_path / "doctor.json")
    with pytest.raises(
        CalibrationError, match="measured on another machine: a processor 'Abacus 3000'"
    ):
        Calibration.load(path)
    assert Calibration.load(path, anywhere=True) == found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cores": 4096}, "4096 cores where"),
        ({"gpus": ("Slide Rule", "Slide Rule")}, "2 × Slide Rule were where no GPU"),
    ],
)
def test_other_cores_or_gpus_are_another_machine(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    here = calibration()
    here = replace(here, identity=replace(here.identity, gpus=()))
    other = replace(here, identity=replace(here.identity, **change))
    assert other.identity.differences(here.identity)[0].startswith(said)


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


def test_no_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="onefold doctor --calibrate"):
        Calibration.load(tmp_path / "doctor.json")


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
        (("device",), None, "device: this key is missing"),
        (("backend",), 7, "backend: expected a text, found 7"),
        (("colour",), "red", "colour: unknown key"),
        (("at",), [], "at least one number of ranks"),
        (
            ("at", 1, "matrices", 0, "flops_per_s"),
            "fast",
            r"at\[1\].matrices\[0\].flops_per_s: expected a number, found 'fast'",
        ),
        (
            ("at", 1, "matrices", 0, "flops_per_s"),
            -1.0,
            r"at\[1\].matrices\[0\]: flops_per_s is -1.0",
        ),
        (("at", 0, "ranks"), 1.5, r"at\[0\].ranks: expected a whole number"),
        (("at", 2, "ranks"), 2, "ascending"),
        (("at", 1, "moves", "all-reduce"), None, "moves of 2 ranks"),
        (("at", 1, "moves", "all-reduce", 0, 1), 0.0, "not a measurement"),
        (("at", 1, "copies", 0), [1.0], r"at\[1\].copies\[0\]: expected a list of 2"),
        (("at", 1, "overlap"), False, r"at\[1\].overlap: expected keys and values"),
        (("quick",), "yes", "quick: expected true or false"),
        (("disk",), "/data", "disk: expected keys and values"),
        (("measured_at",), "yesterday", "measured_at: expected a time"),
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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "No UTF-8"),
        (b"[1, 2]", "no calibration"),
        (b"", "not JSON"),
    ],
)
def test_what_is_no_calibration_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "doctor.json"
    file.write_bytes(content)
    with pytest.raises(CalibrationError, match=said):
        Calibration.load(file)
    with pytest.raises(CalibrationError, match="cannot be read"):
        Calibration.load(tmp_path)


# -- questions -------------------------------------------------------------------------------------


def test_rates_are_those_measured_at_measured_places() -> None:
    found = calibration()
    assert found.block_rate(256, 256, ranks=2) == 1e10
    assert found.block_rate(64, 64, ranks=4) == 5e9 / 4
    assert found.peak_rate(ranks=1) == 9e10
    assert found.copy_rate(2) == pytest.approx(1e8 / 2e-2)


def test_a_shape_between_has_a_rate_between() -> None:
    assert 5e9 < calibration().block_rate(128, 128) < 2e10


@pytest.mark.parametrize("move", MOVES)
def test_a_move_takes_latency_and_bytes_over_bandwidth(move: str) -> None:
    found = calibration()
    for nbytes in (1e5, 3e6, 5e7):
        assert found.seconds_for(move, nbytes, 2) == pytest.approx(
            LATENCY + nbytes / (BANDWIDTH / 2), rel=1e-6
        )
    assert found.fit(move, 2).latency_s == pytest.approx(LATENCY, rel=1e-6)
    assert found.fit(move, 2).bytes_per_s == pytest.approx(BANDWIDTH / 2, rel=1e-6)


def test_one_rank_moves_nothing() -> None:
    found = calibration()
    assert found.seconds_for("all-gather", 1e9, 1) == 0
    assert found.fit("all-gather", 1).seconds(1e9) == 0
    assert found.hidden(1) == 1.0


def test_numbers_of_ranks_between_are_interpolated() -> None:
    found = calibration()
    rates = [found.block_rate(64, 64, ranks=r) for r in (1, 2, 3, 4)]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 4
    times = [found.seconds_for("all-gather", 1e6, r) for r in (2, 3, 4)]
    assert times == sorted(times)
    assert len(set(times)) == 3


def test_numbers_of_ranks_beyond_say_what_to_measure() -> None:
    with pytest.raises(
        CalibrationError,
        match=r"8 ranks: this machine was measured with 1,2,4\. .* --ranks 1,2,4,8",
    ):
        calibration().block_rate(64, 64, ranks=8)
    with pytest.raises(CalibrationError, match="measured with none"):
        calibration(1).seconds_for("all-gather", 1, 2)


def test_an_optimizer_step_takes_longer_for_a_larger_shard() -> None:
    found = calibration()
    times = [found.optimizer_seconds(n) for n in (10**3, 10**5, 10**6, 10**8)]
    assert times == sorted(times)
    assert found.optimizer_seconds(10**6) == pytest.approx(1e-2)  # 28e6 bytes


def test_an_unknown_dtype_or_move_says_what_is_known() -> None:
    with pytest.raises(CalibrationError, match="'float16' was not measured: known are float32"):
        calibration().block_rate(64, 64, dtype="float16")
    with pytest.raises(CalibrationError, match="unknown move 'gather': expected one of all-gather"):
        calibration().seconds_for("gather", 1, 2)


@pytest.mark.parametrize(
    ("compute", "gather", "together", "hidden"),
    [
        (1.0, 0.5, 1.0, 1.0),
        (1.0, 0.5, 1.5, 0.0),
        (1.0, 0.5, 1.25, 0.5),
        (1.0, 0.5, 2.0, 0.0),
        (0.5, 1.0, 0.9, 1.0),
    ],
)
def test_hidden_is_the_share_of_the_shorter_that_vanished(
    compute: float, gather: float, together: float, hidden: float
) -> None:
    assert Overlap(compute, gather, together, compute).hidden == pytest.approx(hidden)


def test_compute_is_never_faster_beside_a_gather() -> None:
    assert Overlap(1.0, 1.0, 1.0, 0.9).slowdown == 1.0
    assert Overlap(1.0, 1.0, 1.0, 1.6).slowdown == 1.6


def test_several_ranks_without_their_moves_are_incomplete() -> None:
    whole = calibration(2).at[0]
    with pytest.raises(ValueError, match="overlap of 2 ranks"):
        replace(whole, overlap=None)
    with pytest.raises(ValueError, match="moves of 2 ranks"):
        AtRanks(
            2, 1, whole.matrices, whole.blocks, whole.copies, whole.optimizer, {}, whole.overlap
        )
