"""Four bits for weights: 16 levels that lie as a normal distribution does (NormalFloat: Dettmers et
al., QLoRA, 2023, appendix E).

A level is off by at most half the gap between its neighbours, 0.152 of the scale at the ends and
0.04 in the middle. Of normally distributed weights that loses 15 % less than int4 at the same bits;
of others it may lose more. It rounds to the nearest only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import ClassVar

import torch

from onefold.quant.blockwise import Blockwise
from onefold.quant.numbers import borders, levels, pairs

#: Borders between levels are at least 0.08 apart, and none is within rounding of a cell's end.
CELLS = 128


@cache
def _cells(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[-1, 1] in cells so narrow that at most one border between two levels lies in each.

    By cell: the level at its lower end (int32), and the border inside it (fp32; infinity where
    there is none).
    """
    between = torch.tensor(borders(), dtype=torch.float32)
    ends = torch.arange(CELLS + 1) * (2.0 / CELLS) - 1.0
    lower = torch.bucketize(ends, between, out_int32=True)
    inside = torch.bucketize(ends + 2.0 / CELLS, between) > lower
    border = torch.where(inside, between[lower.long().clamp(max=14)], torch.inf)
    return lower.to(device), border.to(device)


@dataclass(frozen=True)
class Nf4(Blockwise):
    """Half a byte an element: the numbers of two levels, that of the earlier element in the low
    bits. 4.25 bits an element with scales.
    """

    name: ClassVar[str] = "nf4"
    top: ClassVar[float] = 1.0
    packed: ClassVar[int] = 2

    block: int = 64

    def _pack(self, numbers: torch.Tensor, payload: torch.Tensor) -> None:
        """To the nearest level, the lower one if two are as near; a search among 15 borders would
        take six times as long.
        """
        lower, border = _cells(numbers.device)
        y = numbers.nan_to_num_(0.0).flatten()
        cell = y.add(1.0).mul_(CELLS / 2).clamp_(0, CELLS).to(torch.int32)
        # -1 if y is beyond, else 0
        beyond = (
            torch.index_select(border, 0, cell).sub_(y).view(torch.int32).bitwise_right_shift_(31)
        )
        level = torch.index_select(lower, 0, cell).sub_(beyond).view(-1, 2)
        payload.copy_(level[:, 0].add(level[:, 1], alpha=16).view(payload.shape))

    def _off(self, sizes: torch.Tensor, scales: torch.Tensor, part: float) -> torch.Tensor:
        return scales * (part * max(b - a for a, b in pairwise(levels())))

    def _unpack(self, payload: torch.Tensor, numbers: torch.Tensor) -> None:
        torch.index_select(
            pairs(numbers.device),
            0,
            payload.view(-1).to(torch.int32),
            out=numbers.view(-1).view(torch.float64),
        )
