"""The models that the recording trains, by name: how to make one, a batch of a rank, and the
loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import Block, OddPart, TinyGPT, TinyMLP, features_of, tokens_of


class AdaptedBlock(Block):
    """With a low-rank adapter beside the MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.adapter_down, self.adapter_up = (
            nn.Linear(width, 3, bias=False),
            nn.Linear(3, width, bias=False),
        )

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
        self.conv, self.norm = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

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
    """x (batch, 6) -> (batch, 6): one block computes in every second call only, the last one
    never.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for i, block in enumerate(self.blocks):
            if i < 3 and (i != 1 or self.calls % 2):
                x = x + torch.tanh(block(x))
        return x


class Mixed(nn.Module):
    """x (batch, 6) -> (batch, 6): blocks in bf16 between layers in fp32, each block with a norm in
    fp32.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 10), nn.Linear(10, 6)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"linear": nn.Linear(10, 10).bfloat16(), "norm": nn.LayerNorm(10)})
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block["linear"](block["norm"](x).bfloat16()).float()
        return self.leave(x)


class ScaleAndShift(nn.Module):
    def __init__(self, numel: int, seed: int) -> None:
        super().__init__()
        self.scale, self.shift = (
            nn.Parameter(sixteenths(seed, numel)),
            nn.Parameter(sixteenths(seed + 1, numel)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + x * self.scale + self.shift


class Elementwise(nn.Module):
    """x (n,) -> (n,), element by element: every operation rounds once and nothing is summed, so
    bits are those of any processor.
    """

    def __init__(self, numel: int = 301) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScaleAndShift(numel, 10 * i) for i in range(4))
        self.offset = nn.Parameter(sixteenths(99, numel))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.offset


class LanguageModel(nn.Module):
    """As transformers' models are called: input_ids and labels -> an object with a loss. For plans
    that trace and simulate it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyGPT(vocabulary=512, width=128, heads=4, depth=4, length=64)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, **_: Any
    ) -> dict[str, Tensor]:
        scores = self.inner.logits(input_ids)
        return {
            "loss": F.cross_entropy(
                scores.float().flatten(0, 1), (input_ids if labels is None else labels).flatten()
            )
        }


def sixteenths(seed: int, numel: int) -> Tensor:
    """Random multiples of 1/16 from -1/2 to 1/2."""
    return torch.randint(-8, 9, (numel,), generator=torch.Generator().manual_seed(seed)) / 16


def _square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).float().square().mean()


def _call(model: nn.Module, batch: Any) -> Tensor:
    return model(batch)


def _elementwise(model: nn.Module, batch: Any) -> Tensor:
    """Half the sum of squares, to what its gradient is concerned; `backward` of it sums nothing."""
    out = model(batch)
    return out * out.detach() / 16


@dataclass(frozen=True)
class Subject:
    """Attributes:
    make: the model. batch: of a number. loss: of a model and a batch; a vector is summed, and
        recorded element by element.
    portable: the bits are those of any processor.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    portable: bool = False


def gpt(batch: int = 2, **options: Any) -> Subject:
    length, vocabulary = options.get("length", 12), options.get("vocabulary", 61)
    return Subject(
        lambda: TinyGPT(**options), lambda seed: tokens_of(seed, batch, length, vocabulary), _call
    )


SUBJECTS: dict[str, Subject] = {
    "gpt": gpt(),
    "tied gpt": gpt(tied=True),
    "wide gpt": gpt(width=68, depth=2, vocabulary=101),
    # Units large enough to be gathered one ahead
    "big gpt": gpt(batch=1, width=128, depth=4, length=8),
    "big gpt, recomputed": gpt(
        batch=1, width=128, depth=4, length=8, checkpointing="non-reentrant"
    ),
    "recomputed gpt": gpt(checkpointing="non-reentrant"),
    "gpt recomputed in another way": gpt(checkpointing="reentrant"),
    "gpt with dropout": gpt(dropout=0.1),
    "long gpt": gpt(batch=32, width=64, depth=2, length=128),
    "long gpt, recomputed": gpt(
        batch=32, width=64, depth=2, length=128, checkpointing="non-reentrant"
    ),
    "adapted gpt": Subject(Adapted, tokens_of, _call),
    "wide adapted gpt": Subject(lambda: Adapted(64), tokens_of, _call),
    "mlp": Subject(TinyMLP, lambda seed: features_of(seed, 4, 7), _square),
    "odd": Subject(Odd, lambda seed: features_of(seed, 4, 5), _square),
    "conv": Subject(Conv, lambda seed: features_of(seed, 4, 3, 6, 6), _square),
    "skipping": Subject(Skipping, lambda seed: features_of(seed, 4, 6), _square),
    "mixed": Subject(Mixed, lambda seed: features_of(seed, 4, 6), _square),
    "elementwise": Subject(
        Elementwise, lambda seed: sixteenths(1000 + seed, 301), _elementwise, portable=True
    ),
    "wide elementwise": Subject(
        lambda: Elementwise(5003),
        lambda seed: sixteenths(1000 + seed, 5003),
        _elementwise,
        portable=True,
    ),
}


def half_frozen() -> nn.Module:
    made = TinyGPT()
    made.blocks[0].requires_grad_(False)
    made.blocks[2].mlp.requires_grad_(False)
    return made


SUBJECTS["half-frozen gpt"] = Subject(half_frozen, tokens_of, _call)
