"""Four bits for weights: 16 levels at quantiles of a normal distribution (NormalFloat: Dettmers et
al., QLoRA, 2023, appendix E).

The largest error is half the gap between two levels: 0.152 of the scale at the ends, 0.04 in the
middle. For normally distributed weights the error is 15 % smaller than with int4 at the same bits;
for others it may be larger. The codec rounds to the nearest only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import ClassVar

import torch

from onefold.quant.blockwise import Blockwise
from onefold.quant.numbers import borders, levels, pairs

#: Number of cells in [-1, 1]. Borders between levels are at least 0.08 apart (a cell has 1/64), and
#: none is so close to a cell's end that rounding matters.
CELLS = 128


@cache
def _cells(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tables over the cells of [-1, 1]. Cells are so narrow that each contains at most one
    border between two levels.

    For each cell: the level at its lower end (int32), and the border inside it (fp32; infinity if
    there is none).
    """
    between = torch.tensor(borders(), dtype=torch.float32, device="cpu")
    ends = torch.arange(CELLS + 1, device="cpu") * (2.0 / CELLS) - 1.0
    lower = torch.bucketize(ends, between, out_int32=True)
    inside = torch.bucketize(ends + 2.0 / CELLS, between) > lower
    border = torch.where(inside, between[lower.long().clamp(max=14)], torch.inf)
    return lower.to(device), border.to(device)


@dataclass(frozen=True)
class Nf4(Blockwise):
    """Half a byte per element. A byte holds the level numbers of two neighbours, the earlier one in
    the low bits. 4.25 bits per element with scales.
    """

    name: ClassVar[str] = "nf4"
    top: ClassVar[float] = 1.0
    packed: ClassVar[tuple[int, int]] = (2, 1)

    block: int = 64

    def numbers(self) -> torch.Tensor:
        return torch.tensor(levels(), device="cpu")

    def _pack(self, numbers: torch.Tensor, payload: torch.Tensor) -> None:
        """Round to the nearest level, or to the lower one of two that are equally near. The tables
        are six times as fast as a search among the 15 borders.
        """
        lower, border = _cells(numbers.device)
        y = numbers.nan_to_num_(0.0).flatten()
        cell = y.add(1.0).mul_(CELLS / 2).clamp_(0, CELLS).to(torch.int32)
        # -1 if y is above the border, else 0
        beyond = (
            torch.index_select(border, 0, cell).sub_(y).view(torch.int32).bitwise_right_shift_(31)
        )
        level = torch.index_select(lower, 0, cell).sub_(beyond).view(-1, 2)
        payload.copy_(level[:, 0].add(level[:, 1], alpha=16).view(payload.shape))

    def _off(self, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return scales * (0.5 * max(b - a for a, b in pairwise(levels())))

    def _unpack(self, payload: torch.Tensor, numbers: torch.Tensor) -> None:
        torch.index_select(
            pairs(numbers.device),
            0,
            payload.view(-1).to(torch.int32),
            out=numbers.view(-1).view(torch.float64),
        )
