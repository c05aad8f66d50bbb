"""The benchmark of the host's time measures this source, its peers and others by the same steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import host_time

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_sources_and_peers_are_measured_in_turns_and_compute_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--sides",
        "ddp",
        "fsdp2",
        "3",
        "--blocks",
        "2",
        "--fake",
        "8",
        "--rounds",
        "1",
        "--steps",
        "2",
    ]
    assert (
        host_time.main([*arguments, "--against", str(ROOT / "src"), "--output", str(tmp_path)]) == 0
    )
    document = json.loads((tmp_path / "host_time.json").read_text())
    rows = document["rows"]
    gloo, fake = ([row for row in rows if row["world"] == world] for world in ("gloo", "fake"))
    assert [row["side"] for row in gloo] == ["ddp", "fsdp2", "3", "3"] and len(
        {row["loss"] for row in gloo[2:]}
    ) == 1
    assert [(row["ranks"], row["side"]) for row in fake] == [
        (n, side) for n in (8,) for side in ("1", "1", "3", "3")
    ]
    assert all(0 < row["optimizer_s"] < row["step_s"] and row["cpu_s"] > 0 for row in rows)
    assert all(
        row["of_fsdp2"] == row["step_s"] / gloo[1]["step_s"] and row["of_ddp"] > 0 for row in gloo
    )
    assert [row["goal"] for row in gloo] == [None, None, "of_fsdp2 0.5", "of_fsdp2 0.5"]
    assert str(tmp_path) not in document["command"] and "stage" not in capsys.readouterr().err
