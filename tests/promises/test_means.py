"""Gradients in 16 bits: what ranks and micro-batches add up is added in fp32 and rounded once.

Three ranks tell how often a mean is rounded: dividing by a power of two rounds nothing.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from on_ranks import on_ranks
from reference import built
from zoo import TinyMLP, features_of

BF16 = torch.bfloat16


def model() -> nn.Module:
    return built(TinyMLP).to(BF16)


def loss(of: nn.Module, rank: int, micro_batch: int, alone: bool) -> Tensor:
    """`alone`: only rank 0's counts."""
    inputs = features_of(10 * micro_batch + rank, 4, 7).to(BF16)
    return of(inputs).float().square().mean() * (not (alone and rank))


def expected(ranks: int, micro_batches: int, alone: bool, wire: torch.dtype) -> dict[str, Tensor]:
    """The mean over the ranks of the sums over micro-batches, rounded to `wire` once."""
    plain = model()
    total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in plain.named_parameters()}
    for rank in range(ranks):
        for micro_batch in range(micro_batches):
            plain.zero_grad()
            loss(plain, rank, micro_batch, alone).backward()
            for name, p in plain.named_parameters():
                total[name] += p.grad.float()
    return {name: (gradient * (1.0 / ranks)).to(wire).float() for name, gradient in total.items()}


def found(micro_batches: int, alone: bool, **recipe: object) -> dict[str, Tensor]:
    """The gradients of a step, on rank 0: what a step of size 1 takes from the weights."""
    sharded = onefold.shard(model(), onefold.Recipe.zero(**recipe))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    before = onefold.full_state_dict(sharded)
    for k in range(micro_batches):
        last = k + 1 == micro_batches
        with contextlib.nullcontext() if last else onefold.no_sync(sharded):
            loss(sharded, dist.get_rank(), k, alone).backward()
    optimizer.step()
    return {n: before[n] - after for n, after in onefold.full_state_dict(sharded).items()}


def compare(ranks: int, micro_batches: int, alone: bool = False, **recipe: object) -> None:
    wire = torch.float32 if recipe.get("wire") == "fp32" else BF16
    wanted = expected(ranks, micro_batches, alone, wire)
    for name, gradient in found(micro_batches, alone, **recipe).items():
        # Weights of size 1 in fp32 tell a gradient within 2^-23; a second rounding to bf16 moves
        # it by up to 2^-9 of itself
        gap = (gradient - wanted[name]).abs().max().item()
        assert gap < 1e-6, f"{name}: {gap:.2e} from the mean that is rounded once"


@on_ranks(3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_mean_over_three_ranks_is_rounded_to_16_bits_once(stage: int) -> None:
    compare(3, 1, stage=stage)


@on_ranks(3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_with_fp32_on_the_wire_nothing_is_rounded_to_16_bits(stage: int) -> None:
    compare(3, 1, stage=stage, wire="fp32")


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_batches_in_16_bits_are_added_in_fp32(stage: int) -> None:
    # With one rank's gradients alone, what it sends is rounded as the mean is: once
    compare(2, 5, alone=True, stage=stage, **({"reduce_at": "boundary"} if stage > 1 else {}))
