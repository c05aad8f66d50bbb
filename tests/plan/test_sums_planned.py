"""What the plan says of sums on NCCL, in rank order and NCCL's own: which is faster when, and what
both hold. That it says what engines do is asked in tests/promises/test_native.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from random_plans import GIB

from onefold.device.copies import WINDOW
from onefold.memory import LEAVING, MOMENTS
from onefold.plan import hardware
from onefold.plan.alternatives import reduction_seconds
from onefold.plan.hardware import machine
from onefold.plan.job import Job
from onefold.plan.planner import Plan, plan
from onefold.plan.replay import Replay
from onefold.plan.shapes import ModelShape
from onefold.plan.states import bound_of, units_of
from onefold.plan.times import SUMMING_ON_A_GPU
from onefold.plan.traffic import Software
from onefold.recipe import Recipe


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


def test_on_one_node_native_sums_are_faster_from_the_size_of_the_formula() -> None:
    """(N − 2)·α·M·N/(N − 1), by hand."""
    found, memory = of(8).sums, machine(8, 8, "h100-80").gpu.memory_bandwidth * SUMMING_ON_A_GPU
    assert found is not None and found.faster_from == pytest.approx(
        6 * Software().hop_seconds * memory * 8 / 7, rel=1e-3
    )


def test_flat_over_nodes_native_sums_cross_borders_as_rings_do() -> None:
    flat, levels = of(64, group="flat").sums, of(64).sums
    assert flat is not None and levels is not None and flat.faster_from < levels.faster_from
    saved = [
        s.ordered.account.seconds["step"] - s.native.account.seconds["step"] for s in (flat, levels)
    ]
    assert saved[0] > 2 * abs(saved[1])


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
    levels, alone = (
        planned(),
        plan("gpt2-xl", machine(8, 8, "h100-80"), Job(seq=512), largest=False),
    )
    for one in (levels, alone):
        assert one.sums is not None and one.sums.asked == "ordered" and one.sums.by_default
        assert "by default" not in str(one)
    one_a_node = plan("gpt2-xl", machine(8, 1, "h100-80"), Job(seq=512), largest=False)
    assert one_a_node.sums is not None and one_a_node.sums.asked == "ordered"


@pytest.mark.parametrize("stage", [2, 3])
def test_a_window_of_gradients_on_their_way_to_the_host_is_counted(stage: int) -> None:
    """Bytes that copies still read: a window at most, and all of a rank's where these are fewer."""
    recipe = Recipe.zero(stage, precision="bf16", offload_optimizer="cpu")
    for numel in (20_000_000, 400_000_000):
        units = units_of(ModelShape.of_size(numel), recipe, 2, nccl=True)
        leaving = [f.layout.shard_numel * 4 for u in units for f in u.flats]
        without, held = Replay(units, recipe).run(), Replay(units, recipe, WINDOW).run()
        most = max(m.held.get(LEAVING, 0) for m in held.moments)
        assert most <= min(WINDOW + max(leaving), sum(leaving)) and held.ledger.held(LEAVING) == 0
        assert most >= min(WINDOW - max(leaving), sum(leaving) - 2 * max(leaving))
        assert (
            sum(without.peak.values())
            <= sum(held.peak.values())
            <= bound_of(units, recipe, 1, WINDOW)
        )
    there = replace(
        machine(2, 8), gpu=replace(hardware.builtin().gpu("a100-80"), capacity=80 * GIB)
    )
    asked = Job(seq=16, offload="optimizer", checkpointing="none")
    found = plan(ModelShape.of_size(400_000_000), there, asked, stages=(stage,), largest=False)
    assert found.recommended is not None and found.recommended.account.rest.get(MOMENTS, 0) == 0
    assert (
        max(
            found.recommended.account.peak.get(LEAVING, 0),
            found.recommended.account.ledger.get(LEAVING, 0),
        )
        > 0.5 * WINDOW
    )
