"""The numbers that codecs and their kernels share: what each format can say, as constants and
look-ups.
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

import torch

#: e4m3: the smallest number with a full fraction, and the step between smaller ones.
SMALLEST_NORMAL, SMALLEST_STEP = 2.0**-6, 2.0**-9
# Added to a magnitude below 2**22, its sum has an ulp of 1: the addition rounds to the nearest
# integer, ties to the even one, and the integer is the sum's low bits. One pass instead of rounding
# and converting, and the same in every kernel.
MAGIC = 1.5 * 2.0**23


@cache
def levels() -> tuple[float, ...]:
    """The 16 levels from -1 to 1, rounded to fp32.

    Quantiles of the normal distribution at equal steps of probability from the middle to 1 - delta,
    8 above zero and 7 below it, divided by the largest. delta is the mean of half a step with 15
    and with 16 levels.
    """
    end, normal = 1.0 - (1 / 32 + 1 / 30) / 2, NormalDist()
    above = [normal.inv_cdf(0.5 + (end - 0.5) * i / 8) for i in range(1, 9)]
    below = [-normal.inv_cdf(0.5 + (end - 0.5) * i / 7) for i in range(1, 8)]
    found = torch.tensor(
        [x / above[-1] for x in sorted([*below, 0.0, *above])], dtype=torch.float64
    )
    return tuple(found.float().tolist())


@cache
def borders() -> tuple[float, ...]:
    """The 15 borders between levels, in fp32: halfway between neighbours, rounded once."""
    level = torch.tensor(levels(), dtype=torch.float32)
    return tuple(((level[1:] + level[:-1]) / 2).tolist())


@cache
def pairs(device: torch.device) -> torch.Tensor:
    """The two numbers of each byte, low bits first, as the bits of one float64: a look-up yields
    both.
    """
    level = torch.tensor(levels(), dtype=torch.float32)
    return (
        torch.stack([level.repeat(16), level.repeat_interleave(16)], dim=1)
        .view(torch.float64)
        .flatten()
        .to(device)
    )
