"""What is kept to gather from, whole, as a second copy or encoded, follows every write to the
masters; so does what encoding lost.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.runtime.parameters.interval import local_part
from ranks import run_ranks
from zoo import TinyMLP, features_of

RECIPES: dict[str, dict[str, Any]] = {
    "whole": {"stage": 1},
    "second copy": {"stage": 3, "group": 2, "second_copy": True},
    "second copy, encoded": {
        "stage": 3,
        "group": 2,
        "second_copy": True,
        "gather_codec": "int8",
        "precision": "bf16",
    },
    "encoded": {"stage": 3, "shard_group": 2, "optimizer_over": "all", "gather_codec": "int8"},
    "since forward": {"stage": 3, "group": 2, "reshard_after_forward": False},
    "on the host": {
        "stage": 3,
        "group": 2,
        "gather_codec": "int8",
        "offload_param": "cpu",
        "offload_optimizer": "cpu",
    },
}


def sharded(options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return onefold.shard(TinyMLP(), onefold.Recipe.zero(**options, stall_timeout=10.0))


def output(model: nn.Module) -> list[float]:
    # No backward pass follows
    with torch.set_grad_enabled(any(p.requires_grad for p in model.parameters())):
        return model(features_of(torch.distributed.get_rank(), 4, 7)).flatten().tolist()


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
    if torch.distributed.get_rank() == 0:
        assert all(local_part(p.data).norm() >= 0 for p in model.parameters())


WRITES = (
    stepped_and_frozen,
    averages_swapped_in,
    written_by_a_view_kept_since,
    only_read_on_one_rank,
)


def after_writes(cases: list[tuple[str, Any]]) -> list[tuple[str, str]]:
    """(recipe, write) after which a model computes with other values than a fresh one of its
    masters.
    """
    behind = []
    for name, write in cases:
        options = RECIPES[name]
        model = sharded(options)
        before = output(model)
        write(model)
        now, fresh = output(model), sharded(options)
        onefold.load_full_state_dict(fresh, onefold.full_state_dict(model))
        if now != output(fresh) or (now == before) != (write is only_read_on_one_rank):
            behind.append((name, write.__name__))
    return behind


def on_uneven_nodes() -> tuple[int, bool]:
    """(groups, whether it trains) where nodes have three ranks and one: one of a rank seems to
    divide four, one of three does not.
    """
    os.environ["LOCAL_WORLD_SIZE"] = "1" if torch.distributed.get_rank() == 3 else "3"
    model = sharded({"stage": 3, "second_copy": True, "reduce_codec": "int8"})
    model(features_of(1, 4, 7)).square().mean().backward()
    return onefold.engine_of(model).group.topology.outer, all(
        p.grad is not None for p in model.parameters() if p.numel()
    )


def thawed() -> bool:
    """Whether error feedback goes on where other parameters are trained than before."""
    model = sharded({"stage": 3, "group": 2, "reduce_codec": "int8", "error_feedback": True})
    weights = [p for name, p in model.named_parameters() if name.endswith("up.weight")]
    for trained in (False, True, False, True):
        for weight in weights:
            weight.requires_grad_(trained)
        model(features_of(1, 4, 7)).square().mean().backward()
        norm = onefold.clip_grad_norm_(model, 1.0)
    return 0 < norm.item() < 100


def all_three(cases: list[tuple[str, Any]]) -> tuple[list[tuple[str, str]], tuple[int, bool], bool]:
    return after_writes(cases), on_uneven_nodes(), thawed()


def test_what_is_kept_follows_every_write_and_ranks_agree_on_where_nodes_end(sample: Any) -> None:
    cases = sample([(name, write) for name in RECIPES for write in WRITES], 3)
    assert run_ranks(4, all_three, cases) == [([], (1, True), True)] * 4


class OfOneRank(nn.Module):
    """Of so few elements that they lie on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 40)
        self.outer = nn.Linear(40, 4)
        self.small = nn.LayerNorm(4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.outer(torch.tanh(self.inner(x))))


def frozen_after_a_step(stage: int, precision: str) -> list[float]:
    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(stage, precision=precision, stall_timeout=20.0)
    model = onefold.shard(OfOneRank(), recipe, units=("small",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(5):
        model.small.weight.requires_grad_(step < 1)
        generator = torch.Generator().manual_seed(2 * step + torch.distributed.get_rank())
        loss = model(torch.randn(3, 4, generator=generator)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_unit_of_one_rank_that_is_frozen_after_a_step_is_refreshed_by_all(precision: str) -> None:
    whole, *divided = (
        run_ranks(2, frozen_after_a_step, stage, precision) for stage in (0, 1, 2, 3)
    )
    assert divided == [whole] * 3


class Refusing(nn.Linear):
    """A layer that raises when it is told to."""

    told = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.told:
            raise ArithmeticError("told to")
        return super().forward(x)


def after_a_pass_that_raised(raises: bool) -> list[float]:
    """The output after a step, a pass that raises in its first layer, and a load."""
    torch.manual_seed(0)
    layers = nn.Sequential(Refusing(8, 8), *(nn.Linear(8, 8) for _ in range(3)))
    model = onefold.shard(layers, onefold.Recipe.zero(1, stall_timeout=10.0), units=(nn.Linear,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(4, 8)
    model(x).square().sum().backward()
    optimizer.step()
    if raises:
        model[0].told = True
        with pytest.raises(ArithmeticError):
            model(x)  # the copies of all layers are on their way by now
        model[0].told = False
    loaded = {name: torch.full(shape, 0.1) for name, shape in SHAPES.items()}
    onefold.load_full_state_dict(model, loaded)
    with torch.no_grad():
        return model(x).flatten().tolist()


SHAPES = {
    f"{i}.{name}": shape for i in range(4) for name, shape in (("weight", (8, 8)), ("bias", (8,)))
}


def test_copies_that_a_raising_pass_left_on_their_way_are_not_taken_for_those_of_later_values() -> (
    None
):
    after, plain = (run_ranks(2, after_a_pass_that_raised, raises) for raises in (True, False))
    assert after == plain
