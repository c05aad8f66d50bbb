"""A step never makes the host wait for the device: no `.item()`, no truth value, no copy from or to
pageable memory, at any stage.

Steps run as rank 0 of several on torch's fake process group, on the virtual device (tests/virtual),
where each wait of the host raises at its place. What the fake group leaves out is not seen: the
waits of a real backend's messages, and codecs. On native backends the host also asks whether the
device has come to the unit before the last; a device that keeps up has.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import looks
import onefold
import virtual
from on_ranks import on_ranks
from zoo import ResidualBlock

pytestmark = pytest.mark.skipif(not virtual.available(), reason=virtual.why_not())

WIDTH = 32


@dataclass(frozen=True)
class Step:
    """What a step does. `ranks` are played by one process; one rank has no process group."""

    stage: int
    ranks: int = 4
    micro_batches: int = 1
    clip: bool = False
    scaler: bool = False
    buffers: bool = False
    fused: bool = False
    recipe: dict[str, Any] = field(default_factory=dict)


def sharded(step: Step) -> Any:
    dist.destroy_process_group()
    virtual.start(seed=0)
    if step.ranks > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(
            "cpu:fake,virtual:fake", store=FakeStore(), rank=0, world_size=step.ranks
        )
    if step.fused:
        looks.say_that_optimizers_can_be_fused_on("virtual")
    norms = [nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH)] if step.buffers else []
    blocks = [ResidualBlock(WIDTH) for _ in range(4)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *norms, *blocks)
    recipe = onefold.Recipe.zero(step.stage, **step.recipe)
    return onefold.shard(model, recipe, device="virtual", units=(ResidualBlock,))


def train(step: Step, model: Any) -> None:
    """Three steps that learn the order, then one in which a wait raises."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaling = onefold.GradScaler(model) if step.scaler else None
    batches = [torch.randn(4, WIDTH).to("virtual") for _ in range(step.micro_batches)]
    for number in range(4):
        with virtual.no_synchronization() if number == 3 else contextlib.nullcontext():
            for at, batch in enumerate(batches):
                last = at + 1 == step.micro_batches
                with contextlib.nullcontext() if last else onefold.no_sync(model):
                    loss = model(batch).square().mean()
                    (loss if scaling is None else scaling.scale(loss)).backward()
            if scaling is not None:
                scaling.unscale_(optimizer)
            if step.clip:
                onefold.clip_grad_norm_(model, 1.0)
            if scaling is not None:
                scaling.step(optimizer)
                scaling.update()
            else:
                optimizer.step()
            optimizer.zero_grad()


STEPS = [
    *(Step(stage, clip=clip) for stage in range(4) for clip in (False, True)),
    *(Step(stage, micro_batches=3, clip=True) for stage in (1, 3)),
    *(Step(stage, clip=True, recipe={"precision": "bf16"}) for stage in (2, 3)),
    Step(3, ranks=1, clip=True),
    Step(3, clip=True, buffers=True),
    Step(3, recipe={"reshard_after_forward": False}),
    Step(2, clip=True, fused=True, scaler=True),
]


@on_ranks(1, fresh=True)
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_step_never_makes_the_host_wait(step: Step) -> None:
    train(step, sharded(step))


@on_ranks(1, fresh=True)
def test_a_scaler_asks_the_host_where_the_optimizer_is_not_fused() -> None:
    step = Step(2, scaler=True)
    with pytest.raises(RuntimeError, match="_local_scalar_dense"):
        train(step, sharded(step))


@on_ranks(1, fresh=True)
def test_gradients_are_clipped_without_asking_and_measured_without_a_pass() -> None:
    model = sharded(Step(2, ranks=1))
    model(torch.randn(4, WIDTH).to("virtual")).square().mean().backward()
    multiplied: list[int] = []
    torch._foreach_mul_ = lambda tensors, factor: multiplied.append(len(tensors))  # type: ignore[assignment]
    with virtual.no_synchronization():
        onefold.clip_grad_norm_(model, float("inf"))
        assert not multiplied
        onefold.clip_grad_norm_(model, 1e6)  # the factor is 1, and nobody asks
    assert len(multiplied) == 1
