"""Kinds of models: what a script builds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from scripts.loop import Net, Script
from scripts.registry import EITHER, ROUNDING, habit


def features(seed: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def images(seed: int) -> Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def series(seed: int) -> Tensor:
    return torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(seed))


def of(title: str, build: Any, batch: Any = features, loss: Any = None, **more: Any) -> None:
    """A habit of a model whose loss is the mean square of its output."""

    class Kind:
        def build(self) -> nn.Module:
            return build()

        def batch(self, seed: int) -> Any:
            return batch(seed)

        def forward(self, s: Script) -> Any:
            return loss(s.model, s.batch) if loss else s.model(s.batch).abs().square().mean()

    Kind.__module__ = __name__
    habit(f"a model: {title}", **{"expect": ROUNDING, **more})(Kind)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tokens.weight


class TiedModule(nn.Module):
    """One block used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([self.block] * 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rnn, self.head = kind(6, 7, num_layers=2, batch_first=True), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class MoE(nn.Module):
    """Experts that a batch may leave unused."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, i, None])
        return out


class Mixed(nn.Module):
    """Scalars, an empty parameter, a list and a dict of parameters, a parameter of four
    dimensions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.none = nn.Parameter(torch.empty(0, 6))
        self.many = nn.ParameterList([nn.Parameter(torch.full((6,), 0.1 * i)) for i in range(3)])
        self.named = nn.ParameterDict(
            {"a": nn.Parameter(torch.ones(6, 6) * 0.1), "b": nn.Parameter(torch.zeros(6))}
        )
        self.deep = nn.Parameter(torch.ones(1, 2, 3, 1) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.named["a"] + self.named["b"] + self.none.sum()
        for p in self.many:
            x = x + p
        return self.scale * x * self.deep.view(6)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.complex(torch.ones(4) * 0.5, torch.ones(4) * 0.1))
        self.leave = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6))


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(10, 10)
        self.blocks.append(nn.Linear(10, 10))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks[:2]:
            x = block(x)
        return self.head(self.norm(x))


class Checkpointed(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU())
            for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = x + stage(x)
        return self.head(x.mean((2, 3)))


class ByHand(nn.Module):
    """Weights that a script made by itself: `torch.einsum`, slices and transposes of parameters in
    forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 6, 6) * 0.2)
        self.b = nn.Parameter(torch.zeros(2, 6))
        self.gains = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(torch.einsum("bi,ij->bj", x, self.w[0]) + self.b[0])
        return (x @ self.w[1].T + self.b[1]) * self.gains.exp()


class WeightStandardized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        w = (self.weight - self.weight.mean(1, keepdim=True)) / (
            self.weight.std(1, keepdim=True) + 1e-5
        )
        return F.linear(x, w, self.bias)


class Lazy(nn.Module):
    """A branch that is first used in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(6, 6), nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        return self.second(x) if self.calls > 1 else x


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) - self.net(x.flip(0))


class DictOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"a": self.a(x), "parts": (self.b(x), [self.a(x).sum()])}


def tokens(seed: int) -> Tensor:
    return torch.randint(17, (2, 7), generator=torch.Generator().manual_seed(seed))


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


of("an embedding tied to the head", Tied, tokens, next_token)
of("one block used three times", TiedModule)
of("an LSTM", lambda: Recurrent(nn.LSTM), series)
of("a GRU", lambda: Recurrent(nn.GRU), series)
of("a convolutional net with group norms", Conv, images)
of(
    "channels_last",
    lambda: Conv().to(memory_format=torch.channels_last),
    lambda seed: images(seed).to(memory_format=torch.channels_last),
)
of(
    "weight_norm (parametrized)",
    lambda: nn.Sequential(*(parametrizations.weight_norm(nn.Linear(6, 6)) for _ in range(2))),
)
of(
    "weight_norm (old)",
    lambda: nn.Sequential(*(nn.utils.weight_norm(nn.Linear(6, 6)) for _ in range(2))),
    sharded=EITHER,
)
of(
    "orthogonal (parametrized)",
    lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.Linear(6, 3)),
    rtol=1e-4,
    atol=1e-5,
)
of(
    "weights standardized in forward",
    lambda: nn.Sequential(WeightStandardized(6, 8), WeightStandardized(8, 4)),
)
of("experts that a batch leaves unused", MoE)
of("scalars, an empty parameter, ParameterList and ParameterDict", Mixed)
of("complex parameters", Complex)
of("parameters that are never used", Unused, tokens, next_token)
of("a branch first used in the second step", Lazy)
of("activation checkpointing", Checkpointed, tokens, next_token)
of("einsum, slices and transposes of parameters", ByHand)
of("a net called twice in one pass (siamese)", Siamese)
of(
    "outputs in dicts and tuples",
    DictOut,
    loss=lambda m, x: (
        (o := m(x))["a"].pow(2).mean() + o["parts"][0].abs().mean() + o["parts"][1][0] * 0.1
    ),
)
of(
    "`nn.TransformerEncoder`",
    lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), 2
    ),
    series,
)
of(
    "`nn.MultiheadAttention`",
    lambda: nn.TransformerDecoderLayer(6, 2, 12, dropout=0.0, batch_first=True),
    series,
    lambda m, x: m(x, x).pow(2).mean(),
)
of("`nn.EmbeddingBag`", lambda: nn.Sequential(nn.EmbeddingBag(17, 6), nn.Linear(6, 3)), tokens)
of(
    "an embedding with `padding_idx`",
    lambda: nn.Sequential(nn.Embedding(17, 6, padding_idx=0), nn.Linear(6, 3)),
    tokens,
)
of(
    "an embedding with `max_norm` (renormalized in forward)",
    lambda: nn.Sequential(nn.Embedding(17, 6, max_norm=1.0), nn.Linear(6, 3)),
    tokens,
    reference="plain",
    sharded=EITHER,
    zero=EITHER,
)
of(
    "`nn.Bilinear` and `nn.PReLU`",
    lambda: nn.Bilinear(6, 6, 3),
    features,
    lambda m, x: m(x, x).pow(2).mean(),
)
of(
    "dropout with the same seed",
    lambda: nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.3), nn.Linear(20, 3)),
)
of(
    "a lazy layer made real before shard()",
    lambda: (
        m := nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3)),
        m(torch.ones(1, 6)),
    )[0],
)
of("no bias anywhere, one layer", lambda: nn.Linear(6, 3, bias=False))
of(
    "a module in a plain list, registered by hand",
    lambda: (
        m := nn.Module(),
        m.add_module("a", nn.Linear(6, 6)),
        m.register_module("b", nn.Linear(6, 3)),
        setattr(m, "forward", lambda x: m.b(torch.tanh(m.a(x)))),
        m,
    )[-1],
)  # type: ignore[operator]
