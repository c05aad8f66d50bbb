"""Small models that tests train: a GPT of a few thousand parameters, a multi-layer perceptron of
blocks.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Checkpointing = Literal["none", "reentrant", "non-reentrant"]


class Attention(nn.Module):
    """Causal self-attention without biases (a key bias has a gradient of rounding noise only, which
    Adam blows up).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(x)
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Pre-norm transformer block; its width is odd-friendly: nothing here needs sizes that divide
    by the ranks.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class TinyGPT(nn.Module):
    """tokens (batch, length) -> the mean next-token loss, a scalar."""

    def __init__(
        self,
        vocabulary: int = 61,
        width: int = 20,
        heads: int = 2,
        depth: int = 3,
        length: int = 12,
        tied: bool = False,
        dropout: float = 0.0,
        checkpointing: Checkpointing = "none",
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def logits(self, tokens: Tensor) -> Tensor:
        """(batch, length) -> (batch, length, vocabulary)"""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.logits(tokens)
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class ResidualBlock(nn.Module):
    """x (batch, width) -> (batch, width)"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class TinyMLP(nn.Module):
    """x (batch, features) -> (batch, classes)"""

    def __init__(
        self, features: int = 7, width: int = 10, depth: int = 3, classes: int = 5
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(depth))
        self.leave = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def tokens_of(seed: int, batch: int = 2, length: int = 12, vocabulary: int = 61) -> Tensor:
    """Random tokens (batch, length) that depend on `seed` only."""
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def features_of(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers that depend on `seed` only."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class OddPart(nn.Module):
    """x (batch, 5) -> the same; a tie inside, a frozen matrix, a scalar, a parameter smaller than
    the ranks, a buffer that counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.again, self.down, self.fixed = (
            nn.Linear(5, 7),
            nn.Linear(5, 7, bias=False),
            nn.Linear(7, 5),
            nn.Linear(5, 5),
        )
        self.again.weight = self.up.weight
        self.fixed.requires_grad_(False)
        self.gain, self.pair = (
            nn.Parameter(torch.tensor(1.5)),
            nn.Parameter(torch.tensor([0.5, -0.5])),
        )
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1.0
        return (
            self.fixed(x)
            + self.down(torch.tanh(self.up(x) + self.again(x))) * self.gain
            + self.pair.sum()
        )


# -- models whose ranks go different ways ----------------------------------------------------------


class DropsBlocks(nn.Module):
    """x (batch, 7) -> the same. Each rank skips blocks at random, by a generator of its own
    (LayerDrop).
    """

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(7) for _ in range(depth))
        self.leave = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) > 0.5:
                x = block(x)
        return self.leave(x)


class DropsBlocksRecomputed(DropsBlocks):
    """One checkpoint over all blocks: backward begins by walking the blocks forwards."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class ChosenByRank(DropsBlocks):
    """Three experts: ranks choose different ones, and nobody the third, which has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[dist.get_rank() % 2](x) * 2


class OtherOrder(DropsBlocks):
    """Even ranks apply the blocks forwards, odd ones backwards; they are of one size."""

    def forward(self, x: Tensor) -> Tensor:
        for block in list(self.blocks) if dist.get_rank() % 2 == 0 else list(self.blocks)[::-1]:
            x = block(x)
        return self.leave(x)


class TwoExits(nn.Module):
    """x (batch, 7) -> what comes out behind the first block and at the end, (batch, 5) each."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 10)
        self.first = ResidualBlock(10)
        self.early = nn.Linear(10, 5)
        self.tail = nn.ModuleList(ResidualBlock(10) for _ in range(2))
        self.leave = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(torch.tanh(self.enter(x)))
        early = self.early(x)
        for block in self.tail:
            x = block(x)
        return early, self.leave(x)
