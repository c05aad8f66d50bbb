"""The sums of parts run on a stream of their own: the computation neither runs them nor waits for
them in the middle of a backward pass.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
import standin
import virtual
from onefold.device import current_stream
from onefold.plan.hardware import Gpu, Host, Machine
from onefold.plan.traffic import Software
from onefold.runtime import reduce_paths
from onefold.simulation import prices
from onefold.simulation.simulate import simulate
from onefold.simulation.timeline import COMPUTE, Timeline
from ranks import run_ranks

BLOCKS, HIDDEN, ROWS = 4, 1024, 32
EXACT = Software(kernel_share=1, link_share=1, hop_seconds=0, straggler=0, launch_seconds=0)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def timed(adding: float, **options: Any) -> Timeline:
    """A step of two ranks. A product takes 2 s, a gather or reduction of a block 1 s, and adding up
    a block's parts `adding` seconds.
    """
    gpu = Gpu(
        "by hand", "", 1 << 40, {"bf16": ROWS * HIDDEN * HIDDEN}, 1.0, float("inf"),
        float(HIDDEN * HIDDEN), 1.0,
    )  # fmt: skip
    machine = Machine(gpu, 2, 2, None, Host(1e12, 1e12, 1e12, 1e12, 1e12))
    recipe = onefold.Recipe.zero(3, precision="bf16", units=(nn.Linear,), **options)
    with (
        patch.object(prices, "measured_software", lambda *_: EXACT),
        patch.object(prices.Prices, "adding_up", lambda *_: adding),
    ):
        found = simulate(
            Blocks(),
            recipe,
            2,
            batch=torch.zeros(ROWS, HIDDEN),
            loss=torch.sum,
            machine=machine,
        )
    assert found.exact and found.timeline is not None
    return found.timeline


def test_sums_run_beside_the_computation_and_are_waited_for_at_the_end_of_the_pass() -> None:
    found = timed(1.0)
    sums = [span for span in found.spans if span.name == "sum_parts"]
    assert {span.stream for span in sums} == {"sums"} and len(sums) == BLOCKS
    waits = [
        span
        for span in found.spans
        if span.stream == COMPUTE and span.kind == "wait" and span.name == "reduce-scatter"
    ]
    last = max(span.end for span in found.spans if span.kind == "model")
    assert all(span.begin >= last for span in waits), "the computation waited in mid-backward"
    # The first block's reduction and sum have nothing to hide behind
    assert found.parts.exposed["reduce-scatter"] == 2.0 and found.parts.engine == 0.0
    assert found.step == timed(0.0).step + 1.0


def test_sums_that_take_longer_than_the_passes_are_waited_for_where_buffers_return() -> None:
    found = timed(10.0, in_flight=1)
    waits = [
        span
        for span in found.spans
        if span.stream == COMPUTE and span.kind == "wait" and span.name == "reduce-scatter"
    ]
    sums = [span for span in found.spans if span.name == "sum_parts"]
    # At the launches of the third and of the fourth, and at the end for the last two
    assert [span.end for span in waits] == [span.end for span in sums]


def steps(device: str, group: Any, stage: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).to(device)
    recipe = onefold.Recipe.zero(stage, stall_timeout=30.0, **options)
    model = onefold.shard(model, recipe, group=group, units=(nn.Linear,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        model((torch.ones(2, 6) * (step + dist.get_rank())).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: t.cpu() for name, t in onefold.full_state_dict(model).items()}


def streams_of_sums(stage: int, options: dict[str, Any], seeds: int) -> list[str]:
    """What is wrong with the streams, the bits or the order of sums on the virtual device."""
    virtual.start(seed=None, check=False)
    standin.register("cpu", "virtual")
    group = standin.new_group()
    expected = steps("virtual", group, stage, options)
    wrong: list[str] = []
    plain = reduce_paths.sum_parts

    def seen(parts: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        default = torch.accelerator.current_stream(parts.device).stream_id
        if default == computing.stream_id:
            wrong.append("a sum was queued on the computing stream")
        plain(parts, *args, **kwargs)

    reduce_paths.sum_parts = seen
    for seed in range(seeds):
        virtual.start(seed=seed)
        computing = current_stream(torch.device("virtual", 0))
        found = steps("virtual", group, stage, options)
        torch.accelerator.synchronize()
        wrong += [name for name in expected if not torch.equal(found[name], expected[name])]
        wrong += [str(violation) for violation in virtual.violations()[:2]]
    dist.barrier()
    return wrong


@pytest.mark.skipif(not virtual.available(), reason=virtual.why_not())
@pytest.mark.parametrize(
    ("ranks", "stage", "options"),
    [
        (2, 3, {"in_flight": 1}),
        (2, 2, {"precision": "bf16"}),
        (2, 0, {"in_flight": 0}),
        (2, 2, {"reduce": "native", "precision": "bf16"}),
        (4, 3, {"group": 2, "precision": "bf16"}),
    ],
    ids=str,
)
def test_sums_on_their_stream_have_the_same_bits_under_every_schedule(
    ranks: int, stage: int, options: dict[str, Any]
) -> None:
    assert run_ranks(ranks, streams_of_sums, stage, options, 4) == [[]] * ranks
