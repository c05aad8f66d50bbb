"""Modules that write to their own parameters in the forward pass: nothing of it is lost, at any stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import features_of
from ranks import run_ranks
from trials import Case, differences, train_reference, train_sharded


def clamped(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.clamp_(-0.2, 0.2)


def through_data(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.2, 0.2)


def assigned(weight: nn.Parameter) -> None:
    """As layers with a norm constraint do (`Conv2dWithConstraint`, say)."""
    weight.data = torch.renorm(weight.data, p=2, dim=0, maxnorm=0.4)


WRITES = {f.__name__: f for f in (clamped, through_data, assigned)}


class Constrained(nn.Module):
    def __init__(self, write: Callable[[Any], None]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(12, 40), write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.layer.weight)
        return torch.relu(self.layer(x))


class Writing(Case):
    ddp_options = {"find_unused_parameters": False}

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = WRITES[write]

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(7, 12), Constrained(self.write), nn.Linear(40, 3))

    def batch(self, rank: int, step: int) -> Tensor:
        return features_of(10 * step + rank, 4, 7)


def compared(write: str) -> list[str]:
    reference = train_reference(Writing(write))
    problems = []
    for stage in (0, 1, 2, 3):
        problems += differences(f"stage {stage}, {write}", reference, train_sharded(Writing(write), stage), 1e-5, 1e-6)
    return problems


@pytest.mark.parametrize("write", WRITES)
def test_what_a_forward_pass_writes_to_parameters_is_kept_as_under_ddp(write: str) -> None:
    assert run_ranks(2, compared, write) == [[], []]
