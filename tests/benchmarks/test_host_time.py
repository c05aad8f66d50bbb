"""The benchmark of the host's time measures this source and others by the same steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import host

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_sources_are_measured_in_turns_and_compute_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--sides", "3", "--rounds", "1", "--steps", "2", "--against", str(ROOT / "src"), "--output", str(tmp_path)]
    assert host.main(arguments) == 0
    document = json.loads((tmp_path / "host.json").read_text())
    rows = document["rows"]
    assert [row["side"] for row in rows] == ["3", "3"] and len({row["loss"] for row in rows}) == 1
    assert all(0 < row["optimizer_s"] < row["step_s"] and row["cpu_s"] > 0 for row in rows)
    assert str(tmp_path) not in document["command"] and "stage" not in capsys.readouterr().err
