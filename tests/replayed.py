"""Models of which a step is foretold, by the plan's replay and by a simulation: by name."""

from __future__ import annotations

import torch
from torch import nn

from zoo import Block, TinyGPT, TinyMLP, features_of


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mlp":
        return TinyMLP(16, 128, 6, 16)
    if kind == "gpt":
        return TinyGPT(vocabulary=301, width=64, heads=4, depth=4, length=16, tied=True)
    if kind == "headed":
        return Headed(1001, 64, 4)
    return Routed(256, 5)


class Routed(nn.Module):
    """Blocks with two experts each that every sample sees both of: units of several small
    parameters, and a norm behind them.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Expert(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).square().mean()


class Headed(nn.Module):
    """An embedding, blocks and a head, larger than a block: units each. The root has a norm."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.one, self.two = (
            nn.Linear(width, 2),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.gate(x).softmax(-1)
        return x + weight[..., :1] * self.one(x) + weight[..., 1:] * self.two(x)


def batch_of(kind: str, seed: int) -> torch.Tensor:
    if kind in ("gpt", "headed"):
        return torch.randint(0, 301, (2, 16), generator=torch.Generator().manual_seed(seed))
    return features_of(seed, 4, 16)
