"""The benchmark of a calibration: its sizes, and the modules that it measures. It takes about a
minute, or a few seconds with `quick`, and fits in the memory there is.

| module    | like                  | why it is measured                                                                   |
|-----------|-----------------------|--------------------------------------------------------------------------------------|
| `Block`   | GPT-2, few operations | large fused products: the least time that a block's FLOPs take                       |
| `Gated`   | Llama, by hand        | equal FLOPs in many operations: norms, rotations, gates as models' own code has them |
| `Chain`   | neither               | operations without products, to tell their cost from that of products                |

The modules are written for the benchmark: none is a model that a plan may be asked about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

KIB, MIB = 1 << 10, 1 << 20
#: Blocks and vocabulary of the model that the reference steps train.
REFERENCE_BLOCKS, REFERENCE_VOCABULARY = 4, 2048
#: Width of a `Gated` block's feed-forward, in halves of the block's width.
GATED_HALVES = 5


@dataclass(frozen=True)
class Sizes:
    """Sizes to measure at, ascending.

    Attributes:
        dtypes: compute dtypes.
        matrices: (m, n, k) of `F.linear` of [m, k] with [n, k].
        blocks: (hidden, tokens) of a transformer block.
        copy_bytes: bytes of a copy within memory; the largest is far larger than the caches.
        optimizer_numels: elements of a shard that AdamW steps.
        move_bytes: bytes of the whole buffer that is gathered or reduced.
        overlap_bytes: bytes of the gather that runs beside matrix products.
        disk_bytes: bytes of the file that is written and read.
        budget_s: seconds a point may take beyond its least number of repeats, over all rounds.
        rounds: how often everything is measured; the median of the rounds counts.
        gated, chains: (hidden, tokens) of gated blocks and of chains of small operations.
        steps: (hidden, tokens) of the reference steps. Their ratios of tokens to weights are far
            apart, which tells the cost of passes from that of gradients.
    """

    dtypes: tuple[str, ...]
    matrices: tuple[tuple[int, int, int], ...]
    blocks: tuple[tuple[int, int], ...]
    copy_bytes: tuple[int, ...]
    optimizer_numels: tuple[int, ...]
    move_bytes: tuple[int, ...]
    overlap_bytes: int
    disk_bytes: int
    budget_s: float
    rounds: int = 1
    gated: tuple[tuple[int, int], ...] = ()
    chains: tuple[tuple[int, int], ...] = ()
    steps: tuple[tuple[int, int], ...] = ()

    @classmethod
    def for_device(
        cls, device: str, quick: bool = False, half: tuple[str, ...] = ("bfloat16",)
    ) -> Sizes:
        """Return sizes for "cpu" or "cuda". `half`: 16-bit dtypes to measure besides float32."""
        large = replace(_GPU if device == "cuda" else _CPU, dtypes=("float32", *half))
        return large._fewer() if quick else large

    def within(self, free_bytes: int) -> Sizes:
        """Leave out the sizes whose buffers need more than half of `free_bytes`, the memory that is
        free for one rank.

        The smallest size of each kind stays: a machine without memory for that could not run torch
        either.
        """
        room = free_bytes // 2
        needs: dict[str, Callable[..., int]] = {
            "matrices": lambda m, n, k: 4 * (m * k + n * k + m * n),
            "blocks": lambda h, t: 4 * (24 * h * h + 32 * h * t),
            "gated": lambda h, t: 4 * (42 * h * h + 80 * h * t),
            "chains": lambda h, t: 4 * 200 * h * t,
            "copy_bytes": lambda b: 2 * b,
            "optimizer_numels": lambda n: 16 * n,
            "move_bytes": lambda b: 4 * b,
        }
        kept: dict[str, Any] = {}
        for name, need in needs.items():
            sizes = getattr(self, name)
            fit = [s for s in sizes if need(*(s if isinstance(s, tuple) else (s,))) <= room]
            kept[name] = tuple(fit) or sizes[:1]
        steps = tuple((h, t) for h, t in self.steps if reference_bytes(h, t) <= room)
        overlap = min(self.overlap_bytes, kept["move_bytes"][-1])
        return replace(self, **kept, steps=steps, overlap_bytes=overlap)

    def _fewer(self) -> Sizes:
        """Return sizes for a rough picture in a few seconds: medium shapes, smaller messages, a
        short budget.
        """
        middle = len(self.matrices) // 2
        return replace(
            self,
            matrices=(self.matrices[1], self.matrices[2], *self.matrices[middle : middle + 2]),
            blocks=self.blocks[:5],
            optimizer_numels=self.optimizer_numels[:2],
            move_bytes=self.move_bytes[:4],
            overlap_bytes=self.move_bytes[3],
            disk_bytes=self.disk_bytes // 8,
            budget_s=self.budget_s / 5,
            rounds=1,
        )


def _matrices(
    squares: tuple[int, ...], tokens: tuple[int, ...], hidden: tuple[int, ...], vocab: int
) -> tuple[tuple[int, int, int], ...]:
    """Return (m, n, k) of square products; of a transformer's products (qkv, up, down) at every
    width and number of tokens; and of the head's.
    """
    shapes = [(s, s, s) for s in squares]
    for h in hidden:
        for t in tokens:
            shapes += [(t, 3 * h, h), (t, 4 * h, h), (t, h, 4 * h)]
    return (*shapes, (tokens[-1] // 2, vocab, hidden[-1]))


_CPU = Sizes(
    dtypes=("float32",),
    matrices=_matrices((128, 256, 512, 1024, 2048), (64, 512), (256, 768), vocab=32000),
    blocks=(
        (64, 64), (128, 128), (128, 512), (256, 64), (256, 256), (256, 1024), (768, 256), (768, 1024),
    ),
    copy_bytes=(MIB, 64 * MIB),
    optimizer_numels=(64 * KIB, MIB, 8 * MIB),
    move_bytes=tuple(4**i * 64 * KIB for i in range(6)),
    overlap_bytes=16 * MIB,
    disk_bytes=256 * MIB,
    budget_s=0.1,
    rounds=3,
    gated=((64, 64), (128, 128), (256, 128), (256, 512)),
    chains=((64, 1), (128, 128), (256, 512)),
    steps=((256, 64), (128, 256)),
)  # fmt: skip
_GPU = Sizes(
    dtypes=("float32",),
    matrices=_matrices((1024, 2048, 4096, 8192), (2048, 8192), (1024, 4096), vocab=32000),
    blocks=((256, 1024), (1024, 1024), (1024, 4096), (4096, 2048), (8192, 2048)),
    copy_bytes=(MIB, 512 * MIB),
    optimizer_numels=(MIB, 16 * MIB, 128 * MIB),
    move_bytes=tuple(4**i * 64 * KIB for i in range(7)),
    overlap_bytes=64 * MIB,
    disk_bytes=512 * MIB,
    budget_s=0.1,
    rounds=3,
    gated=((1024, 1024), (4096, 2048)),
    chains=((256, 1), (1024, 1024), (4096, 2048)),
    steps=((2048, 512), (1024, 4096)),
)


def reference_bytes(hidden: int, tokens: int) -> int:
    """Estimate the bytes of a reference step on one rank: weights, gradients, master weights,
    moments, a gather, activations, logits.
    """
    numel = 11 * hidden * hidden * REFERENCE_BLOCKS + 2 * REFERENCE_VOCABULARY * hidden
    return 24 * numel + 4 * tokens * (80 * hidden * REFERENCE_BLOCKS + 3 * REFERENCE_VOCABULARY)


class Block(nn.Module):
    """A common transformer block: attention and a feed-forward of four times the width, each after
    a layer norm.
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
    """Return the model FLOPs of a block's forward and backward pass over one sequence: 6 per
    parameter and token, plus 12·h·s per token for attention.

    PaLM (2022), appendix B, for one layer of 12·h² parameters; causal masking is not deducted.
    """
    return 6 * 12 * hidden * hidden * tokens + 12 * hidden * tokens * tokens


