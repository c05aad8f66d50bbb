"""Random models, recipes and machines for properties of plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from onefold.plan.activity import Activity, assumed_dims, of_dims
from onefold.plan.hardware import Machine, machine
from onefold.plan.job import Job
from onefold.plan.shapes import ModelShape, Parameter, UnitShape
from onefold.recipe import Recipe

GIB = 1 << 30


def gpus(ranks: int, capacity: float = 80 * GIB) -> Machine:
    """Ranks with this much memory each, in one node or in nodes of eight."""
    found = machine(ranks, 8 if ranks % 8 == 0 else ranks, "a100-80", "8x200g")
    return replace(found, gpu=found.gpu.model_copy(update={"capacity": int(capacity)}))


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """An embedding, blocks of a few parameters of any size, a root with or without parameters of
    its own.
    """
    sizes = st.tuples(st.integers(1, 300), st.integers(1, 300))
    block = draw(st.lists(sizes, min_size=1, max_size=4))
    frozen = draw(st.booleans())
    root = [Parameter("head", draw(sizes))] if draw(st.booleans()) else []
    units = [
        UnitShape("(root)", tuple(root)),
        UnitShape("embed", (Parameter("embed.weight", draw(sizes)),), looks_up_only=True),
    ]
    for i in range(draw(st.integers(1, 6))):
        first = len(block) > 1 and frozen
        named = [
            Parameter(f"blocks.{i}.p{k}", shape, trainable=k > 0 or not first)
            for k, shape in enumerate(block)
        ]
        units.append(UnitShape(f"blocks.{i}", tuple(named)))
    return ModelShape("random", tuple(units))


stages = st.sampled_from((0, 1, 2, 3))
precisions = st.sampled_from(("fp32", "bf16", "fp16"))
options = st.fixed_dictionaries(
    {},
    optional={
        "prefetch": st.integers(0, 3),
        "in_flight": st.integers(0, 3),
        "reshard_after_forward": st.booleans(),
        "accumulate_dtype": st.sampled_from(("fp32", "bf16")),
    },
)


#: Groups of two, codecs, both, neither; some of them are for stage 3 only.
communication = st.sampled_from(
    (
        {},
        {},
        {"group": 2},
        {"shard_group": 2},
        {"shard_group": 2, "optimizer_over": "all"},
        {"group": 2, "second_copy": True},
        {"group": 2, "gather_codec": "int8", "frozen": "nf4"},
        {"group": 2, "reduce_codec": "int4"},
        {"shard_group": 2, "reduce_codec": "int8"},
        {"group": 2, "second_copy": True, "gather_codec": "int4", "reduce_codec": "int8"},
    )
)


def recipe_of(stage: int, precision: str, given: dict[str, Any]) -> Recipe | None:
    try:
        return Recipe.zero(stage, precision=precision, **given)
    except ValueError:  # options that this stage has no use for
        return None


def activity(shape: ModelShape, job: Job, micro: int, checkpointing: str = "none") -> Activity:
    return of_dims(shape, assumed_dims(shape), micro, job.seq, 4, checkpointing)
