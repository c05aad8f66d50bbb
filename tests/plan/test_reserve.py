"""What a plan leaves to the driver and to NCCL of each GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onefold.plan.account import (
    CHANNEL,
    COMMUNICATOR,
    CONTEXT,
    NETWORK,
    Reserve,
    reserve_of,
)
from onefold.plan.api import Plan
from onefold.plan.api import planned as plan
from onefold.plan.degrees import Degrees
from onefold.plan.hardware import Machine, machine
from onefold.plan.job import Job
from onefold.plan.rank import units_of
from onefold.plan.shapes import ModelShape
from onefold.recipe import Recipe

H100 = 32 * CHANNEL  # of one peer in the node


def on(gpus: int, per_node: int = 8, gpu: str = "h100-80") -> Machine:
    return machine(gpus, per_node, gpu)


def reserved(there: Machine, **options: Any) -> Reserve:
    recipe = Recipe.zero(3, precision="bf16", **options)
    shape, degrees = ModelShape.of_size(10**6), Degrees(dp=there.ranks)
    units = units_of(shape, recipe, degrees, per_node=there.node_ranks, nccl=True)
    return reserve_of(units, there, degrees)


@pytest.mark.parametrize(
    ("there", "options", "communicators", "exchanges"),
    [
        (on(1), {}, 0, 0),
        (on(8), {}, 2, 7 * H100),
        # Two levels: to seven peers in the node, and to one rank of the other
        (on(16), {}, 5, 7 * H100 + NETWORK),
        # Over two nodes at once sums are native by themselves
        (on(16), {"group": "flat"}, 2, 0),
        (on(16), {"group": "flat", "reduce": "ordered"}, 2, 7 * H100 + NETWORK),
        (on(4, 1), {}, 2, NETWORK),
    ],
)
def test_a_reserve_is_a_context_its_communicators_and_buffers_for_single_peers(
    there: Machine, options: dict[str, Any], communicators: int, exchanges: int
) -> None:
    found = reserved(there, **options)
    assert (found.context, found.communicators, found.exchanges) == (
        CONTEXT,
        communicators,
        exchanges,
    )
    assert found.nbytes == CONTEXT + communicators * COMMUNICATOR + exchanges


def planned(there: Machine, **options: Any) -> Plan:
    job = Job(seq=512, checkpointing="none", options=tuple(options.items()))
    return plan("gpt2", there, job, largest=False)


def test_a_model_that_leaves_no_room_for_the_communicators_does_not_fit() -> None:
    """Its peak lies between the capacity without a context and the capacity without all of it."""
    there = on(8)
    best = planned(there).recommended
    assert best is not None
    room = best.needed + CONTEXT + COMMUNICATOR
    small = replace(there, gpu=there.gpu.model_copy(update={"capacity": room}))
    again = plan(
        "gpt2", small, Job(seq=512, checkpointing="none", offload="none"), stages=(best.scheme.stage,), largest=False
    )  # fmt: skip
    assert again.recommended is None
    room = best.needed + best.reserve.nbytes
    enough = replace(small, gpu=there.gpu.model_copy(update={"capacity": room}))
    fits = plan(
        "gpt2", enough, Job(seq=512, checkpointing="none", offload="none"), stages=(best.scheme.stage,), largest=False
    )  # fmt: skip
    assert fits.recommended is not None
