"""A language model of a few thousand parameters that needs no transformers, for runs that start
whole processes.
"""

from __future__ import annotations

import time

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(32, 32), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.dropout(self.linear(x)))


class SmallLM(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, 32)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.out = nn.Linear(32, 257)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(
            self.out(x)[:, :-1].reshape(-1, 257), labels[:, 1:].reshape(-1)
        )


def plain() -> nn.Module:
    return SmallLM(0.0)


def dropping() -> nn.Module:
    return SmallLM(0.2)


class Unhurried(SmallLM):
    """Sleeps in each forward pass, so that a run of it may wait for machines without doing
    thousands of steps.
    """

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return super().forward(input_ids, labels)


def unhurried() -> nn.Module:
    return Unhurried(0.0)


class SlowToWrite:
    """Stands in for a transformers configuration, which a save writes in its middle."""

    def save_pretrained(self, folder: str) -> None:
        time.sleep(0.1)


def slow_to_save() -> nn.Module:
    """Drops out as `dropping`; its saves take long enough to be hit."""
    model = SmallLM(0.2)
    model.config = SlowToWrite()
    return model
