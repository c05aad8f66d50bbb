"""Floats of 8 bits: e4m3 (4 bits of exponent, 3 of fraction, no infinity), with a scale per block.

The largest error of an element is 1/16 of itself, or 2**-10 of its block's scale if that is more.
Compared with int8, small elements of a block are more precise and large ones less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from onefold.quant.blockwise import Blockwise
from onefold.quant.numbers import SMALLEST_STEP


@cache
def numbers_of_bytes() -> torch.Tensor:
    """Return the number of each byte value, as fp32."""
    return torch.arange(256, device="cpu").to(torch.uint8).view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class Fp8(Blockwise):
    """One byte per element, e4m3; a block's largest magnitude becomes 448. 8.06 bits per element
    with scales: 256 elements per block.
    """

    name: ClassVar[str] = "fp8"
    top: ClassVar[float] = 448.0

    def numbers(self) -> torch.Tensor:
        return numbers_of_bytes().nan_to_num()

    def _pack(self, numbers: torch.Tensor, payload: torch.Tensor) -> None:
        payload.view(torch.float8_e4m3fn).copy_(numbers)

    def _unpack(self, payload: torch.Tensor, numbers: torch.Tensor) -> None:
        # On the CPU torch's conversion takes six times as long as a look-up
        if payload.device.type == "cpu":
            torch.index_select(
                numbers_of_bytes(), 0, payload.view(-1).to(torch.int32), out=numbers.view(-1)
            )
        else:
            numbers.copy_(payload.view(torch.float8_e4m3fn))

    def _off(self, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return torch.maximum(sizes / 8, scales * SMALLEST_STEP) * 0.5
