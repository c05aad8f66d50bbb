"""What a pass costs by what it consists of: the time of operations from their numbers, sizes and
FLOPs.

    seconds = FLOPs of products     × what one takes in a large product
            + products              × what starting one takes
            + bytes of products     × what bringing one takes (what no FLOP of a small or thin product hides)
            + other operations      × what starting one takes: Python, dispatch, autograd, a kernel's launch
            + bytes of others       × what one takes

A rate of blocks knows none of this: equal FLOPs in more and smaller operations take longer
(transformers' Llama and GPT-2 blocks 1.3 times, Mixtral's 1.6 times as long as a plain block of
their width). The five figures are fitted for each dtype and number of ranks to passes that a
calibration times (`PassPoint`): of the blocks and chains in `onefold.plan.benchmark_blocks`. No
model that is planned for is among them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np


@dataclass(frozen=True)
class Kernels:
    """What runs in a stretch of a step.

    Attributes:
        flops: of matrix products (attention among them), as torch counts them.
        products: their number, each group of a grouped product counted. product_bytes: read and
            written by them.
        others: operations of any other kind that do work (views do none). other_bytes: read and
            written by them.
    """

    flops: int = 0
    products: int = 0
    product_bytes: int = 0
    others: int = 0
    other_bytes: int = 0

    def __add__(self, other: Kernels) -> Kernels:
        return Kernels(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> Kernels:
        return Kernels(*(times * n for n in astuple(self)))


@dataclass(frozen=True)
class Costs:
    """Seconds of one FLOP, of one product and one byte of products, of one other operation and one
    byte of others.
    """

    flop: float
    product: float
    product_byte: float
    other: float
    other_byte: float

    def seconds(self, kernels: Kernels) -> float:
        return sum(
            each * number for each, number in zip(astuple(self), astuple(kernels), strict=True)
        )


def fit(passes: Sequence[tuple[Kernels, float]]) -> Costs:
    """The costs, none negative, with the least squares of relative errors over
    `(what ran, seconds)`.

    Raises:
        ValueError: no pass, or one that took no time.
    """
    if not passes or any(not seconds > 0 for _, seconds in passes):
        raise ValueError(f"{len(passes)} passes: expected at least one, each of which took time.")
    rows = np.array(
        [[n / seconds for n in astuple(kernels)] for kernels, seconds in passes], dtype=np.float64
    )
    scale = np.where(rows.max(axis=0) > 0, rows.max(axis=0), 1.0)
    rows /= scale
    best, least = np.zeros(rows.shape[1]), np.inf
    # With five unknowns every set of those that are not zero can be tried; the best that is nowhere
    # negative is the constrained optimum.
    for count in range(1, rows.shape[1] + 1):
        for chosen in itertools.combinations(range(rows.shape[1]), count):
            found = np.linalg.lstsq(rows[:, chosen], np.ones(len(passes)), rcond=None)[0]
            error = float(((rows[:, chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(rows.shape[1]), error
                best[list(chosen)] = found
    return Costs(*(float(x) for x in best / scale))
