"""The formats that Adam's moments may rest in: names, sizes, and where the parts of a packed moment
lie.

    elements of a parameter   |0 ........... 255|256 ......... 511|512 ..... 599|        blocks are counted from its beginning
    codes, int8 and fp8       |one byte each                                    |
    codes, int4               |one byte for two                                 |
    scales                    |      s0         |       s1        |     s2      |        fp32, one a block (int4: of 128)

| format | bytes of a moment of n elements | optimizer state                            |
|--------|---------------------------------|--------------------------------------------|
| fp32   | 4n                              | exp_avg                                    |
| bf16   | 2n                              | exp_avg                                    |
| int8   | n + 4⌈n/256⌉                    | exp_avg.int8, exp_avg.int8.scale           |
| fp8    | n + 4⌈n/256⌉                    | exp_avg.fp8, exp_avg.fp8.scale             |
| int4   | ⌈n/2⌉ + 4⌈n/128⌉                | exp_avg.int4, exp_avg.int4.scale           |

A parameter of fewer than `SMALLEST` elements keeps fp32 moments where the others have packed ones
(Dettmers et al. 2022, section 2), by
the size of the whole parameter: what a rank holds of it, or a tile, decides nothing. Pure
arithmetic, no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

#: Elements that no rank and no tile shares with another where moments are packed; the blocks of
#: every format divide it.
BLOCK = 256
#: Elements from which a parameter's moments are packed.
SMALLEST = 4096
#: Adam's element-wise states, and whether they have a sign.
SIGNED: Mapping[str, bool] = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}


@dataclass(frozen=True)
class Format:
    """How one moment rests.

    Attributes:
        name: as in `Recipe.moments`.
        dtype: of what it rests as: the values, or the codes.
        grain: elements that one code stands for.
        block: elements that share a scale; 0 where there are none.
    """

    name: str
    dtype: torch.dtype
    grain: int = 1
    block: int = 0

    @property
    def packed(self) -> bool:
        return self.block > 0

    def nbytes(self, numel: int) -> int:
        """Bytes of one moment of `numel` elements that begin with a block."""
        scales = -(-numel // self.block) * torch.float32.itemsize if self.block else 0
        return -(-numel // self.grain) * self.dtype.itemsize + scales

    def keys(self, key: str) -> tuple[str, ...]:
        """What the parts of the moment `key` are called in an optimizer's state."""
        return (f"{key}.{self.name}", f"{key}.{self.name}.scale") if self.packed else (key,)

    def of(self, numel: int) -> Format:
        """The format of a whole parameter of `numel` elements: this one, or fp32 where that is too
        small to be packed.
        """
        return FORMATS["fp32"] if self.packed and numel < SMALLEST else self


FORMATS: Mapping[str, Format] = {
    "fp32": Format("fp32", torch.float32),
    "bf16": Format("bf16", torch.bfloat16),
    "int8": Format("int8", torch.uint8, 1, 256),
    "fp8": Format("fp8", torch.float8_e4m3fn, 1, 256),
    "int4": Format("int4", torch.uint8, 2, 128),
}


@dataclass(frozen=True)
class Packed:
    """A part of a packed moment: of which one, in which format, and whether it is the scales."""

    key: str
    format: Format
    scale: bool

    @property
    def grain(self) -> int:
        """Elements that one item of it stands for."""
        return self.format.block if self.scale else self.format.grain

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.scale else self.format.dtype


def packed(key: object) -> Packed | None:
    """What a key of an optimizer's state, such as "exp_avg.int8.scale", is a part of; None if it is
    an ordinary one.
    """
    if not isinstance(key, str):
        return None
    name, _, rest = key.partition(".")
    kind, _, tail = rest.partition(".")
    if (
        name not in SIGNED
        or kind not in FORMATS
        or not FORMATS[kind].packed
        or tail not in ("", "scale")
    ):
        return None
    return Packed(name, FORMATS[kind], tail == "scale")


def grain_of(key: object) -> int:
    """Elements that one item of the state `key` stands for: 1 but for int4 codes and scales."""
    part = packed(key)
    return part.grain if part is not None else 1


def items_of(start: int, stop: int, grain: int) -> tuple[int, int]:
    """The items whose first element is one of [start, stop)."""
    return -(-start // grain), -(-stop // grain)


def bytes_of_moments(
    numel: int, format: str | None, *, whole: int | None = None, moments: int = 2
) -> int:
    """Bytes at rest of Adam's `moments` moments of `numel` elements of one parameter that begin
    with a block.

    Args:
        format: as in `Recipe.moments`; None is fp32.
        whole: elements of the whole parameter, where `numel` is a rank's part of it; None: it is
            all.

    Raises:
        ValueError: there is no such format.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"moments={format!r}: expected one of {', '.join(FORMATS)}.")
    kept = FORMATS[format or "fp32"].of(numel if whole is None else whole)
    return moments * kept.nbytes(numel)


def bytes_an_element(format: str | None, moments: int = 2) -> float:
    """The same of one element of a large parameter, on average."""
    return bytes_of_moments(1 << 20, format, moments=moments) / (1 << 20)
