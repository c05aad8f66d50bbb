"""What every side trains: a GPT whose head and embedding are apart, dense or with experts, in plain
`torch.nn`. Tensor and expert parallelism cut it by the plans of `sides.py`; a pipeline cuts it into
`Stage`s.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.axes.settings import Setting
from benchmarks.peers import model as peers
from benchmarks.peers.model import Batch


@dataclass(frozen=True)
class Shape(peers.Shape):
    """`hidden`: width of the feed-forward layer, or of each of `experts`, if there are any; each
    token goes to two of them.
    """

    hidden: int = 0
    experts: int = 0


SHAPES: dict[str, Shape] = {
    "gpt-34m": Shape(layers=8, width=512, heads=8, vocab=8192, seq=128, hidden=2048),
    "moe-51m": Shape(layers=8, width=512, heads=8, vocab=8192, seq=128, hidden=512, experts=8),
    "gpt-tiny": Shape(layers=2, width=64, heads=4, vocab=512, seq=32, hidden=128),
    "moe-tiny": Shape(layers=2, width=64, heads=4, vocab=512, seq=32, hidden=64, experts=4),
}


class Attention(nn.Module):
    """Causal attention. Under tensor parallelism a rank has some of the heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.width_of_head = shape.width // shape.heads
        self.q, self.k, self.v, self.out = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            project(x).view(batch, seq, -1, self.width_of_head).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class AllToAll(torch.autograd.Function):
    """Sends `sizes[r]` rows to rank r of the group, and gets `back[r]` from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], back: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.back, ctx.group = sizes, back, group
        out = x.new_empty(sum(back), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), back, sizes, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        out = grad.new_empty(sum(ctx.sizes), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), ctx.sizes, ctx.back, group=ctx.group)
        return out, None, None, None


class Experts(nn.Module):
    """Feed-forward layers in two stacks, [experts, ...]. `group`: the ranks that they are divided
    over, each of which computes its own.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.count = shape.experts
        self.up = nn.Parameter(torch.empty(shape.experts, shape.width, shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.width))
        self.group: Any = None

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        """x: (rows, width); expert: (rows,), the number of the one that each is sent to."""
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=self.count)
        y = (
            self._computed(x[order], counts, self.up, self.down)
            if self.group is None
            else self._elsewhere(x[order], counts)
        )
        return torch.empty_like(y).index_copy(0, order, y)

    def _elsewhere(self, x: Tensor, counts: Tensor) -> Tensor:
        size = dist.get_world_size(self.group)
        told = torch.empty_like(counts)  # rows for this rank's experts, by the rank that sends them
        dist.all_to_all_single(told, counts, group=self.group)
        sizes: list[int] = counts.view(size, -1).sum(1).tolist()
        back: list[int] = told.view(size, -1).sum(1).tolist()
        rows: Tensor = AllToAll.apply(x, sizes, back, self.group)
        own = self.count // size
        mine = torch.arange(own).repeat(size).repeat_interleave(told)
        order = mine.argsort(stable=True)
        local = [weight.to_local() for weight in (self.up, self.down)]  # type: ignore[operator]
        y = self._computed(rows[order], torch.bincount(mine, minlength=own), *local)
        y = torch.empty_like(y).index_copy(0, order, y)
        out: Tensor = AllToAll.apply(y, back, sizes, self.group)
        return out

    @staticmethod
    def _computed(x: Tensor, counts: Tensor, up: Tensor, down: Tensor) -> Tensor:
        # An expert without rows takes part with none: its gradient is zeros
        parts = zip(x.split(counts.tolist()), up.unbind(), down.unbind(), strict=True)
        return torch.cat([functional.gelu(rows @ u) @ d for rows, u, d in parts])


class Mixture(nn.Module):
    """A router and its experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = Experts(shape)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores, chosen = self.router(rows).softmax(-1).topk(2)
        y = self.experts(rows.repeat_interleave(2, 0), chosen.flatten())
        out = (y * scores.reshape(-1, 1)).view(-1, 2, x.shape[-1]).sum(1)
        return out.view_as(x)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, (batch, seq, width) to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp = Mixture(shape) if shape.experts else FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class Stage(nn.Module):
    """Some blocks of a GPT, with its embeddings if they are the first and its head if they are the
    last. Blocks have the names that they have in the whole.
    """

    def __init__(self, shape: Shape, blocks: Sequence[int] | None = None) -> None:
        super().__init__()
        mine = range(shape.layers) if blocks is None else blocks
        self.is_first, self.is_last = 0 in mine, shape.layers - 1 in mine
        if self.is_first:
            self.tokens = nn.Embedding(shape.vocab, shape.width)
            self.positions = nn.Embedding(shape.seq, shape.width)
        self.blocks = nn.ModuleDict({str(number): Block(shape) for number in mine})
        if self.is_last:
            self.norm = nn.RMSNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """`x`: ids, (batch, seq) int64, or what the stage before has computed. The mean loss if
        there are labels, else what the last block or the head has computed.
        """
        if self.is_first:
            places = torch.arange(x.shape[1], device=x.device)
            x = self.tokens(x) + self.positions(places)
        for block in self.blocks.values():
            x = block(x)
        if self.is_last:
            x = self.head(self.norm(x))
        return x if labels is None else loss_of(x, labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build(name: str, blocks: Sequence[int] | None = None, device: str = "cpu") -> Stage:
    """The model of that name, or some of its blocks: with the same weights in every process."""
    with torch.device("meta"):
        stage = Stage(SHAPES[name], blocks)
    stage.to_empty(device=device)
    for weight_name, weight in stage.named_parameters():
        if weight.ndim == 1:
            nn.init.ones_(weight)
        else:  # by its name, so that a stage draws what the whole model does
            source = torch.Generator(device).manual_seed(crc32(weight_name.encode()))
            nn.init.normal_(weight, std=0.02, generator=source)
    return stage


def count_parameters(name: str) -> int:
    """Elements of the model of that name; nothing is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in Stage(SHAPES[name]).parameters())


def batches(setting: Setting, step: int, rank: int) -> list[Batch]:
    """A rank's micro-batches of a step: those of its data rank, on the setting's device."""
    shape, at = SHAPES[setting.model], setting.data_rank(rank)
    made = [
        peers.drawn(shape, setting.tokens, step, micro, at, setting.data_ranks)
        for micro in range(setting.accumulation)
    ]
    return [(ids.to(setting.device), labels.to(setting.device)) for ids, labels in made]


def touch(build_side: Callable[[Setting], Any], setting: Setting, rank: int) -> None:
    """Let a side train a toy for a step: its code and lazy imports are there afterwards."""
    toy = replace(setting, model=f"{setting.model.partition('-')[0]}-tiny", tokens=32)
    trainer = build_side(toy)
    trainer.step(batches(toy, 0, rank))
    del trainer
    gc.collect()
