"""A language model of a few thousand parameters that needs no transformers, for runs that start whole processes."""

from __future__ import annotations

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
        return nn.functional.cross_entropy(self.out(x)[:, :-1].reshape(-1, 257), labels[:, 1:].reshape(-1))


def plain() -> nn.Module:
    return SmallLM(0.0)


def dropping() -> nn.Module:
    return SmallLM(0.2)
