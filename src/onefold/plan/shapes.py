"""Models as a plan sees them: parameters by unit, and a transformer's dimensions. No tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from onefold.layout import Dtypes
from onefold.recipe import Recipe

#: The names of units that are tiles of a weight.
TILE = re.compile(r"\.tiles\.\d+$")


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        dtype: in which it comes.
        trainable: its requires_grad.
        looked_up: it is an embedding's weight, possibly tied to the head. It is never stored
            encoded.
        keeps_dtype: it computes in its own dtype under any precision (runtime/units.py).
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    dtype: torch.dtype = torch.float32
    looked_up: bool = False
    keeps_dtype: bool = False

    def dtypes(self, recipe: Recipe) -> Dtypes:
        return Dtypes.of(self.dtype, self.trainable, recipe, self.keeps_dtype)

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def routed(self) -> bool:
        """Whether it belongs to experts of which a token sees only some."""
        return re.search(r"(^|\.)experts\.", self.name) is not None


@dataclass(frozen=True)
class UnitShape:
    """One unit: the parameters that are gathered and reduced together. The root comes first and is
    named "(root)".

    `looks_up_only`: its backward pass reads no parameter (an embedding that is a unit), so it is
    gathered once a micro-batch.
    """

    name: str
    parameters: tuple[Parameter, ...]
    looks_up_only: bool = False

    @cached_property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @cached_property
    def trainable(self) -> int:
        """Elements that an optimizer steps."""
        return sum(p.numel for p in self.parameters if p.trainable)


@dataclass(frozen=True)
class Transformer:
    """Dimensions of a decoder: for FLOPs, and for what other axes than data divide.

    Attributes:
        kv_heads: heads of keys and values under grouped-query attention; 0: as many as `heads`.
        experts: 1 for a dense model; `active` of them see each token.
        value_dim: width of one head's values, if not that of its queries.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    experts: int = 1
    active: int = 1
    tied: bool = True
    value_dim: int = 0

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def q(self) -> int:
        """Width of a token's queries."""
        return self.heads * self.head

    @property
    def k(self) -> int:
        """Width of a token's keys."""
        return (self.kv_heads or self.heads) * self.head

    @property
    def v(self) -> int:
        """Width of a token's values."""
        return (self.kv_heads or self.heads) * (self.value_dim or self.head)


@dataclass(frozen=True)
class ModelShape:
    """A model as a plan sees it."""

    name: str
    units: tuple[UnitShape, ...]
    transformer: Transformer | None = None

    @cached_property
    def numel(self) -> int:
        return sum(u.numel for u in self.units)

    @cached_property
    def active_numel(self) -> int:
        """Elements that one token passes."""
        return self.passed(p for u in self.units for p in u.parameters)

    def passed(self, parameters: Iterable[Parameter]) -> int:
        """Return how many elements of these a token passes: all, and of experts the chosen share."""
        dims = self.transformer
        share = dims.active / dims.experts if dims else 1.0
        return round(sum(p.numel * (share if p.routed else 1.0) for p in parameters))

    @cached_property
    def trainable(self) -> int:
        return sum(u.trainable for u in self.units)

    def flops_per_token(self, seq: int) -> float:
        """Return the model FLOPs of a token, forward and backward, in samples of `seq` tokens: 6N +
        12·L·h·s (Chowdhery et al. 2022, PaLM, appendix B), h = heads × head_dim. Attention is counted
        in full, not halved for causality. Without dimensions it is Kaplan et al. 2020's 6N. Frozen
        parameters have no gradients: 4 each instead of 6.
        """
        frozen = (p for u in self.units for p in u.parameters if not p.trainable)
        found = 6 * self.active_numel - 2 * self.passed(frozen)
        dims = self.transformer
        return float(found + (12 * dims.layers * dims.q * seq if dims else 0))

    @cached_property
    def blocks(self) -> tuple[UnitShape, ...]:
        """The repeated units: the largest family whose names differ only in their numbers."""
        families: dict[str, list[UnitShape]] = {}
        for unit in self.units:
            if re.search(r"\d", unit.name) and not TILE.search(unit.name):
                families.setdefault(re.sub(r"\d+", "#", unit.name), []).append(unit)
        largest: list[UnitShape] = max(families.values(), key=len, default=[])
        return tuple(largest)

    @cached_property
    def block_of(self) -> dict[str, str]:
        """The name of the block that each unit is, or is inside; "" if there is none."""
        names = {block.name for block in self.blocks}
        out = {}
        for unit in self.units:
            parts = unit.name.split(".")
            around = (".".join(parts[:n]) for n in range(len(parts) + 1))
            out[unit.name] = next((name for name in around if name in names), "")
        return out

    @classmethod
    def of_size(cls, numel: int, name: str = "") -> ModelShape:
        """Return a model of which only the size is known: equal square blocks, as many as models of
        that size usually have.

        The depth follows from numel = 12·L·h² with L ≈ h/128. Kaplan et al. 2020 observe that the
        ratio of depth to width matters little.
        """
        depth = min(numel, max(1, round((numel / (12 * 128 * 128)) ** (1 / 3))))
        each, rest = divmod(numel, depth)
        units = [UnitShape("(root)", (Parameter("rest", (rest,)),) if rest else ())]
        units += [
            UnitShape(f"blocks.{i}", (Parameter(f"blocks.{i}.weight", (each,)),))
            for i in range(depth)
        ]
        return cls(name or f"{numel:,} parameters", tuple(units))
