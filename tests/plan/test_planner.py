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
from onefold.plan.evaluate import evaluate
from onefold.plan.job import CHECKPOINTING, Job, Scheme
from onefold.plan.replay import Replay
from onefold.plan.schema import MOMENTS
from onefold.plan.shapes import ModelShape
from onefold.plan.states import at_rest, bound_of, units_of


@given(shapes(), stages, precisions, st.integers(1, 9), st.integers(1, 3), options, communication)
@examples(200)
def test_the_replay_of_the_engine_never_exceeds_its_bound(
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
    replay = Replay(units, recipe).run(micro_batches)
    assert sum(replay.peak.values()) <= bound_of(units, recipe, micro_batches), (
        recipe.describe(),
        replay.peak,
    )
    at_end = replay.ledger.now()
    assert at_end == {k: v for k, v in at_rest(units).items() if k != MOMENTS}


@given(
    shapes(),
    stages,
    precisions,
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from(CHECKPOINTING),
    st.booleans(),
)
@examples(100)
def test_a_peak_never_exceeds_the_bound_that_is_printed(
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
        found = evaluate(
            shape, activity(shape, job, micro, checkpointing), gpus(ranks), job, scheme
        ).account
        assert (
            bool(found.rest_bytes) == (where in ("none", "optimizer"))
            and found.rest_bytes <= found.peak_bytes
        )
        assert found.peak_bytes <= found.bound, (scheme, found)
        assert min(found.peak.values()) > 0 and min((*found.rest.values(), 1)) > 0
