"""Small models that tests train: a GPT of a few thousand parameters, a multi-layer perceptron of
blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

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
    source = torch.Generator("cpu").manual_seed(seed)
    made = torch.randint(vocabulary, (batch, length), generator=source, device="cpu")
    return made.to(torch.get_default_device())


def features_of(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers that depend on `seed` only."""
    source = torch.Generator("cpu").manual_seed(seed)
    made = torch.randn(*shape, generator=source, dtype=dtype, device="cpu")
    return made.to(torch.get_default_device())


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


# -- subjects of tables ----------------------------------------------------------------------------


class AdaptedBlock(Block):
    """With a low-rank adapter beside the MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.adapter_down = nn.Linear(width, 3, bias=False)
        self.adapter_up = nn.Linear(3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        h = self.norm_2(x)
        return x + self.mlp(h) + self.adapter_up(self.adapter_down(h))


class Adapted(TinyGPT):
    """A GPT whose matrices are frozen but for an adapter in each block. Vectors train."""

    def __init__(self, width: int = 20) -> None:
        super().__init__(width=width)
        self.blocks = nn.ModuleList(AdaptedBlock(width, 2) for _ in range(3))
        for name, p in self.named_parameters():
            p.requires_grad_(p.dim() < 2 or "adapter" in name)


class Odd(nn.Module):
    """x (batch, 5) -> (batch, 3). Three odd parts, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(OddPart() for _ in range(3))
        self.leave = nn.Linear(5, 3)
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return self.leave(x)


class ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Conv(nn.Module):
    """x (batch, 3, 6, 6) -> (batch, 4), with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(8) for _ in range(3))
        self.leave = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x.mean((2, 3)))


class Skipping(nn.Module):
    """x (batch, 6) -> (batch, 6): one block computes only where x[0, 0] is above 0, the last one
    never.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        every = x[0, 0] > 0
        for i, block in enumerate(self.blocks):
            if i < 3 and (i != 1 or every):
                x = x + torch.tanh(block(x))
        return x


class MixedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(10, 10).bfloat16(), nn.LayerNorm(10)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x).bfloat16()).float()


class Mixed(nn.Module):
    """x (batch, 6) -> (batch, 6): blocks in bf16 between layers in fp32, each block with a norm in
    fp32.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 10)
        self.blocks = nn.ModuleList(MixedBlock() for _ in range(3))
        self.leave = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2)
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.gate(x).softmax(-1)
        return x + weight[..., :1] * self.one(x) + weight[..., 1:] * self.two(x)


class Routed(nn.Module):
    """x (batch, 16) -> (batch, width). Blocks of two experts that every sample sees both of: units
    of several small parameters, and a norm behind them.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Expert(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Headed(nn.Module):
    """tokens -> scores. An embedding, blocks and a head, larger than a block: units each. The root
    has a norm.
    """

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Language(nn.Module):
    """A language model of its own: takes input_ids and labels, returns a loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = TinyGPT(**options)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.inner(input_ids)


@dataclass(frozen=True)
class Subject:
    """A model that rows of a table name: how to make it, a batch of a number, and the loss of a
    model (or of a function that calls it) on a batch.

    `recomputes`: the name of the same model that keeps its activations. `unforeseen`: what it
    computes depends on its input or on what is frozen, so that a plan is an upper bound.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]
    loss: Callable[[Callable[..., Any], Any], Tensor]
    recomputes: str = ""
    unforeseen: bool = False


def _its_output(model: Callable[..., Any], batch: Any) -> Tensor:
    return model(batch)


def _squares(model: Callable[..., Any], batch: Any) -> Tensor:
    return model(batch).float().square().mean()


def _gpt(batch: int = 2, recomputes: str = "", **options: Any) -> Subject:
    length, vocabulary = options.get("length", 12), options.get("vocabulary", 61)
    return Subject(
        lambda: TinyGPT(**options),
        lambda seed: tokens_of(seed, batch, length, vocabulary),
        _its_output,
        recomputes,
    )


def _on_features(make: Callable[[], nn.Module], *shape: int, unforeseen: bool = False) -> Subject:
    return Subject(make, lambda seed: features_of(seed, *shape), _squares, "", unforeseen)


def _its_loss(model: Callable[..., Any], batch: Any) -> Tensor:
    return model(input_ids=batch, labels=batch).loss


def _of_transformers(kind: str) -> nn.Module:
    import tiny_transformers

    return tiny_transformers.build(kind)


def _half_frozen() -> nn.Module:
    made = TinyGPT()
    made.blocks[0].requires_grad_(False)
    made.blocks[2].mlp.requires_grad_(False)  # type: ignore[union-attr]
    return made


#: Of `tests/promises/table.py`, by name.
SUBJECTS: dict[str, Subject] = {
    "gpt": _gpt(),
    "tied gpt": _gpt(tied=True),
    "wide gpt": _gpt(width=68, depth=2, vocabulary=101),
    # Units large enough to be gathered one ahead
    "big gpt": _gpt(batch=1, width=128, depth=4, length=8),
    "big gpt, recomputed": _gpt(
        1, "big gpt", width=128, depth=4, length=8, checkpointing="non-reentrant"
    ),
    "recomputed gpt": _gpt(2, "gpt", checkpointing="non-reentrant"),
    "gpt recomputed in another way": _gpt(2, "gpt", checkpointing="reentrant"),
    "gpt with dropout": _gpt(dropout=0.1),
    "long gpt": _gpt(batch=32, width=64, depth=2, length=128),
    "long gpt, recomputed": _gpt(
        32, "long gpt", width=64, depth=2, length=128, checkpointing="non-reentrant"
    ),
    "bf16 gpt": Subject(lambda: TinyGPT().bfloat16(), tokens_of, _its_output),
    "half-frozen gpt": Subject(_half_frozen, tokens_of, _its_output),
    "adapted gpt": Subject(Adapted, tokens_of, _its_output, "", unforeseen=True),
    "wide adapted gpt": Subject(lambda: Adapted(64), tokens_of, _its_output, "", unforeseen=True),
    "headed": Subject(lambda: Headed(1001, 64, 4), lambda seed: tokens_of(seed, 2, 16), _squares),
    "mlp": _on_features(TinyMLP, 4, 7),
    "large mlp": _on_features(lambda: TinyMLP(16, 384, 8, 16), 2, 16),
    "routed": _on_features(lambda: Routed(256, 5), 4, 16),
    "odd": _on_features(Odd, 4, 5, unforeseen=True),
    "conv": _on_features(Conv, 4, 3, 6, 6),
    "skipping": _on_features(Skipping, 4, 6, unforeseen=True),
    "mixed": _on_features(Mixed, 4, 6),
    "gpt2 of transformers": Subject(lambda: _of_transformers("gpt2"), tokens_of, _its_loss),
    "llama of transformers": Subject(lambda: _of_transformers("llama"), tokens_of, _its_loss),
}
