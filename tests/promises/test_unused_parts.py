"""A parameter of a large unit that one rank uses and another does not.

The unit is larger than those of the zoo: below 1 MiB its whole gradient buffer is filled with zeros,
above it each parameter that got no gradient is.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from on_ranks import on_ranks
from reference import NEAR, built, ddp, differences, sgd, train, weights
from zoo import features_of

WIDTH = 600


class Part(nn.Module):
    """Rank 1 uses the second matrix of the last part only. Gradients of that one are still in the
    buffer when those of the others come.
    """

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return torch.tanh(self.second(x)) if self.last or dist.get_rank() == 0 else x


def parts() -> nn.Module:
    return nn.Sequential(*(Part(last=n == 3) for n in range(4)))


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_rank_did_not_use_of_a_large_unit_counts_as_zero_there(stage: int) -> None:
    batches = [features_of(10 * n + dist.get_rank(), 2, WIDTH) for n in range(3)]
    plain = ddp(built(parts))
    train(plain, sgd(plain), batches)
    model = onefold.shard(built(parts), onefold.Recipe.zero(stage))
    train(model, sgd(model), batches)
    assert not differences(weights(plain), weights(model), **NEAR)
