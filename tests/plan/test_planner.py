"""What always holds of a plan's bytes: properties over random models, recipes and machines."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from random_plans import (
    activity,
    communication,
    gpus,
    options,
    precisions,
    recipe_of,
    shapes,
    stages,
)

from examples import examples
from onefold.plan.account import Question
from onefold.plan.job import CHECKPOINTING, Job, Scheme
from onefold.plan.program import Program
from onefold.plan.rank import at_rest, units_of
from onefold.plan.schema import MOMENTS
from onefold.plan.shapes import ModelShape


@given(shapes(), stages, precisions, st.integers(1, 9), st.integers(1, 3), options, communication)
@examples(200)
def test_a_walk_ends_with_what_rests_and_more_micro_batches_are_like_three(
    shape: ModelShape,
    stage: int,
    precision: str,
    ranks: int,
    micro_batches: int,
    given: dict[str, Any],
    over: dict[str, Any],
) -> None:
    recipe = recipe_of(stage, precision, given | over)
    if recipe is None:
        return
    units = units_of(shape, recipe, ranks * 2 if over else ranks)
    program = Program(units, recipe, micro_batches)
    assert program.ledger.now() == {k: v for k, v in at_rest(units).items() if k != MOMENTS}
    one, two, five = (Program(units, recipe, n).bytes_of("move") for n in (1, 2, 5))
    for move, nbytes in five.items():
        assert nbytes == two[move] + 3 * (two[move] - one[move]), (recipe.describe(), move)


@given(
    shapes(),
    stages,
    precisions,
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from(sorted(CHECKPOINTING)),
    st.booleans(),
)
@examples(100)
def test_a_peak_holds_what_rests_and_the_largest_sum_of_activations(
    shape: ModelShape,
    stage: int,
    precision: str,
    ranks: int,
    micro: int,
    checkpointing: str,
    offload: bool,
) -> None:
    job = Job(seq=16, micro_batch=micro, precision=precision)
    for where in ("optimizer", "parameters", "nvme") if offload and stage == 3 else ("none",):
        scheme = Scheme(stage, checkpointing, where, micro)
        asked = Question(shape, lambda m, c: activity(shape, job, m, c), gpus(ranks), job)
        found, own = asked.answer(scheme).account, activity(shape, job, micro, checkpointing)
        assert (
            bool(found.rest_bytes) == (where in ("none", "optimizer"))
            and found.rest_bytes <= found.peak_bytes
        )
        assert found.peak_bytes >= own.peak, (scheme, found)
        assert min((*found.rest.values(), 1)) > 0
