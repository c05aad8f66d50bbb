"""The software's efficiency of a calibrated machine: what reference steps say of it, and what the
time model makes of that.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrations import COSTS, calibration, timed, with_steps, without_steps
from examples import examples
from onefold.machine.calibration import CalibrationError
from onefold.machine.kernels import Kernels
from onefold.machine.measured import AtRanks, middle
from onefold.plan.efficiency import COPIED, PARTS, shares, shares_of, work_of
from onefold.plan.hardware import calibrated
from onefold.plan.times import step_times
from onefold.plan.traffic import Software

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


def test_a_step_that_is_the_sum_of_its_parts_has_shares_of_one() -> None:
    found = calibration(1, 2, 4)
    for ranks in (1, 2, 3, 4):
        said = shares_of(found, ranks=ranks)
        assert (said.step_share, said.move_share) == pytest.approx((1.0, 1.0), rel=1e-3)
        assert said.handed_s == pytest.approx(COPY * ranks, rel=0.2)  # 3 ranks lie between 2 and 4


def test_what_no_step_has_shown_stays_at_one() -> None:
    """A lone rank sends nothing, so that nothing says what its moves would reach."""
    alone = with_steps(without_steps(1), 0.5)
    said = shares(alone.at[0].steps, calibrated(alone, 1))
    assert said.step_share == pytest.approx(0.5, rel=0.02)
    assert said.move_share == pytest.approx(1.0, rel=1e-3)
    assert shares((), calibrated(alone, 1)) == PARTS


def test_a_calibration_without_steps_is_planned_as_the_sum_of_its_parts() -> None:
    before, after = without_steps(1, 2), with_steps(without_steps(1, 2), 0.5)
    work = work_of(after.at[1].steps[0], calibrated(after, 2))
    old, new = (timed(work, calibrated(found, 2)) for found in (before, after))
    assert old == step_times(work, calibrated(before, 2), Software(overlap=1.0))
    assert new.seconds["compute"] > 1.8 * old.seconds["compute"]
    assert new.seconds["optimizer"] == old.seconds["optimizer"]
    assert "before reference steps" in before.stale() and after.stale() == ""


def test_a_file_older_than_passes_is_planned_by_its_blocks_rate() -> None:
    new = without_steps(1)
    old = replace(new, at=tuple(replace(a, passes=()) for a in new.at))
    work = work_of(with_steps(new).at[0].steps[0], calibrated(new, 1))
    assert timed(work, calibrated(old, 1)) == timed(replace(work, kernels=None), calibrated(new, 1))
    assert not old.knows_passes("float32") and new.knows_passes("float32")
    with pytest.raises(CalibrationError, match="no pass in float32 was measured"):
        old.pass_seconds(Kernels(1, 1, 1, 1, 1))


def test_operations_cost_what_passes_showed() -> None:
    found = calibration(1, 2)
    some = Kernels(3 * 10**7, 7, 10**6, 31, 10**6)
    assert found.pass_seconds(some, ranks=1) == pytest.approx(COSTS.seconds(some), rel=1e-6)
    assert found.pass_seconds(some, ranks=2) == pytest.approx(2 * COSTS.seconds(some), rel=1e-6)


def test_shares_between_numbers_of_ranks_lie_between() -> None:
    low, high = with_steps(without_steps(1, 4), 0.9), with_steps(without_steps(1, 4), 0.5)
    found = replace(low, at=(low.at[0], high.at[1]))
    steps = [shares_of(found, ranks=r).step_share for r in (1, 2, 3, 4)]
    assert steps == sorted(steps, reverse=True)
    assert len(set(steps)) == 4


def test_rounds_become_their_medians() -> None:
    def times(at: AtRanks, factor: float) -> AtRanks:
        return replace(
            at,
            blocks=tuple(replace(p, flops_per_s=p.flops_per_s / factor) for p in at.blocks),
            moves={m: tuple((x, y * factor) for x, y in points) for m, points in at.moves.items()},
            optimizer=tuple((x, y * factor) for x, y in at.optimizer),
            overlap=(
                replace(at.overlap, together=at.overlap.together * factor) if at.overlap else None
            ),
            passes=tuple(replace(p, seconds=p.seconds * factor) for p in at.passes),
            steps=tuple(replace(s, seconds=s.seconds * factor) for s in at.steps),
        )

    one = calibration(2).at[0]
    assert middle([one]) == one
    assert middle([times(one, 7.0), one, times(one, 0.5)]) == one


@pytest.mark.parametrize("wrong", [{"step_share": 0.0}, {"move_share": -1.0}, {"handed_s": -1e-9}])
def test_shares_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(PARTS, **wrong)
