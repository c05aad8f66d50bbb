"""What the plan says of sums on NCCL, in rank order and NCCL's own: what both
send. That it says what engines do is asked in tests/promises/test_native.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from onefold.plan.api import Plan
from onefold.plan.api import planned as plan
from onefold.plan.hardware import machine
from onefold.plan.job import Job


@pytest.mark.parametrize("stage", [0, 3])
def test_native_sums_are_the_default_only_flat_over_nodes_and_send_less_there(
    stage: int,
) -> None:
    """Eight ranks a node: in order eight times the bytes leave it that leave it in a ring."""
    there = machine(64, 8, "h100-80")

    def planned(**options: Any) -> Plan:
        job = Job(seq=512, checkpointing="none", options=tuple(options.items()))
        return plan("gpt2-xl", there, job, stages=(stage,), largest=False)

    default, native, ordered = (
        planned(group="flat", **way).shown.account.sent_between
        for way in ({}, {"reduce": "native"}, {"reduce": "ordered"})
    )
    assert default == native and ordered > 2 * native > 0
