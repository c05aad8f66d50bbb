"""The dtypes that options name, and the formats in which Adam's moments may be stored: names, sizes, and
how they are packed.

    elements of a parameter   |0 ........... 255|256 ......... 511|512 ..... 599|        blocks are counted from its beginning
    codes, int8               |one byte each                                    |
    codes, int4               |one byte for two                                 |
    scales                    |      s0         |       s1        |     s2      |        fp32, one a block (int4: of 128)

| format | bytes of a moment of n elements | optimizer state                            |
|--------|---------------------------------|--------------------------------------------|
| fp32   | 4n                              | exp_avg                                    |
| bf16   | 2n                              | exp_avg                                    |
| int8   | n + 4⌈n/256⌉                    | exp_avg.int8, exp_avg.int8.scale           |
| int4   | ⌈n/2⌉ + 4⌈n/128⌉                | exp_avg.int4, exp_avg.int4.scale           |

A parameter of fewer than `SMALLEST` elements keeps fp32 moments where others have packed ones
(Dettmers et al. 2022, section 2). The size of the whole parameter decides, not that of a rank's
part. Pure arithmetic, no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

#: What a model may compute in.
COMPUTE_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
#: What weights, gradients and sums may be.
DTYPES: Mapping[Any, torch.dtype] = {"fp64": torch.float64, **COMPUTE_DTYPES}
#: Length, in elements, of blocks that ranks must not divide if moments are packed. It is
#: a multiple of every format's block.
BLOCK = 256
#: The least number of elements of a parameter whose moments are packed.
SMALLEST = 4096
#: Adam's element-wise states, and whether they have a sign.
SIGNED: Mapping[str, bool] = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}


class Packed(NamedTuple):
    """A part of a stored moment: the moment's key, the elements that one item stands for, and its dtype."""

    key: str
    grain: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Format:
    """The format of one stored moment.

    Attributes:
        name: as in `Recipe.moments`.
        dtype: the dtype of the stored values or codes.
        grain: elements in one stored item: 2 for int4, else 1.
        block: elements that share a scale; 0 if there are no scales.
    """

    name: str
    dtype: torch.dtype
    grain: int = 1
    block: int = 0

    @property
    def packed(self) -> bool:
        return self.block > 0

    def nbytes(self, numel: int) -> int:
        """Return the bytes of one moment of `numel` elements that begin with a block."""
        parts = self.parts("").values()
        return sum(-(-numel // part.grain) * part.dtype.itemsize for part in parts)

    @property
    def each(self) -> float:
        """Bytes of a moment of one element of a large parameter, on average."""
        return self.nbytes(1 << 20) / (1 << 20)

    def parts(self, key: str) -> dict[str, Packed]:
        """Return the parts of moment `key`, by their keys in an optimizer's state."""
        if not self.packed:
            return {key: Packed(key, 1, self.dtype)}
        codes, scales = (self.grain, self.dtype), (self.block, torch.float32)
        name = f"{key}.{self.name}"
        return {name: Packed(key, *codes), f"{name}.scale": Packed(key, *scales)}

    def of(self, numel: int) -> Format:
        """Return this format, or fp32 for a whole parameter too small to be packed."""
        return FORMATS["fp32"] if self.packed and numel < SMALLEST else self


FORMATS: Mapping[str, Format] = {
    "fp32": Format("fp32", torch.float32),
    "bf16": Format("bf16", torch.bfloat16),
    "int8": Format("int8", torch.uint8, 1, 256),
    "int4": Format("int4", torch.uint8, 2, 128),
}


_PACKED: Mapping[object, Packed] = {
    name: part
    for key in SIGNED
    for format in FORMATS.values()
    if format.packed
    for name, part in format.parts(key).items()
}


def packed(key: object) -> Packed | None:
    """Return what a key such as "exp_avg.int8.scale" says; None for any other."""
    return _PACKED.get(key)


def moment_of(key: Any) -> Any:
    """Return the key of the moment that a state is a part of; `key` itself for any other."""
    return _PACKED[key].key if key in _PACKED else key


def grain_of(key: object) -> int:
    """Return the elements of one item of the state `key`: 1 but for int4 and scales."""
    return _PACKED[key].grain if key in _PACKED else 1


def items_of(start: int, stop: int, grain: int) -> tuple[int, int]:
    """Return the range of items whose first element is in [start, stop)."""
    return -(-start // grain), -(-stop // grain)
