"""The smallest share of the units' states that has to leave the device for a scheme to fit.

    units     0      1      2      3      4          the last ones leave first: their transfers have the longest time to hide
    share                          [ 0.4        ]    (runtime/placement.py)

Units leave whole, so that a share stands for a number of them. The device holds less the more of
them leave: halving finds the least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import floor

from onefold.plan.evaluate import Candidate
from onefold.plan.job import Scheme
from onefold.plan.shapes import ModelShape


def shares_of(sizes: Sequence[int]) -> list[float]:
    """For 1, 2, ... of the last units with trained parameters, all left out: the shortest decimal
    share that takes just these.

    Args:
        sizes: trained elements by unit.
    """
    total, taken = sum(sizes), list(accumulate(n for n in reversed(sizes) if n))
    return [_shortest(low, high, total) for low, high in zip([0, *taken], taken[:-1], strict=False)]


def _shortest(low: int, high: int, total: int) -> float:
    """The decimal of fewest digits by which more than `low` elements of `total` leave, and no more
    than `high`.
    """
    for digits in range(1, 16):
        share = floor(high / total * 10**digits) / 10**digits
        if low < total * share <= high:
            return share
    return (low + high) / 2 / total


def smallest_share(
    model: ModelShape, scheme: Scheme, answer: Callable[[Scheme], Candidate]
) -> Candidate | None:
    """`scheme` with the smallest share below 1 at which the device has room for the rest; None if
    all of it has to leave or nothing, or if that share does not fit beyond the device.
    """
    if answer(scheme).spare < 0 or answer(scheme.with_(offload="none")).fits:
        return None
    shares = shares_of([sum(p.numel for p in u.parameters if p.trainable) for u in model.units])
    low, high = 0, len(shares)
    while low < high:
        middle = (low + high) // 2
        if answer(scheme.with_(share=shares[middle])).spare >= 0:
            high = middle
        else:
            low = middle + 1
    if low == len(shares):
        return None
    found = answer(scheme.with_(share=shares[low]))
    return found if found.fits else None
