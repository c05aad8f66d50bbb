"""The native path on the virtual device: communicators have streams of their own, and the host
never waits for a move.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import standin
import virtual
from ranks import run_ranks

pytestmark = pytest.mark.skipif(not virtual.available(), reason=virtual.why_not())


def trained(
    device: str, group: Any, stage: int, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    import onefold

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).to(device)
    onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=30.0, **options), group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        model((torch.ones(2, 6) * (step + dist.get_rank())).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: t.cpu() for name, t in onefold.full_state_dict(model).items()}
    if device != "cpu":
        torch.accelerator.synchronize()  # a rank that ends takes along what it has not sent
    return whole


def on_both(stage: int, options: dict[str, Any]) -> list[str]:
    virtual.start(seed=stage)
    standin.register("cpu", "virtual")
    expected, found = (
        trained("cpu", None, stage, options),
        trained("virtual", standin.new_group(), stage, options),
    )
    wrong = [
        f"{name}: {found[name]} for {expected[name]}"
        for name in expected
        if not torch.equal(found[name], expected[name])
    ]
    dist.barrier()
    return wrong + [str(violation) for violation in virtual.violations()]


@pytest.mark.parametrize(
    ("world_size", "stage", "options"),
    [
        (2, 0, {}),
        (2, 1, {}),
        (2, 2, {}),
        (2, 3, {}),
        (4, 3, {"group": 2}),
        (4, 3, {"shard_group": 2}),
        (2, 2, {"precision": "bf16"}),
    ],
    ids=str,
)
def test_steps_on_the_virtual_device_have_gloos_bits_and_miss_no_wait(
    world_size: int, stage: int, options: dict[str, Any]
) -> None:
    assert run_ranks(world_size, on_both, stage, options) == [[]] * world_size
