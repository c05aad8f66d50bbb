"""Between the micro-batches of a step parameters are frozen, thawed and left out: what has a gradient
keeps it.
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ranks import run_ranks
from trials import (
    Case,
    MeanOverRanks,
    MLPCase,
    differences,
    train_reference,
    train_sharded,
)
from unreduced import MODES, no_sync
from zoo import ResidualBlock, TinyMLP


class Headless(TinyMLP):
    """Without its head in the passes that say so."""

    short = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return x if self.short else self.leave(x)


class Freezes(MLPCase):
    """Three micro-batches a step; between them parameters are frozen. What is frozen keeps the
    gradient that it has, and is stepped, as in plain PyTorch.

    DDP would not reduce it, so the mean over the ranks is made by hand. Rank 1 leaves the head out
    of the first micro-batch: the same must travel on all ranks.
    """

    units = (ResidualBlock, "leave")
    reference = "mean"
    frozen: ClassVar[tuple[tuple[str, ...], ...]] = (
        (),
        ("blocks.0.up.weight", "blocks.1", "enter.bias", "leave"),
        ("blocks.0.up.bias", "blocks.1"),
    )
    short: ClassVar[tuple[tuple[int, int], ...]] = ((1, 0),)  # rank, micro-batch

    def build(self) -> nn.Module:
        self.built = Headless()
        return self.built

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        optimizer.zero_grad()
        total = 0.0
        for micro, frozen in enumerate(self.frozen):
            for name, param in self.built.named_parameters():
                param.requires_grad_(not name.startswith(frozen))
            self.built.short = (rank, micro) in self.short
            with self.unsynced(model) if micro < 2 else contextlib.nullcontext():
                loss = self.loss(model, self.batch(rank, 3 * step + micro))
                loss.backward()
            total += loss.item()
        self.before_update(model)
        optimizer.step()
        return total

    def unsynced(self, model: nn.Module) -> Any:
        return contextlib.nullcontext() if isinstance(model, MeanOverRanks) else no_sync(model)


class LeavesOutAtTheEnd(Freezes):
    """Nothing is frozen; the last micro-batch uses the head on no rank, the first on one alone."""

    frozen = ((), (), ())
    short: ClassVar[tuple[tuple[int, int], ...]] = ((1, 0), (0, 2), (1, 2), (2, 2), (3, 2))


class Thaws(Freezes):
    """Others are trained again, which joins ranges that were apart."""

    frozen = (("blocks.0.down", "blocks.2.up.weight", "leave"), ("blocks.1.up",), ())


class FreezesAtTheEnd(Freezes):
    """Whole units are frozen when the boundary comes."""

    frozen = ((), (), ("blocks", "leave"))


FROZEN_BETWEEN: dict[str, tuple[int, dict[str, Any]]] = {
    **MODES,
    "groups": (3, {"shard_group": 2}),
    "groups of one": (3, {"shard_group": 1}),
    "stepped in the backward pass": (
        1,
        {"offload_optimizer": "cpu", "overlap": False, "step_in_backward": True},
    ),
    "groups, optimizer over all": (3, {"shard_group": 2, "optimizer_over": "all"}),
}


def compare_frozen_between(case_class: type[Case]) -> list[str]:
    reference = train_reference(case_class())
    found = []
    for name, (stage, options) in FROZEN_BETWEEN.items():
        found += differences(
            name, reference, train_sharded(case_class(), stage, **options), 1e-5, 1e-6
        )
    return found


@pytest.mark.parametrize(
    "case", [Freezes, LeavesOutAtTheEnd, Thaws, FreezesAtTheEnd], ids=lambda case: case.__name__
)
def test_what_is_frozen_or_left_out_between_micro_batches_keeps_its_gradient(
    case: type[Case],
) -> None:
    assert run_ranks(4, compare_frozen_between, case) == [[]] * 4
