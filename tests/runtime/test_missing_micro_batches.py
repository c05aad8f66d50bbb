"""A rank that has fewer micro-batches than the others: it brings no gradient for those that it
leaves out. Where other ranks freeze parameters meanwhile, ranks would reduce different ranges: each
says so, and no process ends on its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from ranks import run_ranks
from zoo import ResidualBlock, TinyMLP, features_of

#: Where nothing travels before the boundary, so that a rank can leave out a micro-batch.
WAITING: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (0, {}),
    "stage 1": (1, {}),
    "stage 2": (2, {"reduce_at": "boundary"}),
}


def train(model: nn.Module, frozen: tuple[tuple[str, ...], ...], average: bool) -> None:
    """Two steps of two micro-batches, of which rank 1 has the second alone. `frozen`: by
    micro-batch.
    """
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for number, names in enumerate(frozen):
            for name, param in model.named_parameters():
                param.requires_grad_(not (names and name.startswith(names)))
            if number == 0 and rank == 1:
                continue
            keep = number == 0 and not average
            with onefold.no_sync(model) if keep else contextlib.nullcontext():
                x = features_of(100 * step + 10 * number + rank, 4, 7)
                model(x).square().mean().backward()
        for param in model.parameters() if average else ():
            grad = param.grad if param.grad is not None else torch.zeros_like(param)
            dist.all_reduce(grad)
            param.grad = grad / dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()


def build() -> nn.Module:
    torch.manual_seed(0)
    return TinyMLP()


def sharded(stage: int, **options: Any) -> nn.Module:
    recipe = onefold.Recipe.zero(stage, **options)
    return onefold.shard(build(), recipe, units=(ResidualBlock, "leave"))


def distances() -> dict[str, float]:
    """How far the weights of each stage are from those of plain passes averaged by hand."""
    train(plain := build(), ((), ()), average=True)
    expected, out = dict(plain.named_parameters()), {}
    for name, (stage, options) in WAITING.items():
        train(model := sharded(stage, **options), ((), ()), average=False)
        state = onefold.full_state_dict(model) or {}
        far = [(value - expected[n]).abs().max().item() for n, value in state.items()]
        out[name] = max(far, default=0.0)
    return out


def test_a_rank_that_leaves_out_a_micro_batch_brings_nothing_for_it() -> None:
    first, _ = run_ranks(2, distances)
    assert set(first) == set(WAITING)
    assert max(first.values()) < 1e-6, first


def said(go: Callable[[], None]) -> str:
    try:
        go()
    except onefold.StallError as error:
        return str(error)
    return ""


def freezes_meanwhile(stage: int, options: dict[str, Any]) -> str:
    model = sharded(stage, stall_timeout=2.0, **options)
    frozen = ((), ("blocks.0.up", "blocks.1", "leave"))
    return said(lambda: train(model, frozen, average=False))


@pytest.mark.parametrize("mode", list(WAITING))
def test_ranks_that_saw_different_parameters_frozen_say_where_they_stand(mode: str) -> None:
    for rank, message in enumerate(run_ranks(2, freezes_meanwhile, *WAITING[mode])):
        assert f"rank {rank} gave up waiting in" in message, message
        assert "(backward, step 0)" in message
        assert "the same parameters frozen" in message


class Alike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.one(x)) + torch.tanh(self.other(x))


def trains_another(stage: int) -> str:
    torch.manual_seed(0)
    model = onefold.shard(Alike(), onefold.Recipe.zero(stage, stall_timeout=2.0))
    (model.other if dist.get_rank() else model.one).requires_grad_(False)
    return said(lambda: model(features_of(0, 4, 8)).square().mean().backward())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_of_two_parameters_of_one_size_are_never_added_up(stage: int) -> None:
    for rank, message in enumerate(run_ranks(2, trains_another, stage)):
        assert f"rank {rank} gave up waiting in" in message, message
