"""An optimizer that looks at large matrices as a whole and steps small ones by element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onefold
from on_ranks import on_ranks
from reference import NEAR, built, differences, train, weights
from zoo import features_of

WIDTH = 150


class LargeOnly(torch.optim.Optimizer):
    """Divides the gradient of a matrix by its norm from 128 rows and columns on."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    large = p.dim() == 2 and min(p.shape) >= 128
                    p.sub_(group["lr"] * (p.grad / p.grad.norm() if large else p.grad))


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_large_matrices_are_stepped_as_in_one_process(stage: int) -> None:
    batches = [features_of(n, 4, WIDTH) for n in range(2)]  # the same on all ranks
    plain = built(lambda: nn.Linear(WIDTH, WIDTH))
    train(plain, LargeOnly(plain.parameters()), batches)
    model = onefold.shard(built(lambda: nn.Linear(WIDTH, WIDTH)), onefold.Recipe.zero(stage))
    train(model, LargeOnly(model.parameters()), batches)
    assert not differences(weights(plain), weights(model), **NEAR)
