"""Kinds of models: what a script builds."""

# ruff: noqa: E501 (a row of the tables is one line)

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from scripts.registry import BITS, EITHER, ROUNDING, habit
from zoo import Block, ResidualBlock, TinyGPT, TinyMLP, features_of, tokens_of


def x4(seed: int) -> Tensor:
    return features_of(seed, 4, 7)


def images(seed: int) -> Tensor:
    return features_of(seed, 2, 3, 6, 6)


def series(seed: int) -> Tensor:
    return features_of(seed, 3, 6, 7)


def words(seed: int) -> Tensor:
    return tokens_of(seed, 2, 7, 17)


def with_rank(seed: int) -> Tensor:
    """The first feature is 3 on rank 0 and -3 on others, the second is the step."""
    x = x4(seed)
    x[:, 0], x[:, 1] = (3.0 if seed % 10 == 0 else -3.0), seed // 10 % 100
    return x


def number(out: Tensor) -> Tensor:
    """A model's output as a loss."""
    return out if out.dim() == 0 else out.abs().square().mean()


def of(
    title: str, build: Any, batch: Any = x4, loss: Any = None, places: Any = None, **more: Any
) -> None:
    """A habit of a model. `loss(model, batch)` is the mean square of its output if not given.
    `places`: further methods of the habit.
    """
    methods = {
        "build": lambda self: build(),
        "batch": lambda self, seed: batch(seed),
        "forward": lambda self, s: loss(s.model, s.batch) if loss else number(s.model(s.batch)),
        "__module__": __name__,
    }
    kind = type("Kind", (), methods | (places or {}))
    habit(f"a model: {title}", **{"expect": ROUNDING, "alike": True, **more})(kind)


def stack(layer: Any, count: int = 2) -> Any:
    return lambda: nn.Sequential(*(layer() for _ in range(count)))


def adamw(self: Any, s: Any) -> torch.optim.Optimizer:
    trained = [p for p in s.model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01, eps=1e-4, weight_decay=0.5)


gpt = partial(of, batch=tokens_of)


# -- shared, tied, borrowed ------------------------------------------------------------------------


class Shared(nn.Module):
    """One block object at two places of the list, and another a second time under another name."""

    def __init__(self) -> None:
        super().__init__()
        a, b = ResidualBlock(7), ResidualBlock(7)
        self.blocks, self.alias = nn.ModuleList([a, b, a]), b

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.alias(x)


class Viewed(nn.Module):
    """Weights used through a transpose, an index, an einsum, a chunk and a view: each may be saved
    for backward as an alias.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7) / 3)
        self.table = nn.Parameter(torch.randn(5, 7) / 3)
        self.fused = nn.Parameter(torch.randn(3, 7, 7) / 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.fused.chunk(3)
        x = x @ self.weight.t() + self.table[torch.tensor([0, 2, 4, 2])]
        x = torch.einsum("bi,oi->bo", torch.tanh(x), q.squeeze(0)) * (x @ k.view(7, 7))
        return x + F.linear(x, v[0].T.contiguous().T) + self.table[1] * self.weight.diagonal()


class Nested(nn.Module):
    """A unit inside a unit, the outer one using its own weights before, between and after."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(7, 7), ResidualBlock(7), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(torch.tanh(self.before(x)))
        return self.inner(self.after(x)) + x @ self.before.weight


gpt("blocks and a loss", TinyGPT)
gpt("an embedding tied to the head", lambda: TinyGPT(tied=True))
gpt("tied, in two units", lambda: TinyGPT(tied=True), units=(Block, "tokens", "head"))
of("one block at several places", Shared)
of("views of parameters", stack(Viewed, 3))
of("a unit inside a unit", stack(Nested), units=(Nested, ResidualBlock))

# -- shapes and dtypes -----------------------------------------------------------------------------


class OddShapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.one, self.odd = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(3, 7))
        self.prime, self.empty = nn.Parameter(torch.randn(7, 1, 1)), nn.Parameter(torch.zeros(0, 7))
        self.wide = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.listed = nn.ParameterList([torch.randn(7, 7) / 3, torch.randn(7) / 3])
        self.named = nn.ParameterDict({"a": torch.randn(7, 7) / 3, "b": torch.randn(3) / 3})

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, *self.listed) + torch.tanh(x @ self.named["a"]) * self.named["b"].sum()
        x = x * self.scale + self.one + torch.tanh(x @ self.odd.t()) @ self.odd
        x = x + self.prime.flatten()
        return (x.double() * self.wide).float() + self.empty.sum()


of("parameters of odd shapes, of none and of one element, and in float64", stack(OddShapes))  # fmt: skip
of("float64", lambda: TinyMLP().double(), lambda s: x4(s).double())

# -- what is used, and what is not -----------------------------------------------------------------


class NeverUsed(TinyMLP):
    def __init__(self) -> None:
        super().__init__()
        self.idle, self.idle_block = nn.Parameter(torch.ones(5)), ResidualBlock(10)


