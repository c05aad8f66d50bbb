"""Buffers of which ranks have other values at the moment of a save: statistics of batch norms,
between a pass and the next one.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import onefold
from on_ranks import on_ranks
from reference import built, on_each_rank
from zoo import features_of


@on_ranks(2)
def test_a_checkpoint_has_the_first_ranks_statistics_and_gives_them_to_all(folder: Path) -> None:
    model = built(lambda: nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)))
    onefold.shard(model, onefold.Recipe.zero(stage=3))
    model(features_of(dist.get_rank(), 4, 7)).square().mean().backward()
    mean = model[1].running_mean
    first, second = on_each_rank(mean.tolist())
    assert first != second
    onefold.save(folder / "checkpoint", model=model)
    mean.zero_()
    onefold.load(folder / "checkpoint", model=model)
    assert on_each_rank(mean.tolist()) == [first, first]
    assert torch.equal(mean, torch.tensor(first))
