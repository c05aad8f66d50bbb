"""Adapters beside frozen weights, in blocks that are computed again: units stay gathered as long as
they are needed, and code sees the dtype that the forward pass saw.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from ranks import run_ranks
from zoo import features_of


class LowRank(nn.Module):
    """A frozen layer with a low-rank adapter, whose gradients come before the layer's backward pass
    reads the frozen weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.base(x)
        return kept + self.up(self.down(x))


class Recomputed(nn.Module):
    """Four blocks, the third without an adapter; `span` blocks are recomputed together. Inside: the
    checkpoint lies inside the block's forward pass, as transformers has it, so that the block's
    hooks do not see the recomputation.
    """

    def __init__(self, reentrant: bool, span: int, inside: bool) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(8, 8).requires_grad_(False) for _ in range(2))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(8).requires_grad_(False),
                nn.Linear(8, 8).requires_grad_(False) if i == 2 else LowRank(),
                nn.Linear(8, 8).requires_grad_(False),
                nn.Tanh(),
            )
            for i in range(4)
        )
        self.reentrant, self.span = reentrant, span
        if inside:
            for block in self.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).detach().requires_grad_(True)
        for i in range(0, 4, self.span or 1):
            some = nn.Sequential(*self.blocks[i : i + self.span]) if self.span else self.blocks[i]
            x = checkpoint(some, x, use_reentrant=self.reentrant) if self.span else some(x)
        return self.last(x)


def recomputed(reentrant: bool, span: int) -> list[Any]:
    runs = []
    for stage in (0, 3):
        torch.manual_seed(0)
        model = onefold.shard(
            Recomputed(reentrant, span, inside=span == 0), onefold.Recipe.zero(stage)
        )
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        losses = []
        for step in range(3):
            loss = (
                model(features_of(10 * step + torch.distributed.get_rank(), 4, 8)).square().mean()
            )
            loss.backward()
            held = [
                u.name for u in onefold.engine_of(model).units if stage == 3 and not u.ungathered
            ]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs.append((losses, held))
    return runs


@pytest.mark.parametrize(
    "span", [0, 1, 2], ids=["inside the block", "each block", "two blocks together"]
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_frozen_blocks_stay_gathered_until_their_backward_pass_is_over(
    reentrant: bool, span: int
) -> None:
    for (whole, _), (divided, held) in run_ranks(2, recomputed, reentrant, span):
        assert divided == whole
        assert held == []  # and no longer than this backward pass


def looked_at(stage: int, span: int, look: bool) -> list[float]:
    """Losses of steps that make a pass with the adapters off, between forward and backward."""
    torch.manual_seed(0)
    model = onefold.shard(Recomputed(False, span, inside=span == 0), onefold.Recipe.zero(stage))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    losses = []
    for step in range(3):
        x = features_of(10 * step + torch.distributed.get_rank(), 4, 8)
        loss = model(x).square().mean()
        if look:
            for p in trained:
                p.requires_grad_(False)
            with torch.no_grad():
                model(x)
            for p in trained:
                p.requires_grad_(True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def looked_at_everywhere() -> dict[str, list[float]]:
    return {
        f"stage {stage}, span {span}, look {look}": looked_at(stage, span, look)
        for stage in (1, 3)
        for span in (0, 1)
        for look in (False, True)
    }


def test_a_pass_with_the_adapters_off_before_the_backward_pass_changes_nothing() -> None:
    """As DPO asks a peft model for its reference."""
    for seen in run_ranks(2, looked_at_everywhere):
        expected = seen["stage 1, span 0, look False"]
        assert len(set(expected)) == 3
        assert seen == dict.fromkeys(seen, expected)


class Casting(LowRank):
    """An adapter in fp32 in a model in bf16 that casts its input to what its weight is in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.base(x)
        return kept + self.up(self.down(x.to(self.down.weight.dtype))).to(kept.dtype)


def casting(stage: int, reentrant: bool | None, span: int) -> list[float]:
    """Losses of three steps in bf16; reentrant None: nothing is recomputed."""
    torch.manual_seed(0)
    model = Recomputed(bool(reentrant), span, inside=span == 0 and reentrant is not None)
    if reentrant is None:
        model.span = 0
    model.bfloat16()
    for block in model.blocks:
        if isinstance(block[1], LowRank):
            block[1].__class__ = Casting
            block[1].down.float()
            block[1].up.float()
    model = onefold.shard(model, onefold.Recipe.zero(stage, precision="bf16"))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(3):
        x = features_of(10 * step + torch.distributed.get_rank(), 4, 8).bfloat16()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def casting_everywhere() -> dict[str, list[float]]:
    return {
        f"{stage} {reentrant} {span}": casting(stage, reentrant, span)
        for stage in (1, 2, 3)
        for reentrant, span in [(None, 0), (False, 0), (True, 0), (False, 1), (False, 2)]
    }


def test_recomputed_adapters_see_the_dtype_that_the_forward_pass_saw() -> None:
    for found in run_ranks(2, casting_everywhere):
        expected = found["1 None 0"]
        assert len(set(expected)) == 3
        assert all(losses == expected for losses in found.values()), found


class Distilled(nn.Module):
    """Reads the dtype of another sharded model in what is recomputed."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)
        self.teacher = [teacher]  # no part of this model
        self.seen: list[torch.dtype] = []

    def part(self, x: torch.Tensor) -> torch.Tensor:
        dtype = next(self.teacher[0].parameters()).dtype
        self.seen.append(dtype)
        return torch.tanh(self.own(x)).to(dtype).exp().to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.part, x, use_reentrant=True)  # type: ignore[no-any-return]


def dtypes_of_another() -> list[torch.dtype]:
    recipe = onefold.Recipe.zero(3, precision="bf16")
    model = Distilled(onefold.shard(nn.Linear(8, 8), recipe))
    shard = onefold.shard(model, recipe)
    x = features_of(0, 4, 8).bfloat16().requires_grad_(True)
    shard(x).float().square().mean().backward()
    return model.seen


def test_another_models_dtype_is_the_same_in_a_recomputation() -> None:
    assert run_ranks(2, dtypes_of_another) == [[torch.float32] * 2] * 2
