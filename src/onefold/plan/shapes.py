"""What a plan knows of a model: its parameters by unit, and a transformer's dimensions where it is
one. No tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod


@dataclass(frozen=True)
class Parameter:
    """One parameter: its name, logical shape and the dtype it comes in ("float32"); `trainable` is
    its requires_grad.

    `looked_up`: an embedding's, the head's too if they are tied. It never rests encoded.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    dtype: str = "float32"
    looked_up: bool = False

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class UnitShape:
    """One unit: what is gathered and reduced together. The root comes first and is named "(root)".

    `looks_up_only`: its backward pass reads no parameter (an embedding of its own), so it is
    gathered once a step.
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
    """Dimensions of a decoder, for FLOPs and for activation formulas where there is no code to
    trace.

    `kv_heads` differ from `heads` under grouped-query attention (0: they do not); `experts` is 1 for a dense model,
    of which `active` see each token;
    `gated`: three matrices in the feed-forward (SwiGLU) instead of two; `attention_scores` are kept
    (no fused attention).
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    experts: int = 1
    active: int = 1
    tied: bool = True
    fused_attention: bool = True

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def q(self) -> int:
        """Width of the queries of a token."""
        return self.heads * self.head

    @property
    def k(self) -> int:
        """Width of the keys, and of the values, of a token."""
        return (self.kv_heads or self.heads) * self.head


@dataclass(frozen=True)
class ModelShape:
    """A model as a plan sees it. `active_numel` are the parameters that one token passes through
    (all, but for experts).
    """

    name: str
    units: tuple[UnitShape, ...]
    transformer: Transformer | None = None
    active_numel: int = 0

    def __post_init__(self) -> None:
        if not self.active_numel:
            object.__setattr__(self, "active_numel", self.numel)

    @cached_property
    def numel(self) -> int:
        return sum(u.numel for u in self.units)

    @cached_property
    def trainable(self) -> int:
        return sum(u.trainable for u in self.units)

    @classmethod
    def of_size(cls, numel: int, name: str = "") -> ModelShape:
        """A model of which only the size is known: equal square blocks, as many as models of that
        size have.

        Depth follows Kaplan et al. 2020's observation that shape matters little; width from numel =
        12·L·h², L ≈ h/128.
        """
        if numel < 1:
            raise ValueError(
                f"a model of {numel} parameters: expected a positive number, such as 7.5e9."
            )
        depth = max(1, round((numel / (12 * 128 * 128)) ** (1 / 3)))
        depth = min(depth, numel)
        each, rest = divmod(numel, depth)
        units = [UnitShape("(root)", (Parameter("rest", (rest,)),) if rest else ())]
        units += [
            UnitShape(f"blocks.{i}", (Parameter(f"blocks.{i}.weight", (each,)),))
            for i in range(depth)
        ]
        return cls(name or f"{numel:,} parameters", tuple(units))
