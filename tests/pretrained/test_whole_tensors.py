"""Whole tensors (`onefold.stream_params`): the same on every rank, of every recipe, and never more
than a unit of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import looks
import onefold
from on_ranks import on_ranks
from reference import built

WIDTH = 8


class WithBuffers(nn.Module):
    """A tied weight, a norm's statistics, a frozen matrix, and a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.inner = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.inner(x + self.frozen(x))
        return self.head(x).float().square().mean() + self.norm(x).float().square().mean()


RECIPES: list[dict[str, Any]] = [
    {"stage": 0}, {"stage": 1, "precision": "bf16"}, {"stage": 2}, {"stage": 3}, {"stage": 3, "precision": "bf16"},
    {"stage": 3, "shard_group": 1}, {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    {"stage": 3, "frozen": "int8"},
]  # fmt: skip
IN_GROUPS: list[dict[str, Any]] = [
    {"stage": 3, "shard_group": 2}, {"stage": 3, "shard_group": 2, "optimizer_over": "all"},
    {"stage": 3, "group": 2, "second_copy": True},
]  # fmt: skip


def made(**recipe: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    recipe = {"stall_timeout": 20.0, **recipe}
    model = onefold.shard(built(WithBuffers), onefold.Recipe.zero(**recipe), units=(nn.Linear,))
    return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(12)).backward()
    optimizer.step()
    optimizer.zero_grad()


def streams(recipe: dict[str, Any]) -> None:
    model, optimizer = made(**recipe)
    for _ in range(2):
        step(model, optimizer)
    with onefold.full_params(model):
        expected = {n: t.detach().clone() for n, t in model.state_dict().items()}
    compute = torch.bfloat16 if "precision" in recipe else None
    for dtype in ("compute", "master", torch.float64):
        seen: list[str] = []
        for name, value in onefold.stream_params(model, dtype):
            seen.append(name)
            wanted = expected[name]
            if not name.startswith("norm."):
                to = {"compute": compute, "master": None}.get(dtype, dtype)
                # What is frozen rests in the compute dtype
                to = value.dtype if to is None and name.startswith("frozen") else to
                wanted = wanted.to(to or wanted.dtype)
            assert type(value) is Tensor and value.dtype == wanted.dtype, (name, dtype)
            assert torch.equal(value, wanted), (name, dtype)
            if (dtype, recipe) == ("master", {"stage": 3}):
                held = looks.held(model)["device"].get("gathered units", 0)
                assert held <= 1536, held  # the largest unit (1280), and padding
        assert sorted(seen) == sorted(expected.keys() - {"head.weight"})
    # Copies: training goes on beside them
    name, kept = next(iter(onefold.stream_params(model, "master")))
    before = kept.clone()
    step(model, optimizer)
    assert torch.equal(kept, before), name


@on_ranks(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_tensors_are_whole(recipe: dict[str, Any]) -> None:
    streams(recipe)


@on_ranks(4)
@pytest.mark.parametrize("recipe", IN_GROUPS)
def test_ranks_in_groups_have_them_too(recipe: dict[str, Any]) -> None:
    streams(recipe)


@on_ranks(2)
def test_what_cannot_be_is_refused_on_every_rank() -> None:
    model, optimizer = made(stage=3)
    for words, given in {
        "torch.int32": (torch.int32,), "give all ranks the same": (["master", "compute"][dist.get_rank()],),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=words):
            list(onefold.stream_params(model, *given))
    stream = onefold.stream_params(model)
    next(stream)
    step(model, optimizer)
    with pytest.raises(RuntimeError, match="trained"):
        list(stream)
