"""What always holds of a plan's bytes: properties over random models, recipes and machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from random_plans import (
    activity,
    communication,
    gpus,
    more_padding,
    options,
    precisions,
    recipe_of,
    shapes,
    stages,
)

from examples import examples
from onefold.plan.evaluate import FRAGMENTED, evaluate
from onefold.plan.job import CHECKPOINTING, Job, Scheme
from onefold.plan.planner import plan
from onefold.plan.replay import Replay
from onefold.plan.schema import MOMENTS
from onefold.plan.shapes import ModelShape
from onefold.plan.states import at_rest, bound_of, units_of
from onefold.recipe import Recipe

FRAGMENTED_FACTOR = 1 + FRAGMENTED


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


@given(shapes(), precisions, st.integers(1, 9))
@examples(100)
def test_a_higher_stage_never_holds_more_at_rest(
    shape: ModelShape, precision: str, ranks: int
) -> None:
    rests = [
        sum(at_rest(units_of(shape, Recipe.zero(s, precision=precision), ranks)).values())
        for s in (0, 1, 2, 3)
    ]
    # Stage 3 in fp32 drops the resident copy and stores its slice as masters: on one rank there is
    # nothing to drop.
    assert rests[0] >= rests[1] == rests[2] >= rests[3], rests


@given(
    shapes(),
    st.sampled_from(("fp32", "bf16")),
    st.integers(2, 64),
    st.integers(2, 64),
    st.integers(1, 3),
    st.booleans(),
)
@examples(50)
def test_more_ranks_never_need_a_higher_peak_beyond_their_padding(
    shape: ModelShape, precision: str, few: int, more: int, accumulated: int, nodes: bool
) -> None:
    """From two ranks on: a lone one reduces nothing, hence has no buffers for it. On one node, or
    on nodes of eight: sums of two hops have buffers on each.
    """
    few, more = sorted((8 * few, 8 * more) if nodes else (few, more))
    asked = Job(seq=16, precision=precision, checkpointing="none", offload="none")
    machines = [replace(gpus(n), per_node=8 if nodes else n) for n in (few, more)]
    low, high = (
        plan(shape, on, replace(asked, global_batch=on.ranks * accumulated), largest=False).stages
        for on in machines
    )
    # An element of padding may lie in every buffer that an element has: states, gathered, reduced,
    # received, summed.
    padded = FRAGMENTED_FACTOR * 36 * more_padding(shape, few, more)
    # Stage 0 divides nothing, and what a reduction receives grows: (N - 1)/N of each unit that is
    # under way, and of one that lies idle.
    recipe = Recipe.zero(0, precision=precision)
    received = (recipe.in_flight + 3) * max(u.numel for u in shape.units) * 4 * (1 / few - 1 / more)
    for stage in (0, 1, 2, 3):
        before, after = low[stage].account, high[stage].account
        slack = padded + (FRAGMENTED_FACTOR * received if stage == 0 else 0)
        assert after.peak_bytes <= before.peak_bytes + slack, (
            stage,
            few,
            more,
            slack,
            before.peak,
            after.peak,
        )


@given(st.integers(1, 5), st.sampled_from((0, 1, 2, 3)), st.sampled_from(CHECKPOINTING))
@examples(40)
def test_a_larger_micro_batch_never_needs_less(micro: int, stage: int, checkpointing: str) -> None:
    shape, job = ModelShape.of_size(5_000_000), Job(seq=128)
    one, more = (
        evaluate(
            shape,
            activity(shape, job, m, checkpointing),
            gpus(4),
            job,
            Scheme(stage, checkpointing, "none", m),
        ).account.peak_bytes
        for m in (micro, micro + 1)
    )
    assert one <= more
