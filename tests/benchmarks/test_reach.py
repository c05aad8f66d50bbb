"""docs/reach.md says what the plan says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import reach


def rows_of_the_page() -> dict[str, list[str]]:
    lines = [
        line
        for line in reach.PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    return {
        name: cells
        for name, *cells in ([c.strip() for c in line.strip("|").split("|")] for line in lines)
    }


def test_the_page_has_every_model_and_every_place() -> None:
    rows = rows_of_the_page()
    assert rows["model"] == [place.title for place in reach.PLACES] and set(rows) == {
        "model",
        *reach.MODELS,
    }
    assert {place.memory for place in reach.PLACES} == {8, 16, 24, 80, 141}


@pytest.mark.parametrize(
    ("model", "memory"), [("gpt2", 8), ("gpt3-1.3b", 16), ("llama-3-8b", 80), ("llama-3-8b", 24)]
)
def test_cells_are_what_the_plan_answers(model: str, memory: int) -> None:
    (place,) = (p for p in reach.PLACES if p.memory == memory)
    shown = rows_of_the_page()[model][reach.PLACES.index(place)]
    assert shown.removesuffix(" ●") == reach.cell(reach.answered(model, place))


def test_a_larger_place_is_never_slower_and_a_larger_model_never_needs_less() -> None:
    rows = [rows_of_the_page()[name] for name in reach.MODELS]
    for cells in rows:
        fits = [cell != "–" for cell in cells]
        assert fits == sorted(fits), cells
    for column in zip(*rows, strict=True):
        fits = [cell != "–" for cell in column]
        assert fits == sorted(fits, reverse=True), column


def test_what_was_measured_is_marked_once_it_has_run_in_8_gib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "offload.json"
    monkeypatch.setattr(reach, "large_run", lambda: reach_large(path))
    assert "No large model has been measured" in reach.measured()
    large = {
        "status": "ok", "parameters": 1.34e9, "ranks": 2, "resident_bytes": 5 << 30, "disk_bytes": 21.5e9, "step_s": 40.0, "tokens": 256,
    }  # fmt: skip
    path.write_text(json.dumps({"large": large}))
    assert (
        "on a CPU: 1.34B parameters on 2 CPU ranks" in reach.measured()
        and "5.00 GiB" in reach.measured()
    )
    path.write_text(json.dumps({"large": large | {"resident_bytes": 9 << 30}}))
    assert "No large model has been measured" in reach.measured()


reach_large = reach.large_run
