"""What the plan says of sums on NCCL, in rank order and NCCL's own: which is faster when, and what
both hold. That it says what engines do is asked in tests/promises/test_native.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from onefold.plan.alternatives import reduction_seconds
from onefold.plan.hardware import machine
from onefold.plan.job import Job
from onefold.plan.planner import Plan, plan
from onefold.plan.traffic import Software


def of(gpus: int = 16, name: str = "gpt2-xl", **options: Any) -> Plan:
    job = Job(seq=512, checkpointing="none", options=tuple(options.items()))
    return plan(name, machine(gpus, 8, "h100-80"), job, largest=False)


@pytest.mark.parametrize("gpus", [8, 64])
def test_the_plan_says_where_native_sums_are_faster_and_they_are(gpus: int) -> None:
    found = of(gpus).sums
    assert found is not None and found.asked == "ordered" and 0 < found.faster_from < math.inf
    recipe, there, soft = (
        found.ordered.scheme.recipe(Job()),
        machine(gpus, 8, "h100-80"),
        Software(),
    )
    for size, native_wins in ((found.faster_from * 0.9, False), (found.faster_from * 1.1, True)):
        ordered, native = (
            reduction_seconds(replace(recipe, reduce=way), there, soft, size, 2, 4)
            for way in ("ordered", "native")
        )
        assert (native < ordered) == native_wins, (size, ordered, native)


@pytest.mark.parametrize("stage", [0, 3])
def test_native_sums_are_the_default_only_flat_over_nodes_and_the_plan_says_what_both_cost(
    stage: int,
) -> None:
    """Eight ranks a node: in order eight times the bytes leave it that leave it in a ring."""
    there = machine(64, 8, "h100-80")

    def planned(**options: Any) -> Plan:
        job = Job(seq=512, checkpointing="none", options=tuple(options.items()))
        return plan("gpt2-xl", there, job, stages=(stage,), largest=False)

    found, asked = planned(group="flat"), planned(group="flat", reduce="ordered")
    for one, by_default, which in ((found, True, "native"), (asked, False, "ordered")):
        assert one.sums is not None and (one.sums.by_default, one.sums.asked) == (by_default, which)
        assert one.recommended == getattr(one.sums, which)
    assert found.recipe.reduce is None and found.to_json()["sums"]["by_default"] is True
    between = [c.account.sent_between for c in (found.sums.ordered, found.sums.native)]  # type: ignore[union-attr]
    assert between[0] > 2 * between[1] > 0
    text = " ".join(str(found).split())
    assert "(reduce='native'), by default, since exchanges are flat over nodes" in text
    assert "the same bits at every stage (reduce='ordered')" in text and "out of a node" in text
    levels = planned()
    assert levels.sums is not None and levels.sums.asked == "ordered" and levels.sums.by_default
