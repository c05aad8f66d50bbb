"""What is kept to gather from, whole, as a second copy or encoded, follows every write to the
masters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from on_ranks import on_ranks, slow
from reference import built
from zoo import TinyMLP, features_of

RECIPES: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (1, {}),
    "second copy": (3, {"group": 2, "second_copy": True}),
    "second copy, encoded": (
        3,
        {"group": 2, "second_copy": True, "gather_codec": "int8", "precision": "bf16"},
    ),
    "encoded": (3, {"shard_group": 2, "optimizer_over": "all", "gather_codec": "int8"}),
    "since forward": (3, {"group": 2, "reshard_after_forward": False}),
    "on the host": (
        3,
        {"group": 2, "gather_codec": "int8", "offload_param": "cpu", "offload_optimizer": "cpu"},
    ),
}


def sharded(name: str) -> nn.Module:
    stage, options = RECIPES[name]
    return onefold.shard(built(TinyMLP), onefold.Recipe.zero(stage, **options))


def output(model: nn.Module) -> list[float]:
    with torch.set_grad_enabled(any(p.requires_grad for p in model.parameters())):
        return model(features_of(dist.get_rank(), 4, 7)).flatten().tolist()


def stepped_and_frozen(model: nn.Module) -> None:
    """A fused step leaves no mark on version counters, and what was trained is frozen before
    anything is gathered.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(features_of(1, 4, 7)).square().mean().backward()
    optimizer.step()
    model.requires_grad_(False)


def averages_swapped_in(model: nn.Module) -> None:
    """As averaging libraries do it."""
    for param, average in [(p, p.detach() * 0.3) for p in model.parameters()]:
        param.data.copy_(average)


def written_by_a_view_kept_since(model: nn.Module) -> None:
    views = [p.data for p in model.parameters()]
    output(model)
    for view in views:
        view.view(-1).mul_(0.5)


def only_read_on_one_rank(model: nn.Module) -> None:
    if dist.get_rank() == 0:
        for p in model.parameters():
            p.data.shape  # noqa: B018


@on_ranks(4)
@pytest.mark.parametrize(
    "write",
    [stepped_and_frozen, averages_swapped_in, written_by_a_view_kept_since, only_read_on_one_rank],
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=slow if "enc" in name else ()) for name in RECIPES]
)
def test_what_is_kept_follows_every_write(name: str, write: Callable[[Any], None]) -> None:
    model = sharded(name)
    before = output(model)
    write(model)
    now, fresh = output(model), sharded(name)
    onefold.load_full_state_dict(fresh, onefold.full_state_dict(model))
    assert now == output(fresh)
    assert (now == before) == (write is only_read_on_one_rank)


@on_ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_unit_of_one_rank_that_is_frozen_after_a_step_is_refreshed_by_all(precision: str) -> None:
    """Of so few elements that they lie on one rank."""
    found = []
    for stage in (0, 1, 2, 3):
        layers = built(lambda: nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 4), nn.LayerNorm(4)))
        recipe = onefold.Recipe.zero(stage, precision=precision, stall_timeout=20.0)
        model: Any = onefold.shard(layers, recipe, units=("2",))
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(5):
            model[2].weight.requires_grad_(step < 1)
            loss = model(features_of(2 * step + dist.get_rank(), 3, 4)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    assert found[1:] == found[:1] * 3


class Refusing(nn.Linear):
    """A layer that raises when it is told to."""

    told = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.told:
            raise ArithmeticError("told to")
        return super().forward(x)


@on_ranks(2)
def test_copies_that_a_raising_pass_left_under_way_are_not_taken_for_later_values() -> None:
    found = []
    for raises in (True, False):
        torch.manual_seed(0)
        layers = nn.Sequential(Refusing(8, 8), *(nn.Linear(8, 8) for _ in range(3)))
        model: Any = onefold.shard(layers, onefold.Recipe.zero(1), units=(nn.Linear,))
        x = torch.randn(4, 8)
        model(x).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        if raises:
            model[0].told = True
            with pytest.raises(ArithmeticError):
                model(x)  # the copies of all layers are on their way by now
            model[0].told = False
        shapes = {name: p.shape for name, p in model.named_parameters()}
        tenths = {name: torch.full(shape, 0.1) for name, shape in shapes.items()}
        onefold.load_full_state_dict(model, tenths)
        with torch.no_grad():
            found.append(model(x).flatten().tolist())
    assert found[0] == found[1]
