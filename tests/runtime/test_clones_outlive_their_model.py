"""Clones of parameters and gradients are made whole after their model is gone: they keep its ranks,
and none of its memory.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from ranks import run_ranks


def clones(recipe: onefold.Recipe, rate: float = 0.1, **given: Any) -> dict[str, torch.Tensor]:
    """What a model leaves behind after a step, by name; "whole" is a weight that was read as a whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    onefold.shard(model, recipe, **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model(torch.ones(2, 5) + dist.get_rank()).square().sum().backward()
    found = {f"{n}.grad": p.grad.detach().clone() for n, p in model.named_parameters()}
    optimizer.step()
    found |= {n: p.detach().float().cpu().clone() for n, p in model.named_parameters()}
    found["whole"] = model[0].weight.onefold.gather()
    engine = weakref.ref(onefold.engine_of(model))
    del model, optimizer
    assert engine() is None
    return found


def compared(recipe: dict[str, Any], *groups: list[int]) -> dict[str, Any]:
    """Two models' clones beside each other, on the ranks of one of `groups` (on all ranks)."""
    made = [dist.new_group(ranks) for ranks in groups]
    own = [g for g, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks]
    given = {"group": own[0]} if own else {}
    options = onefold.Recipe.zero(**recipe, stall_timeout=60.0)
    a, b, c = (clones(options, rate, **given) for rate in (0.1, 0.1, 0.3))
    names = [name for name in a if name != "whole"]
    return {
        "same": [(a[n] - b[n]).abs().max().item() for n in names],
        "other": (a["0.weight"] - c["0.weight"]).abs().max().item(),
        "largest": c["0.weight"].sub(c["whole"]).abs().max().item(),
        "listed": a["0.weight"].tolist() == a["whole"].tolist(),
        "norms": torch.nn.utils.get_total_norm([a[n] for n in names]).item()
        == torch.nn.utils.get_total_norm([b[n] for n in names]).item(),
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clones_of_a_model_that_is_gone_are_compared_and_made_whole(stage: int) -> None:
    _check(run_ranks(2, compared, {"stage": stage}))


@pytest.mark.parametrize(
    "recipe, groups",
    [({"stage": 3, "shard_group": 2}, ()), ({"stage": 2}, ([0, 2], [1, 3]))],
    ids=["groups of a recipe", "a given group"],
)
def test_clones_meet_on_the_ranks_of_their_model(recipe: Any, groups: Any) -> None:
    _check(run_ranks(4, compared, recipe, *groups))


def _check(found: list[dict[str, Any]]) -> None:
    for seen in found:
        assert seen["same"] == [0.0] * len(seen["same"]), seen
        assert seen["other"] > 0 and seen["largest"] == 0 and seen["listed"] and seen["norms"], seen


def after_the_group() -> str:
    left = clones(onefold.Recipe.zero(3))
    dist.destroy_process_group()
    with pytest.raises(onefold.ShardedParameterError) as error:
        left["0.weight"].sum()
    return str(error.value)


def test_a_clone_says_that_its_process_group_is_gone() -> None:
    expected = (
        "'0.weight' is one rank's part of a parameter whose model is gone, and its process group"
        " too: read it before destroy_process_group()."
    )
    assert run_ranks(2, after_the_group) == [expected] * 2
