"""`Engine.reduce_pending`: gradients that wait for the boundary are reduced outside of a backward
pass, as the boundary's own pass would have.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
import virtual
from onefold.offload import in_backward
from ranks import run_ranks
from zoo import TinyMLP, features_of

WIDTH = 8
#: {name: options of the recipe}
WAITING: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2 at the boundary": {"stage": 2, "reduce_at": "boundary"},
    "stage 3 at the boundary": {"stage": 3, "reduce_at": "boundary"},
    "stage 1 in bf16": {"stage": 1, "precision": "bf16"},
    "stage 1 on the host": {"stage": 1, "offload_optimizer": "cpu"},
    "stage 3 inside groups": {"stage": 3, "shard_group": 2},
}


class Net(nn.Module):
    """Of the two experts a rank uses one, and nobody uses `spare`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.experts[dist.get_rank() % 2](x)


def batch(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * dist.get_rank() + index)
    return torch.randn(4, WIDTH, generator=generator)


def gradients(model: nn.Module) -> list[Tensor | None]:
    """This rank's parts."""
    return [
        None if p.grad is None else p.grad.detach().as_subclass(Tensor).clone()
        for p in model.parameters()
    ]


def trained(options: dict[str, Any], later: bool) -> tuple[list[Tensor | None], list[Tensor], int]:
    """Three steps of two micro-batches. With `later` both are under no_sync, and their gradients
    are reduced after the passes. Returns the last gradients, the weights and the steps counted.
    """
    model = onefold.shard(Net(), onefold.Recipe.zero(**options))
    engine = onefold.engine_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            with onefold.no_sync(model):
                output = model(batch(2 * step + micro))
                if micro == 0 or later:
                    output.float().square().mean().backward()
            if micro == 1 and not later:
                output.float().square().mean().backward()
        engine.reduce_pending()  # nothing waits behind a pass outside
        found = gradients(model)
        optimizer.step()
    state = onefold.full_state_dict(model) or {}
    return found, list(state.values()), engine.step_count


def both_ways(name: str) -> tuple[bool, bool, bool]:
    """Whether gradients, weights and counts are those of the pass outside, to the bit."""
    (grads, weights, steps), (others, theirs, also) = (
        trained(WAITING[name], later) for later in (False, True)
    )
    same = [
        (a is None) == (b is None) and (a is None or torch.equal(a, b))
        for a, b in zip(grads, others, strict=True)
    ]
    if weights:  # rank 0 has them
        assert not any(map(torch.equal, weights[:10], Net().state_dict().values()))
    # Inside groups each pass is reduced in part, and counts
    counted = (6, 9) if "shard_group" in WAITING[name] else (3, 3)
    return all(same), all(map(torch.equal, weights, theirs)), (steps, also) == counted


@pytest.mark.parametrize("name", WAITING)
def test_gradients_reduced_later_are_those_of_the_boundarys_pass(name: str) -> None:
    for found in run_ranks(4, both_ways, name):
        assert found == (True, True, True)


def dropped() -> list[bool]:
    model = onefold.shard(Net(), onefold.Recipe.zero(1))
    engine = onefold.engine_of(model)
    with onefold.no_sync(model):
        model(batch(0)).square().mean().backward()
    model.zero_grad()
    engine.reduce_pending()
    nothing = all(p.grad is None for p in model.parameters())
    sent = engine.traffic.total()
    engine.reduce_pending()
    return [nothing, engine.traffic.total() == sent, engine.progress.pending]


def test_gradients_that_were_dropped_are_not_reduced_and_nothing_is_reduced_twice() -> None:
    assert run_ranks(2, dropped) == [[True, True, False]] * 2


def under_no_sync() -> bool:
    model = onefold.shard(Net(), onefold.Recipe.zero(1))
    engine = onefold.engine_of(model)
    with onefold.no_sync(model):
        model(batch(0)).square().mean().backward()
        engine.reduce_pending()
        waiting = engine.progress.pending
    engine.reduce_pending()
    return waiting and not engine.progress.pending


def test_inside_no_sync_they_go_on_waiting() -> None:
    assert run_ranks(2, under_no_sync) == [True, True]


@virtual.alone
def test_gradients_reduced_later_are_in_the_hosts_memory_when_the_call_returns() -> None:
    for seed in range(4):
        virtual.reset(seed)
        torch.manual_seed(0)
        recipe = onefold.Recipe.zero(1, offload_optimizer="cpu")
        model = onefold.shard(TinyMLP(), recipe, device="virtual")
        with onefold.no_sync(model):
            model(features_of(0, 3, 7).to("virtual")).square().sum().backward()
        onefold.engine_of(model).reduce_pending()
        for parameter in model.parameters():
            virtual.host_access(parameter.grad, write=False)


@virtual.alone
def test_units_whose_gradients_are_reduced_later_are_stepped_when_the_call_returns() -> None:
    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(1, offload_optimizer="cpu", step_in_backward=True)
    blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model = onefold.shard(blocks, recipe, device="virtual", units=[nn.Linear])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.ones(2, WIDTH, device="virtual")
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    stepped: list[int] = []
    step = in_backward.step_flat

    def slowly(optimizer: Any, engine: Any, flat: Any, entries: Any) -> None:
        time.sleep(0.1)
        step(optimizer, engine, flat, entries)
        stepped.append(flat.index)

    in_backward.step_flat = slowly  # this process has the test alone
    with onefold.no_sync(model):
        model(x).square().sum().backward()
    assert not stepped
    onefold.engine_of(model).reduce_pending()
    assert len(stepped) == 3
