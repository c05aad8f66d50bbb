"""A slow rank is named once, and lengths of time are read as people write them."""

from __future__ import annotations

import random

import pytest

from onefold.train.config import resolve
from onefold.train.faults import WINDOW, Pace
from onefold.wording import TrainError, seconds_of, worded


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


@pytest.mark.parametrize("way", ["near the limit", "in turn", "now and then"])
def test_an_alert_does_not_flap(way: str) -> None:
    """Over 6,000 steps: a handful of alerts, each let go before the next."""
    pace, noise = Pace(1.5), random.Random(1)

    def seconds(step: int, rank: int) -> float:
        base = 0.1 * noise.uniform(0.8, 1.2)
        if way == "near the limit":  # its median goes over the limit, and back, every few steps
            return base * (1.5 * noise.uniform(0.75, 1.25) if rank == 0 else 1.0)
        if way == "in turn":  # two ranks, each on a core that somebody else wants half of the time
            return base * (2.0 if step // 25 % 2 == rank else 1.0)
        return base * (2.0 if rank == 0 and step // 100 % 2 else 1.0)

    ranks = 2 if way == "in turn" else 4
    said = [
        text
        for step in range(6000)
        if (text := pace.look([seconds(step, rank) for rank in range(ranks)]))
    ]
    assert len(said) <= 2 * 10, said
    assert all(("is slow" in text) == (number % 2 == 0) for number, text in enumerate(said)), said


def test_a_rank_that_is_slow_for_good_is_named_again_after_others_were() -> None:
    pace = Pace(1.5)
    for step in range(8 * WINDOW):
        pace.look([0.2 if step % (2 * WINDOW) < WINDOW else 0.1, 0.1])
    said = [text for _ in range(20 * WINDOW) if (text := pace.look([0.1, 0.3]))]
    assert pace.slow == 1 and "rank 1 is slow" in said[-1], said


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


def test_seconds_are_said_in_the_unit_that_suits_them() -> None:
    assert [worded(s) for s in (8.21, 170, 1800, 10200)] == [
        "8.2 s",
        "170 s",
        "30 min",
        "2 h 50 min",
    ]


@pytest.mark.parametrize("text", ["0", "4:1", "a", "1:2:3", ""])
def test_what_is_no_number_of_machines_is_refused(text: str) -> None:
    with pytest.raises(TrainError, match=r"--nnodes .*1:4"):
        resolve({"nnodes": text})
    assert resolve({"nnodes": "1:4"}).nodes == (1, 4) and resolve({"nnodes": 2}).nodes == (2, 2)
