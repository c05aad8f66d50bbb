"""Pipelines crossed with what a recipe and a loop may say: schedules, accumulation over calls, clipping,
loss scaling, frozen parts, offload, borders, checkpointing, tensor parallelism, stages of unequal depth.

Four ranks: two places of the pipeline, and two of data or tensor parallelism. Losses, norms and weights
are those of one process within fp32 rounding, and stages 1, 2 and 3 have the same bits.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pipeline_models import Case
from test_pipelines import compare

from examples import ALL

pytestmark = [pytest.mark.slow, pytest.mark.one_in(2)]

#: (schedule, options, the number of micro-batches is a multiple of)
SCHEDULES: list[tuple[str, dict[str, Any], int]] = [
    ("ScheduleGPipe", {}, 1),
    ("Schedule1F1B", {}, 1),
    ("ScheduleInterleaved1F1B", {"stages": 4}, 2),
    ("ScheduleLoopedBFS", {"stages": 4, "registered": True}, 1),
    ("ScheduleInterleavedZeroBubble", {"stages": 4, "registered": True}, 2),
    ("ScheduleZBVZeroBubble", {"stages": 4, "v_shaped": True}, 2),
]
FROZEN = [(), ("tokens", "blocks.1", "blocks.3.mlp"), ("blocks.0.mlp", "norm", "head")]
RECIPES: list[dict[str, Any]] = [
    {},
    {"offload_optimizer": "cpu"},
    {"borders": True},
    {"borders": True, "offload_optimizer": "cpu"},
    {"reduce_at": "boundary"},
    {"offload_activations": "1GB"},
]
#: What no run may leave out.
EVERYTHING = Case(
    "ScheduleInterleaved1F1B",
    dp=1,
    tp=2,
    stages=4,
    depth=6,
    calls=2,
    steps=2,
    registered=True,
    checkpointing=True,
    max_norm=0.05,
    scale=2.0**10,
    frozen=FROZEN[1],
    recipe=RECIPES[3],
)


def few(n: int) -> settings:
    """`n` examples with `--all`, one in `make test`: each starts four ranks."""
    return settings(max_examples=max(1, n * (settings().max_examples == ALL)))


@st.composite
def cases(draw: Any) -> Case:
    schedule, options, multiple = draw(st.sampled_from(SCHEDULES))
    dp, tp = draw(st.sampled_from([(2, 1), (1, 2)]))
    calls = draw(st.integers(1, 2))
    return Case(
        schedule,
        dp=dp,
        tp=tp,
        depth=draw(st.integers(4, 6)),
        micro_batches=multiple * draw(st.integers(2, 4)) if multiple == 1 else 4,
        steps=2,
        calls=calls,
        under_no_sync=calls > 1 and draw(st.booleans()),
        checkpointing=draw(st.booleans()),
        max_norm=draw(st.sampled_from([None, 0.05, 100.0])),
        scale=draw(st.sampled_from([None, 2.0**10])),
        frozen=draw(st.sampled_from(FROZEN)),
        recipe=draw(st.sampled_from(RECIPES)),
        **options,
    )


@few(24)
@given(cases())
@example(EVERYTHING)
def test_pipelines_of_all_kinds_train_as_one_process(case: Case) -> None:
    compare(str(case), case, 1, 2, 3)