class Branches(TinyMLP):
    """Block 1 on rank 0 in even steps, block 2 on others."""

    def forward(self, x: Tensor) -> Tensor:
        first, step = x[0, 0] > 0, int(x[0, 1])
        x = self.blocks[0](torch.tanh(self.enter(x)))
        if first and step % 2 == 0:
            x = self.blocks[1](x)
        elif not first:
            x = self.blocks[2](x)
        return self.leave(x)


class OneOfTwo(nn.Module):
    """Inside one unit: a parameter has a gradient on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.left(x) if x[0, 0] > 0 else self.right(x))


class Experts(nn.Module):
    """An expert may get no token on this rank, or on any."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(7, 5)
        self.experts = nn.ModuleList(ResidualBlock(7) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.router(x), -1)
        best, y = weights.argmax(-1), torch.zeros_like(x)
        for index in best.unique().tolist():
            chosen = best == index
            part = weights[chosen, index, None] * self.experts[index](x[chosen])
            y = y.index_put((chosen,), part)
        return x + y


def frozen_in_part() -> nn.Module:
    model: Any = TinyGPT()
    for part in (model.tokens, model.blocks[1], model.norm):
        part.requires_grad_(False)
    model.blocks[2].attention.out.bias.requires_grad_(False)
    return model


of("a parameter and a block that nobody uses", NeverUsed, places={"optimizer": adamw})
of("a branch that one rank takes", Branches, with_rank)
of("a weight that one rank uses", stack(OneOfTwo), with_rank)
of("experts", stack(Experts), units=(Experts,))
of("experts that are units", stack(Experts), units=(ResidualBlock,))
gpt("frozen parts, weight decay", frozen_in_part, places={"optimizer": adamw})

# -- inputs and outputs ----------------------------------------------------------------------------


@dataclass
class Named:
    hidden: Tensor
    note: str = "a string among tensors"
    nothing: None = None


class GivesTuple(ResidualBlock):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, (None, 3, [y * 2])


class GivesDict(ResidualBlock):
    def forward(self, inputs: Any) -> Any:
        x, (_, three, (double,)) = inputs
        return {"y": super().forward(x) + double / three, "none": None, "flag": True}


class GivesData(ResidualBlock):
    def forward(self, inputs: Any) -> Any:  # type: ignore[override]
        return Named(super().forward(inputs["y"]))


class GivesNothing(ResidualBlock):
    """It leaves its result in a list that it was given."""

    def forward(self, named: Any, box: Any = None) -> Any:  # type: ignore[override]
        box.append(super().forward(named.hidden))


class OddOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kinds = (GivesTuple, GivesDict, GivesData, GivesNothing)
        self.layers = nn.ModuleList(kind(7) for kind in kinds)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers[:3]:
            x = layer(x)
        box: list[Tensor] = []
        self.layers[3](x, box=box)
        return {"logits": box[0], "hidden": x, "nothing": None}


of("outputs of any type", OddOutputs, loss=lambda m, x: number((o := m(x))["logits"]) + o["hidden"].hidden.abs().mean(),
   units=tuple(f"layers.{i}" for i in range(4)), reference="mean")  # fmt: skip

# -- layers of torch -------------------------------------------------------------------------------


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 3)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU())
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = x + stage(x)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """Weights that a flat list inside the module aliases, over two calls with carried state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.gru, self.leave = nn.GRU(12, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.lstm(x[:, :3])
        z, _ = self.lstm(x[:, 3:], state)
        return self.leave(self.gru(torch.cat([y, z], 1))[0])


of("LSTM and GRU", Recurrent, series, units=("lstm", "gru"))
of("channels_last", lambda: Conv().to(memory_format=torch.channels_last), lambda s: images(s).to(memory_format=torch.channels_last))  # fmt: skip
of("weight_norm (parametrized)", stack(lambda: parametrizations.weight_norm(nn.Linear(7, 7))))
of("weight_norm (old)", stack(lambda: nn.utils.weight_norm(nn.Linear(7, 7))), sharded=EITHER)
of("`nn.MultiheadAttention`", lambda: nn.TransformerDecoderLayer(7, 1, 12, 0.0, batch_first=True), series, lambda m, x: number(m(x, x)))  # fmt: skip
of("`nn.EmbeddingBag`", lambda: nn.Sequential(nn.EmbeddingBag(17, 6), nn.Linear(6, 3)), words)
of("an embedding with `padding_idx`", lambda: nn.Sequential(nn.Embedding(17, 6, padding_idx=0), nn.Linear(6, 3)), words)  # fmt: skip
of("an embedding with `max_norm` (renormalized in forward)", lambda: nn.Sequential(nn.Embedding(17, 6, max_norm=1.0), nn.Linear(6, 3)), words, reference="plain", sharded=EITHER, zero=EITHER)  # fmt: skip
gpt("dropout", lambda: TinyGPT(dropout=0.5), steps=4)
of("a lazy layer made real before shard()", lambda: (m := nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3)), m(torch.ones(1, 7)))[0])  # fmt: skip

# -- recomputation ---------------------------------------------------------------------------------


class RecomputesParts(ResidualBlock):
    """A checkpoint covers a part of a unit, twice."""

    def forward(self, x: Tensor) -> Tensor:
        for f in (torch.tanh, torch.sin):
            x = x + checkpoint(lambda t, f=f: self.down(f(self.up(t))), x, use_reentrant=False)
        return x


class RecomputesPairs(nn.Module):
    """A checkpoint spans two units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RecomputesParts(7) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 2):
            x = checkpoint(nn.Sequential(*self.layers[i : i + 2]), x, use_reentrant=False)
        return x


