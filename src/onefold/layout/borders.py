"""Where the parameters of a flat buffer go, so that few of them are cut: their order, and gaps.

Ranks hold intervals of equal length. In the order of the model, a cut falls wherever it falls; in
this one, what is longer than an interval fills the ends of intervals, and the rest lies between:

    as they come   | Q   K  V'| 'V  O  G'| 'G'     | 'G  N|     two matrices of five are cut
    bordered       | Q   K  V G'| 'G'    | 'G  O   | N    |     one: G is longer than an interval

Where nothing is long enough to fill an end, a gap does, within `PADDING`; else one more is cut. A
matrix that lies on one rank is stepped there, and travels nowhere (layout/owners.py). Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

#: Gaps and padding together, of all elements.
PADDING = 0.01
#: Shares of it that are tried; the least is padding that intervals of equal length need anyway.
_TRIED = (0.0, 0.25, 0.5, 0.75, 1.0)
#: What another order saves at least, of what the order of the model sends.
_MUCH = 0.05


@dataclass(frozen=True)
class Bordered:
    """Attributes:
    order: indices of the parameters, by address.
    starts: their addresses, in this order.
    room: elements of an interval.
    cut: the number of parameters that several ranks hold.
    travels: elements that are not on the rank that has most of their parameter.
    """

    order: tuple[int, ...]
    starts: tuple[int, ...]
    room: int
    cut: int
    travels: int


@lru_cache(maxsize=4096)
def bordered(sizes: tuple[int, ...], cuts: int, unit: int, quantum: int) -> Bordered:
    """Return the places of parameters with these numbers of elements, divided among `cuts` ranks.
    They stay in their order, in which parameters of all kinds are everywhere, unless another one
    cuts fewer or sends much less.

    Args:
        unit: they start at multiples of it.
        quantum: the length of an interval is a multiple of it.
    """
    lengths = [-(-n // unit) * unit for n in sizes]
    total = sum(lengths)
    least = -(-total // (cuts * quantum)) * quantum
    starts = list(accumulate(lengths[:-1], initial=0)) if sizes else []
    if not total:  # parameters without elements
        return Bordered(tuple(range(len(sizes))), tuple(starts), room=0, cut=0, travels=0)
    in_order = _scored(range(len(sizes)), starts, sizes, least)
    found = []
    for share in _TRIED:
        most = int(total * (1 + PADDING * share)) // (cuts * quantum) * quantum
        room = max(least, most)
        for longest_first in (True, False):
            order, starts = _placed(lengths, cuts, room, longest_first)
            found.append(_scored(order, starts, sizes, room))
    best = min(found, key=lambda each: each.travels + _padded(each, cuts))
    saved = in_order.travels + _padded(in_order, cuts) - best.travels - _padded(best, cuts)
    much = _MUCH * in_order.travels if best.cut >= in_order.cut else 0
    return best if saved > much else in_order


def _padded(each: Bordered, cuts: int) -> int:
    """Return what padding costs as `travels` counts: every rank gathers and reduces all of it, while
    each sends its share of what travels.
    """
    return cuts * cuts * each.room


def _placed(
    lengths: Sequence[int], cuts: int, room: int, longest_first: bool
) -> tuple[list[int], list[int]]:
    """Return (the order, their addresses). `longest_first`: if one more must be cut, it is the
    longest, so that short ones are left to fill what is between the next cuts; else the shortest.
    """
    left = sorted(range(len(lengths)), key=lambda i: (lengths[i], -i))
    keys = [lengths[i] for i in left]
    spare = cuts * room - sum(keys)
    order, starts, at = [], [], 0
    while left:
        space = room - at % room
        fitting = bisect_right(keys, space)
        if fitting:
            index = fitting - 1
        elif keys[-1] > room:
            index = len(left) - 1
        elif space <= spare:
            at, spare = at + space, spare - space
            continue
        else:
            index = bisect_left(keys, keys[-1 if longest_first else 0])
        order.append(left.pop(index))
        starts.append(at)
        at += keys.pop(index)
    return order, starts


def _scored(
    order: Sequence[int], starts: Sequence[int], sizes: Sequence[int], room: int
) -> Bordered:
    cut = travels = 0
    for i, start in zip(order, starts, strict=True):
        end = start + sizes[i]
        first, last = start // room, max(start, end - 1) // room
        if last > first:
            cut += 1
            inner = room if last > first + 1 else 0
            travels += sizes[i] - max((first + 1) * room - start, end - last * room, inner)
    return Bordered(tuple(order), tuple(starts), room, cut, travels)
