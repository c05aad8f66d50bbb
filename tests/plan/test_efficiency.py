"""The software's efficiency of a calibrated machine: what reference steps say of it, and what the
time model makes of that.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrations import timed, with_steps, without_steps
from examples import examples
from onefold.plan.efficiency import COPIED, PARTS, shares, work_of
from onefold.plan.hardware import calibrated

#: What one copy of an element takes in the calibration of one rank.
COPY = COPIED / 1e10


@examples(20)
@given(st.floats(0.4, 1.3), st.floats(0.4, 1.3), st.floats(4, 12))
def test_steps_say_which_shares_they_reached(step: float, move: float, copies: float) -> None:
    """Within what a deviation of 5 % in a measured step leaves open."""
    found = with_steps(without_steps(2), step, move, copies)
    said = shares(found.at[0].steps, calibrated(found, 2))
    assert said.step_share == pytest.approx(step, rel=0.1)
    assert said.handed_s == pytest.approx(2 * COPY * copies, rel=0.4)


def test_moves_that_are_slower_in_a_step_are_noticed() -> None:
    found = with_steps(without_steps(2), move_share=0.25)
    said = shares(found.at[0].steps, calibrated(found, 2))
    assert said.move_share < 0.5 < 0.9 < said.step_share


@examples(20)
@given(st.floats(0.4, 1.3), st.floats(0.4, 1.3), st.floats(0.3, 12))
def test_the_plan_then_says_of_those_steps_what_was_measured(
    step: float, move: float, copies: float
) -> None:
    found = with_steps(without_steps(1, 2), step, move, copies)
    for at in found.at:
        there = calibrated(found, at.ranks)
        for point in at.steps:
            for traced in (True, False):
                assert timed(work_of(point, there, traced), there).step == pytest.approx(
                    point.seconds, rel=0.06
                )


@pytest.mark.parametrize("wrong", [{"step_share": 0.0}, {"move_share": -1.0}, {"handed_s": -1e-9}])
def test_shares_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(PARTS, **wrong)
