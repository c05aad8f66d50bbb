"""Intervals of boxes: which elements two of them have in common, without a loop over elements.

A rank stores elements [start, stop) of a flattened box of a global tensor (`BoxInterval`). A reader
wants such an interval of another box. Here a tensor [4, 6], stored as its left and right half by two
ranks, and wanted as elements [4, 21) of the whole:

    stored: box at (0, 0) of [4, 3]      .  .  .              wanted              .  .  .  .  4  5
            elements [0, 12)             6  7  8              elements            6  7  8  9 10 11
                                        12 13 14              [4, 21)            12 13 14 15 16 17
                                        18 19 20                                 18 19 20  .  .  .

An interval of a box of n dimensions consists of at most 2n - 1 boxes, each contiguous in it
(`stretches`). Two boxes have a box in common, which lies in both at regular strides. So the common
elements are a few strided blocks (`common`), however many rows they have.

Pure: no processes, no tensors, no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from onefold.layout.holders import TensorBox


def whole_region(shape: Sequence[int]) -> TensorBox:
    """Return the box that is a whole tensor of `shape`."""
    return TensorBox((0,) * len(shape), tuple(shape))


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of `shape`."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def intersection(a: TensorBox, b: TensorBox) -> TensorBox | None:
    """Return the box of the elements in both; None if there are none."""
    first = tuple(map(max, a.offset, b.offset))
    last = tuple(
        min(i + n, j + m) for i, n, j, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    )
    if any(i >= j for i, j in zip(first, last, strict=True)):
        return None
    return TensorBox(first, tuple(j - i for i, j in zip(first, last, strict=True)))


def stretches(shape: Sequence[int], start: int, stop: int) -> list[TensorBox]:
    """Split elements [start, stop) of a flattened tensor of n dimensions into at most 2n - 1 boxes,
    in order. Each box is contiguous in the tensor.
    """
    if start >= stop:
        return []
    if len(shape) < 2:
        return [TensorBox((start,), (stop - start,)) if len(shape) else TensorBox((), ())]
    row, rest = prod(shape[1:]), tuple(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)

    def inside(index: int, a: int, b: int) -> list[TensorBox]:
        return [TensorBox((index, *r.offset), (1, *r.shape)) for r in stretches(rest, a, b)]

    if first == last:
        return inside(first, head, tail)
    out = inside(first, head, row) if head else []
    first += head > 0
    if first < last:
        out.append(TensorBox((first, *(0 for _ in rest)), (last - first, *rest)))
    return out + inside(last, 0, tail)


@dataclass(frozen=True)
class BoxInterval:
    """Elements [start, stop) of the flattened box `region` of a global tensor."""

    region: TensorBox
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def part(self, a: int, b: int) -> BoxInterval:
        """Return the elements [a, b) of this interval, counted from its first."""
        return BoxInterval(self.region, self.start + a, self.start + b)

    def boxes(self) -> list[TensorBox]:
        """Return the boxes of the global tensor that it consists of; see `stretches`."""
        return [
            TensorBox(tuple(map(sum, zip(self.region.offset, r.offset, strict=True))), r.shape)
            for r in stretches(self.region.shape, self.start, self.stop)
        ]

    def place(self, box: TensorBox) -> tuple[int, tuple[int, ...]]:
        """Return where a box inside it begins, counted from its first element, and the strides at
        which the box lies in it.
        """
        strides = strides_of(self.region.shape)
        inside = map(int.__sub__, box.offset, self.region.offset)
        return sum(map(int.__mul__, inside, strides)) - self.start, strides


class Common(NamedTuple):
    """A block of elements that two intervals have in common: its sizes, and its first element and
    strides in each of them.
    """

    shape: tuple[int, ...]
    at: int
    strides: tuple[int, ...]
    there: int
    strides_there: tuple[int, ...]

    @property
    def ends_there(self) -> int:
        """The element after the last in the second interval."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides_there, strict=True))
        return self.there + last + 1


def common(one: BoxInterval, other: BoxInterval) -> list[Common]:
    """Return the elements that two intervals of boxes of one tensor have in common, as blocks. No
    element is in two of them.
    """
    if intersection(one.region, other.region) is None:
        return []
    theirs, out = other.boxes(), []
    for mine in one.boxes():
        for their in theirs:
            if (box := intersection(mine, their)) is not None:
                out.append(Common(box.shape, *one.place(box), *other.place(box)))
    return out


class RegionRun(NamedTuple):
    """Elements [at, at + length) of the flattened global tensor are elements [start, start + length)
    of a flattened box.
    """

    at: int
    start: int
    length: int


def runs(interval: BoxInterval, shape: Sequence[int]) -> Iterator[RegionRun]:
    """Yield the runs of consecutive elements, in a global tensor of `shape`, of an interval of a box
    of it. `start` is counted from the first element of the box.
    """
    held: RegionRun | None = None
    for run in _rows(interval, shape):
        if held is not None and (held.at + held.length, held.start + held.length) == run[:2]:
            held = held._replace(length=held.length + run.length)
            continue
        if held is not None:
            yield held
        held = run
    if held is not None:
        yield held


def _rows(interval: BoxInterval, shape: Sequence[int]) -> Iterator[RegionRun]:
    """Yield runs of which two may follow each other without a gap."""
    strides = strides_of(shape)
    for box in interval.boxes():
        # A run goes over the last dimension in which the box is a part, and those behind it
        last = len(shape)
        while last and box.shape[last - 1] == shape[last - 1]:
            last -= 1
        outer = max(0, last - 1)
        first, own = interval.place(box)
        begin = sum(map(int.__mul__, box.offset, strides))
        for index in product(*map(range, box.shape[:outer])):
            yield RegionRun(
                begin + sum(map(int.__mul__, index, strides)),
                interval.start + first + sum(map(int.__mul__, index, own)),
                prod(box.shape[outer:]),
            )


@lru_cache(maxsize=4096)
def tile(shape: tuple[int, ...], boxes: tuple[TensorBox, ...]) -> str:
    """Return why `boxes` do not tile a tensor of `shape`, each element once; "" if they do."""
    whole = whole_region(shape)
    for box in boxes:
        if len(box.shape) != len(shape) or (box.numel and intersection(whole, box) != box):
            return f"a box at {box.offset} of {box.shape} is not inside a tensor of {shape}"
    some = [box for box in boxes if box.numel]
    for i, box in enumerate(some):
        for other in some[:i]:
            if intersection(box, other) is not None:
                return (
                    f"two boxes overlap, at {other.offset} of {other.shape} and at {box.offset} of"
                    f" {box.shape}"
                )
    covered = sum(box.numel for box in some)
    return "" if covered == prod(shape) else f"boxes cover {covered} of {prod(shape)} elements"
