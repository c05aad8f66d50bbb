"""Four bits for weights: 16 levels that lie as a normal distribution does (NormalFloat: Dettmers et al., QLoRA, 2023, appendix E).

A level is off by at most half the gap between its neighbours, 0.152 of the scale at the ends and 0.04 in the middle. Of normally
distributed weights that loses 15 % less than int4 at the same bits; of others it may lose more. It rounds to the nearest only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import ClassVar

import torch

from onefold.comm.codecs.blockwise import Blockwise


@cache
def levels() -> tuple[float, ...]:
    """The 16 levels from -1 to 1, rounded to fp32.

    Quantiles of the normal distribution at equal steps of probability from the middle to 1 - delta, 8 above zero and 7 below it,
    divided by the largest. delta is the mean of half a step with 15 and with 16 levels.
    """
    end, normal = 1.0 - (1 / 32 + 1 / 30) / 2, NormalDist()
    above = [normal.inv_cdf(0.5 + (end - 0.5) * i / 8) for i in range(1, 9)]
    below = [-normal.inv_cdf(0.5 + (end - 0.5) * i / 7) for i in range(1, 8)]
    found = torch.tensor([x / above[-1] for x in sorted([*below, 0.0, *above])], dtype=torch.float64)
    return tuple(found.float().tolist())


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What lies between neighbouring levels (15 fp32), and the two numbers of each byte as the bits of one float64 (256)."""
    level = torch.tensor(levels(), dtype=torch.float32)
    pairs = torch.stack([level.repeat(16), level.repeat_interleave(16)], dim=1)  # by byte: low bits first
    return ((level[1:] + level[:-1]) / 2).to(device), pairs.view(torch.float64).flatten().to(device)


@dataclass(frozen=True)
class Nf4(Blockwise):
    """Half a byte an element: the numbers of two levels, that of the earlier element in the low bits. 4.25 bits an element with scales."""

    name: ClassVar[str] = "nf4"
    top: ClassVar[float] = 1.0
    packed: ClassVar[int] = 2

    block: int = 64

    def _pack(self, numbers: torch.Tensor, payload: torch.Tensor) -> None:
        between, _ = _tables(numbers.device)
        level = torch.bucketize(numbers, between, out_int32=True)
        payload.copy_(level[:, 0::2].add_(level[:, 1::2], alpha=16))

    def _unpack(self, payload: torch.Tensor, numbers: torch.Tensor) -> None:
        _, pairs = _tables(numbers.device)
        torch.index_select(pairs, 0, payload.flatten().to(torch.int32), out=numbers.view(-1).view(torch.float64))