class RootMeanSquare(nn.Module):
    """An RMS norm written out in single operations, in fp32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Gated(nn.Module):
    """A transformer block like Llama's: separate projections, half as many heads for keys and
    values, rotary embeddings, a gated feed-forward.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(2, hidden // 64)
        self.width = hidden // self.heads
        ffn, small = hidden * GATED_HALVES // 2, self.heads // 2 * self.width
        self.norm_attention, self.norm_ffn = RootMeanSquare(hidden), RootMeanSquare(hidden)
        self.q, self.k, self.v, self.out = (
            nn.Linear(a, b, bias=False)
            for a, b in ((hidden, hidden), (hidden, small), (hidden, small), (hidden, hidden))
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
        """Return cosines and sines by position and dimension, each [tokens, width]."""
        half = torch.arange(self.width // 2, device=like.device, dtype=torch.float32)
        angles = torch.outer(
            torch.arange(tokens, device=like.device, dtype=torch.float32),
            1e4 ** (-2 * half / self.width),
        )
        both = torch.cat((angles, angles), -1)
        return both.cos().to(like.dtype), both.sin().to(like.dtype)


def gated_flops(hidden: int, tokens: int) -> int:
    """Return the same as `block_flops` for a `Gated` block with an even number of heads: 3·h²
    parameters for attention, three matrices of h·ffn.
    """
    return (
        6 * (3 * hidden * hidden + 3 * hidden * (hidden * GATED_HALVES // 2)) * tokens
        + 12 * hidden * tokens * tokens
    )


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """Repeat each head `times` times."""
    b, heads, t, width = x.shape
    return x[:, :, None].expand(b, heads, times, t, width).reshape(b, heads * times, t, width)


class Chain(nn.Module):
    """The operations that models run between matrix products: [T, H] → scalar."""

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
