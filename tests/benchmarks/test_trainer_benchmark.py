"""The benchmark of Trainer measures all sides by the same steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
from benchmarks import trainer


def turn(side: str, number: int, *steps: float, peak: float | None = None) -> dict[str, Any]:
    return {
        "side": side, "round": number, "step_s": steps, "cpu_s": steps, "loss": 1.0,
        "peak_mib": peak, "load": 0.5,
    }  # fmt: skip


def test_a_ratio_is_that_to_the_loop_of_the_same_round() -> None:
    one = [turn("loop 1", 0, 2, 3), turn("trainer 1", 0, 3, 3), turn("loop 1", 1, 4, 5), turn("trainer 1", 1, 5, 8)]  # fmt: skip
    slower = [{**run, "step_s": [2 * s for s in run["step_s"]]} for run in one]
    loop, both = trainer.rows_of([one, slower])
    assert loop == {"side": "loop 1", "step_s": 6, "cpu_s": 3, "loss": 1.0, "peak_mib": None}
    assert both["step_s"] == 8 and both["step_s_of_loop"] == (6 / 4 + 10 / 8) / 2
    assert both["cpu_s_of_loop_range"] == both["cpu_s_of_loop_interval"] == (5 / 4, 3 / 2)
    assert "cpu_s_of_ddp" not in both, "DDP was not measured"


def test_every_trainer_is_set_beside_that_on_ddp_and_the_greatest_peak_counts() -> None:
    sides = ["loop 3", "trainer ddp", "trainer name 3", "trainer deepspeed 3"]
    runs = [turn(side, 0, 2.0 + n, peak=10 * n) for n, side in enumerate(sides)]
    ranks = [runs, [{**run, "peak_mib": run["peak_mib"] + 1} for run in runs]]
    rows = {row["side"]: row for row in trainer.rows_of(ranks)}
    assert [row["peak_mib"] for row in rows.values()] == [1, 11, 21, 31]
    assert rows["trainer name 3"]["step_s_of_loop"] == 4 / 2
    assert rows["trainer name 3"]["step_s_of_ddp"] == 4 / 3
    assert "step_s_of_loop" not in rows["trainer deepspeed 3"]
    assert not [key for key in rows["loop 3"] if "_of_" in key]


def test_an_interval_holds_the_median_19_times_of_20() -> None:
    """By counting: it misses where all of the drawn lie on one side of a bound."""
    assert trainer.interval([3, 1, 2]) == (1, 3)
    assert trainer.interval(range(6)) == (0, 5)  # misses 2 of 64 times
    assert trainer.interval(range(9)) == (1, 7)  # misses 20 of 512 times
    assert trainer.interval(range(12)) == (2, 9)


@pytest.mark.slow
def test_loops_and_trainers_are_measured_in_turns(tmp_path: Path) -> None:
    sides = ["loop 3", "trainer 3", "trainer name 3", "trainer ddp", "trainer fsdp2"]
    asked = ["--sides", *sides, "trainer deepspeed 3", "--rounds", "1", "--steps", "2",
             "--warmup", "1", "--layers", "2", "--width", "32", "--output", str(tmp_path)]  # fmt: skip
    assert trainer.main(asked) == 0
    document = json.loads((tmp_path / "trainer.json").read_text())
    rows = {row["side"]: row for row in document["rows"]}
    assert [*rows][:5] == sides
    loop, row = rows["loop 3"], rows["trainer 3"]
    assert row["step_s_of_loop"] == row["step_s"] / loop["step_s"]
    # Trainers see the same rows, in the same order
    assert rows["trainer name 3"]["loss"] == row["loss"]
    for side in sides:
        assert rows[side]["loss"] == pytest.approx(row["loss"], abs=0.3)
        assert rows[side]["peak_mib"] > 0
    assert document["versions"]["transformers"] and str(tmp_path) not in document["command"]
    page = (tmp_path / "trainer.md").read_text()
    assert all(f"| {side} |" in page for side in sides)
