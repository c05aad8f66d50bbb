"""What the plan says of activations on the host, and of copies on their way to it. That it says what
engines do of the other tiers is asked of the rows of tests/promises/table.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.offload.activations import NEAR
from onefold.plan.activity import Activity
from onefold.plan.offloaded import moved_by, on_host
from onefold.plan.shapes import architecture
from onefold.recipe import Recipe
from onefold.tracing.trace import trace
from zoo import TinyGPT

pytestmark = pytest.mark.one_in(3)


@pytest.mark.parametrize(
    ("checkpointing", "budget"), [("none", 1 << 62), ("none", 40 << 20), ("non-reentrant", 1 << 62)]
)
def test_activations_that_are_planned_to_go_to_the_host_do(checkpointing: Any, budget: int) -> None:
    """Bytes that go down and come up in a step, to a few of a tensor's: which of them are large
    enough is the trace's.
    """
    batch = torch.randint(0, 61, (64, 64), generator=torch.Generator().manual_seed(0))

    def made() -> nn.Module:
        torch.manual_seed(0)
        return TinyGPT(width=128, depth=4, length=64, checkpointing=checkpointing)

    planned = on_host(Activity.from_trace(trace(made(), batch)), budget, shared=True)
    module = onefold.shard(made(), Recipe.zero(3, offload_activations=budget))
    offloaded = onefold.engine_of(module).transfers
    for _ in range(2):
        offloaded.moved.reset()
        module(batch).backward()
    moved, told = offloaded.moved.by_move(), moved_by(planned.carried(1))
    assert set(moved) == set(told) == {"up", "down"}
    for move in told:
        assert moved[move] == pytest.approx(told[move], abs=4 << 20), (moved, told)
    assert sum(offloaded.host.peak().values()) == pytest.approx(planned.nbytes, abs=4 << 20), (
        offloaded.host.peak(),
        planned.nbytes,
    )


def test_activations_on_the_host_leave_the_device_what_runs_and_what_is_on_its_way() -> None:
    shape = architecture("llama-3-8b")
    assert shape.transformer is not None
    whole = Activity.from_dims(shape, shape.transformer, 1, 2048, 2, "none", "llama")
    peaks = {
        budget: max(s.peak for s in on_host(whole, budget, shared=False).activity.slots)
        for budget in (1 << 32, 1 << 62)
    }
    kept = max(s.peak for s in whole.slots)
    assert kept - (1 << 32) <= peaks[1 << 32] <= kept - (1 << 32) + 2 * NEAR, (kept, peaks)
    one = whole.saved // shape.transformer.layers
    assert peaks[1 << 62] < kept / 2 and peaks[1 << 62] >= one
