"""The benchmark of Trainer measures both sides by the same steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
from benchmarks import trainer


def test_a_ratio_is_that_to_the_loop_of_the_same_round() -> None:
    def turn(side: str, number: int, *steps: float) -> dict[str, Any]:
        return {"side": side, "round": number, "step_s": steps, "cpu_s": steps, "loss": 1.0}

    one = [turn("loop 1", 0, 2, 3), turn("trainer 1", 0, 3, 3), turn("loop 1", 1, 4, 5), turn("trainer 1", 1, 5, 8)]  # fmt: skip
    slower = [{**run, "step_s": [2 * s for s in run["step_s"]]} for run in one]
    loop, both = trainer.rows_of([one, slower])
    assert loop == {"side": "loop 1", "step_s": 6, "cpu_s": 3, "loss": 1.0}
    assert both["step_s"] == 8 and both["step_s_of_loop"] == (6 / 4 + 10 / 8) / 2
    assert both["cpu_s_of_loop_range"] == (5 / 4, 3 / 2)


@pytest.mark.slow
def test_loops_and_trainers_are_measured_in_turns(tmp_path: Path) -> None:
    asked = ["--sides", "loop 3", "trainer 3", "--rounds", "1", "--steps", "2", "--warmup", "1",
             "--layers", "2", "--width", "32", "--output", str(tmp_path)]  # fmt: skip
    assert trainer.main(asked) == 0
    document = json.loads((tmp_path / "trainer.json").read_text())
    loop, row = document["rows"]
    assert [loop["side"], row["side"]] == ["loop 3", "trainer 3"]
    assert row["step_s_of_loop"] == row["step_s"] / loop["step_s"]
    # Nobody has learned much in three steps
    assert loop["loss"] == pytest.approx(row["loss"], abs=0.3)
    assert document["versions"]["transformers"] and str(tmp_path) not in document["command"]
