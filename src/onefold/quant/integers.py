"""Signed integers of 8 and 4 bits: a block's step is its largest magnitude divided by 127 or 7.

The largest error of a number is half a step. -128 and -8 are not used: with a symmetric range,
rounding stays unbiased under a change of sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from onefold.quant.blockwise import Blockwise
from onefold.quant.numbers import MAGIC


@dataclass(frozen=True)
class _Integers(Blockwise):
    def _off(self, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return scales * 0.5


@dataclass(frozen=True)
class Int8(_Integers):
    """One byte per element, two's complement. 8.06 bits per element with scales: 256 elements per
    block.
    """

    name: ClassVar[str] = "int8"
    top: ClassVar[float] = 127.0

    def _pack(self, numbers: torch.Tensor, payload: torch.Tensor) -> None:
        payload.view(torch.int8).copy_(numbers.add_(MAGIC).view(torch.int32))

    def _unpack(self, payload: torch.Tensor, numbers: torch.Tensor) -> None:
        numbers.copy_(payload.view(torch.int8))


@dataclass(frozen=True)
class Int4(_Integers):
    """Half a byte per element: the number plus 8. 4.25 bits per element with scales: 64 elements
    per block.

    A row is split into two halves. Byte i holds element i of the first half in the low bits and
    element i of the second half in the high bits, so each half is one contiguous piece. A zero
    follows the last element of a block of odd length.
    """

    name: ClassVar[str] = "int4"
    top: ClassVar[float] = 7.0
    packed: ClassVar[tuple[int, int]] = (2, 1)

    block: int = 64

    def _pack(self, numbers: torch.Tensor, payload: torch.Tensor) -> None:
        low, high = numbers.round_().chunk(2, dim=1)
        payload.copy_(torch.add(low, high, alpha=16.0).add_(8.0 + 16.0 * 8.0))

    def _unpack(self, payload: torch.Tensor, numbers: torch.Tensor) -> None:
        low, high = numbers.chunk(2, dim=1)
        low.copy_((payload & 15).sub_(8).view(torch.int8))
        high.copy_((payload >> 4).sub_(8).view(torch.int8))
