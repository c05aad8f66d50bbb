"""Onefold beside accelerate: its dataloaders."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import reference
from needed import skip_without
from on_ranks import on_ranks, slow
from zoo import TinyGPT, tokens_of

skip_without("accelerate")
SERVER = "libraries"
HERE = Path(__file__)


class Model(nn.Module):
    """As the page calls it; it notes batches and losses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = reference.built(TinyGPT)
        self.seen: list[torch.Tensor] = []
        self.losses: list[float] = []

    def forward(self, tokens: torch.Tensor) -> Any:
        loss = self.inner(tokens)
        self.seen.append(tokens)
        self.losses.append(loss.item())
        return SimpleNamespace(loss=loss)


@slow
@on_ranks(2)
def test_the_pages_recipe_for_accelerate_trains_as_ddp_does() -> None:
    from others.runs import fresh

    page = (HERE.parents[2] / "docs" / "launchers.md").read_text()
    block = re.search(r'```python title="accelerate"\n(.*?)```', page, re.DOTALL)
    assert block is not None
    data = [{"tokens": tokens_of(i, 1)[0]} for i in range(16)]
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    with fresh():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        model = Model()
        # Clipping by the norm would leave its rounding in the weights
        exec(block[1].replace("1.0)  ", "1e9)"), {"model": model, "loader": loader})
    ddp = reference.ddp(reference.built(TinyGPT))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    losses = reference.train(ddp, optimizer, model.seen)
    assert len(losses) == 4 and model.losses == pytest.approx(losses, rel=1e-6)
    first, second = reference.on_each_rank([t.tolist() for t in model.seen])
    assert not any(batch in second for batch in first), "each rank has its own"
