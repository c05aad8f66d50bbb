"""A slow rank is named once, and lengths of time are read as people write them."""

from __future__ import annotations

import random

import pytest

from onefold.train.config import resolve
from onefold.train.faults import WINDOW, Pace
from onefold.wording import TrainError, seconds_of


def test_a_rank_that_lags_is_named_once_and_told_when_it_keeps_up() -> None:
    pace, noise = Pace(1.5), random.Random(0)

    def step(slow: float) -> str | None:
        return pace.look(
            [0.1 * noise.uniform(0.9, 1.1) * (slow if rank == 2 else 1.0) for rank in range(4)]
        )

    assert [step(1.0) for _ in range(2 * WINDOW)] == [None] * 2 * WINDOW
    said = [step(2.0) for _ in range(2 * WINDOW)]
    (alert,) = (text for text in said if text)
    assert "rank 2 is slow" in alert and "times as long" in alert and pace.slow == 2
    assert [text for text in (step(1.0) for _ in range(2 * WINDOW)) if text] == [
        "rank 2 keeps up again"
    ]


def test_one_hiccup_a_lag_of_milliseconds_and_a_factor_of_0_raise_no_alert() -> None:
    hiccup = Pace(1.5)
    assert all(
        hiccup.look([0.1, 5.0 if step == WINDOW else 0.1]) is None for step in range(3 * WINDOW)
    )
    tiny = Pace(1.5)
    assert all(tiny.look([0.001, 0.004]) is None for _ in range(3 * WINDOW))
    off = Pace(0)
    assert all(off.look([0.1, 9.0]) is None for _ in range(3 * WINDOW))
    with pytest.raises(TrainError, match="slow-factor"):
        resolve({"slow_factor": 0.9})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("170m", 10200), ("2h50m", 10200), ("1.5h", 5400), ("1d 2h", 93600), ("30S", 30)],
)
def test_a_length_of_time_has_its_units(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["170", "m", "-3m", "3m5", "0s", "3 weeks", "1:30"])
def test_what_is_no_length_of_time_is_refused_with_its_key(text: str) -> None:
    with pytest.raises(TrainError, match=r"--save-before .*170m"):
        resolve({"save_before": text})
