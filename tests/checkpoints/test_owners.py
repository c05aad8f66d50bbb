"""Checkpoints of optimizers that step whole matrices: their states lie with the owners of matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn

import onefold
from on_ranks import on_ranks, slow
from reference import built, train, weights
from zoo import features_of

RECIPES: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3},
    "HSDP": {"stage": 3, "shard_group": 2},
    "hybrid": {"stage": 3, "shard_group": 2, "optimizer_over": "all"},
}


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(5)))


def sharded(**recipe: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = onefold.shard(built(layers), onefold.Recipe.zero(**recipe))
    return model, torch.optim.Muon(model.parameters(), lr=0.02)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    return train(model, optimizer, [features_of(10 * n + dist.get_rank(), 4, 12) for n in numbers])


@on_ranks(4)
@pytest.mark.parametrize("by_dcp", [False, pytest.param(True, marks=slow)])
@pytest.mark.parametrize("name", RECIPES)
def test_states_of_matrices_go_on_under_another_recipe(
    name: str, by_dcp: bool, folder: Path
) -> None:
    model, optimizer = sharded(**RECIPES[name])
    steps(model, optimizer, range(2))
    if by_dcp:
        state = onefold.dcp_state_dict(model, optimizer)
        dist.checkpoint.save(state, checkpoint_id=folder / "checkpoint")
    else:
        onefold.save(folder / "checkpoint", model=model, optimizer=optimizer)
    expected = steps(model, optimizer, range(2, 4)), weights(model)
    for recipe in ({"stage": 1}, {"stage": 3, "shard_group": 2}):
        again, fresh = sharded(**recipe)
        if by_dcp:
            state = onefold.dcp_state_dict(again, fresh)
            dist.checkpoint.load(state, checkpoint_id=folder / "checkpoint")
        else:
            onefold.load(folder / "checkpoint", model=again, optimizer=fresh)
        assert steps(again, fresh, range(2, 4)) == expected[0], recipe
        assert all(torch.equal(w, expected[1][n]) for n, w in weights(again).items()), recipe
