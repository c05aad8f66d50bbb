"""The software's efficiency of a calibrated machine: what reference steps say of it, and what the time model makes of that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrations import calibration, with_steps, without_steps
from onefold.plan.efficiency import PARTS, shares, work_of
from onefold.plan.hardware import calibrated
from onefold.plan.measured import AtRanks, middle
from onefold.plan.times import Software, step_times


@settings(max_examples=20, deadline=None)
@given(st.floats(0.4, 1.3), st.floats(0.4, 1.3))
def test_steps_say_which_shares_they_reached(step_share: float, move_share: float) -> None:
    """Within what a deviation of 5 % in a measured step leaves open."""
    found = with_steps(without_steps(2), step_share, move_share)
    step, move = shares(found.at[0].steps, calibrated(found, 2))
    assert step == pytest.approx(step_share, rel=0.05)
    assert move == pytest.approx(move_share, rel=0.1)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.4, 1.3), st.floats(0.4, 1.3))
def test_the_plan_then_says_of_those_steps_what_was_measured(step_share: float, move_share: float) -> None:
    found = with_steps(without_steps(1, 2), step_share, move_share)
    for at in found.at:
        there = calibrated(found, at.ranks)
        for step in at.steps:
            assert step_times(work_of(step, there), there).step == pytest.approx(step.seconds, rel=0.02)


def test_a_step_that_is_the_sum_of_its_parts_has_shares_of_one() -> None:
    found = calibration(1, 2, 4)
    for ranks in (1, 2, 3, 4):
        assert found.shares(64, 64, ranks=ranks) == pytest.approx((1.0, 1.0), rel=1e-3)


def test_what_no_step_has_shown_stays_at_one() -> None:
    """A lone rank sends nothing; and of a single step that gathers nothing says how much of it was the moves."""
    alone = with_steps(without_steps(1), 0.5)
    step, move = shares(alone.at[0].steps, calibrated(alone, 1))
    assert step == pytest.approx(0.5, rel=0.02)
    assert move == pytest.approx(1.0, rel=1e-3)
    assert shares((), calibrated(alone, 1)) == (1.0, 1.0)


def test_a_calibration_without_steps_is_planned_as_the_sum_of_its_parts() -> None:
    before, after = without_steps(1, 2), with_steps(without_steps(1, 2), 0.5)
    work = work_of(after.at[1].steps[0], calibrated(after, 2))
    old, new = (step_times(work, calibrated(found, 2)) for found in (before, after))
    assert old == step_times(work, calibrated(before, 2), Software(overlap=1.0))
    assert new.seconds["compute"] == pytest.approx(2 * old.seconds["compute"], rel=0.05)
    assert new.seconds["optimizer"] == old.seconds["optimizer"]
    assert "before reference steps" in before.stale() and after.stale() == ""


def test_shares_between_numbers_of_ranks_lie_between() -> None:
    low, high = with_steps(without_steps(1, 4), 0.9), with_steps(without_steps(1, 4), 0.5)
    found = replace(low, at=(low.at[0], high.at[1]))
    steps = [found.shares(64, 64, ranks=r)[0] for r in (1, 2, 3, 4)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == pytest.approx(0.9, rel=0.02) and steps[3] == pytest.approx(0.5, rel=0.02)


def test_rounds_become_their_medians() -> None:
    def times(at: AtRanks, factor: float) -> AtRanks:
        return replace(
            at,
            blocks=tuple(replace(p, flops_per_s=p.flops_per_s / factor) for p in at.blocks),
            moves={m: tuple((x, y * factor) for x, y in points) for m, points in at.moves.items()},
            optimizer=tuple((x, y * factor) for x, y in at.optimizer),
            overlap=replace(at.overlap, together=at.overlap.together * factor) if at.overlap else None,
            steps=tuple(replace(s, seconds=s.seconds * factor) for s in at.steps),
        )

    one = calibration(2).at[0]
    assert middle([one]) == one
    assert middle([times(one, 7.0), one, times(one, 0.5)]) == one


@pytest.mark.parametrize("wrong", [{"step_share": 0.0}, {"move_share": -1.0}])
def test_shares_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(PARTS, **wrong)
