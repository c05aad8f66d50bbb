"""What a calibration times: two kinds of transformer block, and a chain of what stands between
matrix products.

| yardstick | like                  | because                                                                              |
|-----------|-----------------------|--------------------------------------------------------------------------------------|
| `Block`   | GPT-2, few operations | large fused products: the least time that a block's FLOPs take                       |
| `Gated`   | Llama, by hand        | equal FLOPs in many operations: norms, rotations, gates as models' own code has them |
| `Chain`   | neither               | operations without products, so that their cost can be told from the products'       |

All are code of our own: no model that a plan is asked about is among them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

#: Width of a `Gated` block's feed-forward, in halves of its own width.
GATED_HALVES = 5


class Block(nn.Module):
    """A transformer block of the common kind: attention and a feed-forward of four times the width,
    each behind a layer norm.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // 64)
        self.norm_attention, self.norm_ffn = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        b, t, h = x_BTH.shape
        q, k, v = (
            self.qkv(self.norm_attention(x_BTH))
            .view(b, t, 3, self.heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTH = x_BTH + self.out(mixed.transpose(1, 2).reshape(b, t, h))
        return x_BTH + self.down(F.gelu(self.up(self.norm_ffn(x_BTH))))


def block_flops(hidden: int, tokens: int) -> int:
    """Model FLOPs of a block's forward and backward pass over one sequence: 6 a parameter and
    token, and 12·h·s a token for attention.

    PaLM (2022), appendix B, for one layer of 12·h² parameters; causal masking is not deducted.
    """
    return 6 * 12 * hidden * hidden * tokens + 12 * hidden * tokens * tokens


class RootMeanSquare(nn.Module):
    """A norm by hand, in fp32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Gated(nn.Module):
    """A transformer block as Llama's: separate projections, half as many heads for keys and values,
    rotations, a gated feed-forward.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(2, hidden // 64)
        self.width = hidden // self.heads
        ffn, small = hidden * GATED_HALVES // 2, self.heads // 2 * self.width
        self.norm_attention, self.norm_ffn = RootMeanSquare(hidden), RootMeanSquare(hidden)
        self.q, self.k, self.v, self.out = (
            nn.Linear(a, b, bias=False) for a, b in _projections(hidden, small)
        )
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        b, t, h = x_BTH.shape
        normed = self.norm_attention(x_BTH)
        q, k, v = (
            p(normed).view(b, t, -1, self.width).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        cos, sin = self._angles(t, x_BTH)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        k, v = (_repeated(y, self.heads // y.shape[1]) for y in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTH = x_BTH + self.out(mixed.transpose(1, 2).reshape(b, t, h))
        normed = self.norm_ffn(x_BTH)
        return x_BTH + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _angles(self, tokens: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines by place and dimension, each [tokens, width]."""
        half = torch.arange(self.width // 2, device=like.device, dtype=torch.float32)
        angles = torch.outer(
            torch.arange(tokens, device=like.device, dtype=torch.float32),
            1e4 ** (-2 * half / self.width),
        )
        both = torch.cat((angles, angles), -1)
        return both.cos().to(like.dtype), both.sin().to(like.dtype)


def gated_flops(hidden: int, tokens: int) -> int:
    """As `block_flops`, of a `Gated` block with an even number of heads: 3·h² parameters for
    attention, three matrices of h·ffn.
    """
    return (
        6 * (3 * hidden * hidden + 3 * hidden * (hidden * GATED_HALVES // 2)) * tokens
        + 12 * hidden * tokens * tokens
    )


def _projections(hidden: int, small: int) -> tuple[tuple[int, int], ...]:
    return ((hidden, hidden), (hidden, small), (hidden, small), (hidden, hidden))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """Each head `times` times."""
    b, heads, t, width = x.shape
    return x[:, :, None].expand(b, heads, times, t, width).reshape(b, heads * times, t, width)


class Chain(nn.Module):
    """What models do between their matrix products, without any: [T, H] → scalar."""

    def __init__(self, hidden: int, tokens: int) -> None:
        super().__init__()
        self.norm = RootMeanSquare(hidden)
        self.register_buffer("place", torch.arange(tokens - 1, -1, -1))

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        place: Any = self.place
        for _ in range(3):
            normed = self.norm(x_TH)
            left, right = normed.chunk(2, -1)
            x_TH = x_TH + F.silu(torch.cat((-right, left), -1)) * normed
            x_TH = x_TH + 0.5 * normed * (
                1.0 + torch.tanh(0.8 * (normed + 0.04 * torch.pow(normed, 3.0)))
            )
            x_TH = torch.zeros_like(x_TH).index_add_(0, place, x_TH[place])
        return torch.log_softmax(x_TH.float(), -1).sum()
