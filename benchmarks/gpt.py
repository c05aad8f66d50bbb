"""What most benchmarks train: a GPT in plain `torch.nn`, a stream of random tokens, and the setting that
all sides of a comparison share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]
PRECISIONS: tuple[str, ...] = ("fp32", "bf16")


@dataclass(frozen=True)
class Setting:
    """What all sides of a comparison share.

    `tokens` are per rank and micro-batch; `accumulation` is the number of micro-batches of an
    optimizer step; `warmup` and `steps` count optimizer steps (the first are not timed); `clip` is
    the gradient norm, 0 for none.
    """

    model: str = "gpt-110m"
    tokens: int = 256
    precision: str = "fp32"
    ranks: int = 2
    accumulation: int = 1
    warmup: int = 2
    steps: int = 4
    clip: float = 0.0
    threads: int = 1
    device: str = "cpu"

    @property
    def title(self) -> str:
        """The setting in words, for a table's or a plot's heading."""
        micro = "micro-batch" if self.accumulation == 1 else "micro-batches"
        clip = f", clip {self.clip:g}" if self.clip else ""
        return (
            f"{self.model}, {self.tokens:,} tokens a rank, {self.precision}, {self.ranks} ranks,"
            f" {self.accumulation} {micro} a step{clip}"
        )

    @property
    def tokens_a_step(self) -> int:
        """Tokens that all ranks together consume in one optimizer step."""
        return self.tokens * self.accumulation * self.ranks


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT: `seq` tokens a sample, blocks, an embedding of `vocab` rows."""

    layers: int
    width: int
    heads: int
    vocab: int
    seq: int


SHAPES: dict[str, Shape] = {
    "gpt-110m": Shape(layers=12, width=768, heads=12, vocab=32_768, seq=256),
    "gpt-1b": Shape(layers=24, width=2048, heads=16, vocab=32_768, seq=1024),
    "blocks-2k": Shape(layers=4, width=4096, heads=32, vocab=512, seq=2048),
    "blocks-8k": Shape(layers=4, width=4096, heads=32, vocab=512, seq=8192),
    "gpt-tiny": Shape(layers=2, width=64, heads=4, vocab=512, seq=32),
}


class Block(nn.Module):
    """Pre-norm attention and feed-forward, (batch, seq, width) to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (
            self.qkv(self.norm_1(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        hidden: Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return hidden


class GPT(nn.Module):
    """A decoder whose head and embedding share a weight. Its forward returns the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.seq, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """`ids` and `labels`: (batch, seq) int64."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build(name: str, seed: int = 0, device: str = "cpu") -> GPT:
    """The model of that name with the same initial weights in every process."""
    torch.manual_seed(seed)
    with torch.device(device):
        return GPT(SHAPES[name])


def count_parameters(name: str) -> int:
    """Elements of the model of that name, tied weights once; nothing is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(SHAPES[name]).parameters())


def count_at_the_turn(name: str) -> int:
    """Elements that stage 3 keeps between the passes: the last block, and what is in no block."""
    with torch.device("meta"):
        model = GPT(SHAPES[name])
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    return sum(p.numel() for p in model.parameters()) - sum(blocks[:-1])


def micro_batch(shape: Shape, tokens: int, step: int, micro: int, rank: int, ranks: int) -> Batch:
    """Inputs and labels, (tokens / seq, seq) each, a function of where in the run the micro-batch
    stands and no more.

    Token frequencies follow Zipf's law (log-uniform ids), so that there is something to learn and
    the losses of a few steps move: peers whose losses agree then agree on something.
    """
    seq = min(shape.seq, tokens)
    source = torch.Generator().manual_seed(((step * 1_000 + micro) * ranks + rank) * 7 + 1)
    uniform = torch.rand(max(1, tokens // seq), seq + 1, generator=source, dtype=torch.float64)
    ids = (shape.vocab**uniform).long().sub_(1).clamp_(0, shape.vocab - 1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def batches(setting: Setting, step: int, rank: int, ranks: int = 0) -> list[Batch]:
    """The micro-batches of one of `ranks` (the setting's) in a step, on the setting's device."""
    shape, count = SHAPES[setting.model], ranks or setting.ranks
    made = [
        micro_batch(shape, setting.tokens, step, micro, rank, count)
        for micro in range(setting.accumulation)
    ]
    return [(ids.to(setting.device), labels.to(setting.device)) for ids, labels in made]
