"""Constants and look-up tables of the formats, shared by codecs and their kernels."""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

import torch

#: e4m3: the smallest number with a full fraction, and the step between smaller ones.
SMALLEST_NORMAL, SMALLEST_STEP = 2.0**-6, 2.0**-9
# If MAGIC is added to a number below 2**22 in magnitude, the sum has an ulp of 1. So the addition
# rounds to the nearest integer (ties to even), and the sum's low bits are that integer. This takes
# one pass instead of rounding and converting, and works alike in every kernel.
MAGIC = 1.5 * 2.0**23
#: SplitMix64 (Steele, Lea and Flood 2014): a counter, and two multiplications that mix its bits.
GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@cache
def levels() -> tuple[float, ...]:
    """Return the 16 levels from -1 to 1, rounded to fp32.

    Quantiles of the normal distribution at equal steps of probability from the middle to 1 - delta,
    8 above zero and 7 below it, divided by the largest. delta is the mean of half a step with 15
    and with 16 levels.
    """
    end, normal = 1.0 - (1 / 32 + 1 / 30) / 2, NormalDist()
    above = [normal.inv_cdf(0.5 + (end - 0.5) * i / 8) for i in range(1, 9)]
    below = [-normal.inv_cdf(0.5 + (end - 0.5) * i / 7) for i in range(1, 8)]
    found = torch.tensor(
        [x / above[-1] for x in sorted([*below, 0.0, *above])], dtype=torch.float64, device="cpu"
    )
    return tuple(found.float().tolist())


@cache
def borders() -> tuple[float, ...]:
    """Return the 15 borders between levels, in fp32: midpoints of neighbours, rounded once."""
    level = torch.tensor(levels(), dtype=torch.float32, device="cpu")
    return tuple(((level[1:] + level[:-1]) / 2).tolist())


@cache
def pairs(device: torch.device) -> torch.Tensor:
    """Return the two numbers of each byte value, low bits first, as the bits of one float64. One
    look-up gives both.
    """
    level = torch.tensor(levels(), dtype=torch.float32, device="cpu")
    return (
        torch.stack([level.repeat(16), level.repeat_interleave(16)], dim=1)
        .view(torch.float64)
        .flatten()
        .to(device)
    )