class RecomputedWhole(nn.Module):
    """The outer backward pass does not know that any parameter will get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyMLP()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)


class LowRank(nn.Module):
    """An adapter whose gradients come before the layer's backward pass reads the frozen weight. It
    casts its input to what its weight is in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 7).requires_grad_(False)
        self.down, self.up = nn.Linear(7, 2, bias=False), nn.Linear(2, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.base(x)
        return kept + self.up(self.down(x.to(self.down.weight.dtype))).to(kept.dtype)


class Adapters(nn.Module):
    """Four blocks, the third without an adapter, recomputed two by two; or each `inside` its own
    forward pass, as transformers has it, where hooks do not see it.
    """

    def __init__(self, reentrant: bool, inside: bool) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(7, 7).requires_grad_(False) for _ in range(2))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 7), nn.Linear(7, 7), nn.Tanh()).requires_grad_(False)
            for i in range(4)
        )  # fmt: skip
        for i in (0, 1, 3):
            self.blocks[i][1] = LowRank()
        self.reentrant, self.inside = reentrant, inside
        for block in self.blocks if inside else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).detach().requires_grad_(True)
        for i in (0, 2):
            two = nn.Sequential(*self.blocks[i : i + 2])
            x = two(x) if self.inside else checkpoint(two, x, use_reentrant=self.reentrant)
        return self.last(x)


def in_bf16(model: Any) -> nn.Module:
    model.bfloat16()
    for part in (m for m in model.modules() if isinstance(m, LowRank)):
        part.down.float()
        part.up.float()
    return model


gpt("recomputed, re-entrant", lambda: TinyGPT(checkpointing="reentrant", dropout=0.2), reference="mean")  # fmt: skip
gpt("recomputed", lambda: TinyGPT(checkpointing="non-reentrant", dropout=0.2))
of("recomputed in parts and in pairs", RecomputesPairs)
of("all in one re-entrant checkpoint", RecomputedWhole, reference="mean")
for _inside, _where in ((True, "inside each block"), (False, "two blocks together")):
    for _kind in (False, True):
        _make = partial(Adapters, _kind, _inside)
        _title = f"adapters, recomputed {_where}{', re-entrant' if _kind else ''}"
        of(_title, _make, reference="mean")
        of(f"{_title}, in bf16", lambda make=_make: in_bf16(make()), lambda s: x4(s).bfloat16(), lambda m, x: number(m(x).float()),
           reference="mean", options={"precision": "bf16"}, one=ROUNDING, rtol=3e-2, atol=3e-3, slow=_kind)  # fmt: skip

# -- autocast --------------------------------------------------------------------------------------


class CastViews(nn.Module):
    """Weights that are cast as views of a parameter, and a product that saves the cast itself."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(0.1 * torch.randn(3, 48, 24))
        self.fused = nn.Parameter(0.1 * torch.randn(26, 48))

    def forward(self, x: Tensor) -> Tensor:
        wide = sum(F.linear(x, self.experts[e]) for e in range(2)) + x @ self.experts[2].t()
        wide = wide + F.linear(x, self.experts.unbind()[2])
        return x + F.linear(torch.tanh(wide), self.fused.split([24, 2])[0])


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.image = nn.Linear(7, 24), nn.Conv1d(4, 24, 5, padding=2)
        self.blocks = nn.ModuleList(CastViews() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.image(x.expand(4, 4, *x.shape[-1:])).float()


def under_autocast(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch)
    return number(out)


AUTOCAST: dict[str, Any] = {"loss": under_autocast, "expect": BITS, "one": ROUNDING}
gpt("autocast", TinyGPT, **AUTOCAST)
gpt("autocast, tied", lambda: TinyGPT(tied=True), **AUTOCAST)
gpt("autocast, recomputed, re-entrant", lambda: TinyGPT(checkpointing="reentrant"), ddp={"static_graph": True, "find_unused_parameters": False}, **AUTOCAST)  # fmt: skip
of("autocast of views", Mixture, units=(CastViews,), **AUTOCAST)

# -- compiled --------------------------------------------------------------------------------------


def compiled(way: str) -> nn.Module:
    model: Any = TinyGPT(depth=2)
    for index, block in enumerate(model.blocks):
        if way == "in place":
            block.compile()
        else:  # the block is wrapped in a new module; the names in the state dict follow it
            model.blocks[index] = torch.compile(block)
    return model


for _way in ("in place", "replaced"):
    gpt(f"blocks compiled, {_way}", partial(compiled, _way), rtol=1e-4, atol=1e-5, slow=True, alike=False)  # fmt: skip
