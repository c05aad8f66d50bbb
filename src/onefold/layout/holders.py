"""Which ranks hold the same elements, where other axes than data divide parameters too.

Every parameter is a *box* of a global tensor: all of it, or a part if tensor or expert parallelism
divides it. The ranks whose boxes are the same are its *holders*. They share one flat buffer, which
is divided among them as among the ranks of a single data axis.

Eight ranks, 2 experts' halves (`ep`, a data axis) × 2 data ranks × 2 of tensor parallelism, by
number:

                                    ep 0                      ep 1                 holders   copies
                              dp 0        dp 1          dp 0        dp 1
    rank                      0   1       2   3         4   5       6   7
    Shard over tp (a box a tp)a   b       a   b         a   b       a   b          0 2 4 6, 1 3 5 7   1
    plain, or Replicate       a   a       a   a         a   a       a   a          0 ... 7            2
    Shard over ep (experts)   a   a       a   a         b   b       b   b          0 1 2 3, 4 5 6 7   2
    Shard over ep and tp      a   b       a   b         c   d       c   d          0 2, 1 3, 4 6, ... 1

A gradient is the mean over all data coordinates (`data` of them) of what each contributes. A rank
contributes its part of the sum. Ranks of one group with the same data coordinate are *copies*: they
hold the same gradient, each of them whole, so the sum over the holders counts it as often. Hence

    gradient = sum over the holders / (data × copies)

also for experts: what a rank of their holders has is the sum over the tokens that all data ranks
sent to it. A *partial* gradient is one that the copies have parts of; it is multiplied by `copies`
before it is summed (`Entry.parts` in runtime/flat.py).

Pure: no processes, no tensors. The plan counts by the same functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Mesh:
    """A mesh of ranks: the names and sizes of its axes, the slowest first, and which of them carry
    different data.

    Attributes:
        ranks: the rank of each number in the mesh, the last axis fastest; counted if none are given.
        group: the process group of these ranks; None for the default group, or if there is none.
        plain: `shard()` was given no mesh: one data axis.

    Raises:
        ValueError: an axis is named twice or has no name, a data axis is not in the mesh, or none
            is named.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    data: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    group: Any = None
    plain: bool = False

    def __post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(self.size)))
        for what, names in (("the mesh has", self.names), ("data names", self.data)):
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise ValueError(f"{what} the axis {twice[0]!r} twice: each axis has one name.")
        if unknown := [name for name in self.data if name not in self.names]:
            raise ValueError(
                f"data names {', '.join(map(repr, unknown))}, and the mesh has the axes"
                f" {', '.join(map(repr, self.names))}. Give data the axes whose ranks compute with"
                " different samples or tokens, by the mesh's names."
            )
        if not self.data:
            raise ValueError(
                f"data names no axis of the mesh ({', '.join(map(repr, self.names))}): give data the"
                " axes whose ranks compute with different samples or tokens. An axis of one rank"
                " will do."
            )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.sizes)

    @property
    def data_size(self) -> int:
        """The number of data coordinates: ranks that compute with different samples or tokens."""
        return prod(n for name, n in zip(self.names, self.sizes, strict=True) if name in self.data)

    @property
    def several(self) -> bool:
        """Whether ranks along some axis compute with the same data."""
        return self.data_size < self.size

    @cached_property
    def at(self) -> dict[int, tuple[int, ...]]:
        """The coordinates of each rank."""
        return dict(zip(self.ranks, product(*map(range, self.sizes)), strict=True))

    def along(self, names: Sequence[str]) -> dict[int, tuple[int, ...]]:
        """Return each rank's coordinates along some axes."""
        kept = [i for i, name in enumerate(self.names) if name in names]
        return {rank: tuple(at[i] for i in kept) for rank, at in self.at.items()}

    @property
    def data_of(self) -> dict[int, tuple[int, ...]]:
        """The data coordinate of each rank."""
        return self.along(self.data)

    @property
    def places(self) -> dict[int, str]:
        """The place of each rank, in words: "dp 1, tp 0"; none if there is one axis."""
        return {
            rank: ", ".join(f"{n} {i}" for n, i in zip(self.names, at, strict=True))
            for rank, at in self.at.items()
            if len(self.names) > 1
        }

    def axes_of(self, ranks: Sequence[int]) -> list[str]:
        """Return the axes along which some of `ranks` are apart."""
        along = zip(*(self.at[rank] for rank in ranks), strict=True)
        return [n for n, at in zip(self.names, along, strict=True) if len({*at}) > 1]

    def ranks_of(self, inner: int, ranks: Sequence[int]) -> int:
        """Return how many of `ranks` (all of the mesh, or the holders of a box) are in a group of
        `inner` data ranks of the mesh. Experts have fewer holders in each group.

        Raises:
            ValueError: these are not neighbours among `ranks`: the axes stand in another order.
        """
        data_of = self.data_of
        places = {at: i for i, at in enumerate(sorted(set(data_of.values())))}
        blocks = [places[data_of[rank]] // inner for rank in sorted(ranks)]
        if blocks != sorted(blocks) or len(set(Counter(blocks).values())) > 1:
            raise ValueError(
                f"groups of {inner} data ranks are not neighbours in a mesh {self.describe()} with"
                f" data={self.data}. Name the axes from the slowest link to the fastest: replicas"
                " first, tensor parallelism last; and choose groups that divide the data ranks."
            )
        return blocks.count(blocks[0])

    def describe(self) -> str:
        """Return the axes in words: "dp 2 × tp 4"."""
        return " × ".join(f"{n} {s}" for n, s in zip(self.names, self.sizes, strict=True))

    def holders(self, divided: Sequence[str]) -> Holders:
        """Return the holders of a parameter that is divided along the axes `divided`."""
        return Holders.of(self.along(divided), self.data_of)


@dataclass(frozen=True)
class Holders:
    """How the ranks of a mesh hold one parameter.

    Attributes:
        groups: the ranks that hold the same box, in ascending order, for each box. Every rank is in
            one group, and all groups have the same size.
        copies: ranks of a group with the same data coordinate.
        data: the number of data coordinates of the whole mesh.
    """

    groups: tuple[tuple[int, ...], ...]
    copies: int
    data: int

    @classmethod
    def of(cls, boxes: Mapping[int, Hashable], coordinates: Mapping[int, Hashable]) -> Holders:
        """Return the holders by the box, and by the data coordinate, of each rank.

        Raises:
            ValueError: boxes have different numbers of holders, or the ranks of a box lie unevenly
                over the data coordinates.
        """
        by_box: dict[Hashable, list[int]] = {}
        for rank in sorted(boxes):
            by_box.setdefault(boxes[rank], []).append(rank)
        groups = tuple(map(tuple, by_box.values()))
        sizes = {len(group) for group in groups}
        if len(sizes) > 1:
            raise ValueError(
                f"the parts of a parameter are held by different numbers of ranks:"
                f" {', '.join(map(str, sorted(groups, key=len)))}. Every part must be held by"
                " equally many ranks of the mesh."
            )
        counts = {
            count for group in groups for count in Counter(coordinates[r] for r in group).values()
        }
        if len(counts) > 1:
            raise ValueError(
                f"a part of a parameter is held by ranks {groups[0]}, which lie unevenly over the"
                " data axes. Give `data` all axes along which ranks compute with different data."
            )
        return cls(groups, counts.pop(), len(set(coordinates.values())))

    @property
    def size(self) -> int:
        """The number of holders of each box."""
        return len(self.groups[0])

    @property
    def scale(self) -> float:
        """What a sum over the holders is multiplied with to be the mean over the data coordinates."""
        return 1.0 / (self.data * self.copies)

    @property
    def scale_of_mean(self) -> float:
        """What a mean over the holders is multiplied with to be that over the data coordinates."""
        return self.size / (self.data * self.copies)

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same box as `rank`, which is one of them."""
        return next(group for group in self.groups if rank in group)


# -- boxes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AxisCut:
    """One division of a tensor: `dim` is cut into `parts`, of which this is number `index`."""

    dim: int
    parts: int
    index: int


@dataclass(frozen=True)
class TensorBox:
    """A box of a global tensor: its first element in each dimension, and its sizes."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box in the global tensor, as an index."""
        return tuple(slice(at, at + size) for at, size in zip(self.offset, self.shape, strict=True))


def region_of(shape: Sequence[int], cuts: Sequence[AxisCut]) -> TensorBox:
    """Return the box that is left of a tensor of `shape` after some cuts, in order. A dimension is
    cut as by `torch.chunk`: into parts of equal length, the last of which may be shorter or empty.
    """
    offset, size = [0] * len(shape), list(shape)
    for cut in cuts:
        each = -(-size[cut.dim] // cut.parts)
        first = min(cut.index * each, size[cut.dim])
        offset[cut.dim] += first
        size[cut.dim] = min(each, size[cut.dim] - first)
    return TensorBox(tuple(offset), tuple(size))


# -- intervals of boxes ------------------------------------------------------------------------------
#
# Which elements two intervals of boxes have in common, without a loop over elements.
#
# A rank stores elements [start, stop) of a flattened box of a global tensor (`BoxInterval`). A reader
# wants such an interval of another box. Here a tensor [4, 6], stored as its left and right half by two
# ranks, and wanted as elements [4, 21) of the whole:
#
#     stored: box at (0, 0) of [4, 3]      .  .  .              wanted              .  .  .  .  4  5
#             elements [0, 12)             6  7  8              elements            6  7  8  9 10 11
#                                         12 13 14              [4, 21)            12 13 14 15 16 17
#                                         18 19 20                                 18 19 20  .  .  .
#
# An interval of a box of n dimensions consists of at most 2n - 1 boxes, each contiguous in it
# (`stretches`). Two boxes have a box in common, which lies in both at regular strides. So the common
# elements are a few strided blocks (`common`), however many rows they have.


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
        """Return where a box inside it begins in it, and at which strides it lies."""
        strides = strides_of(self.region.shape)
        inside = map(int.__sub__, box.offset, self.region.offset)
        return sum(map(int.__mul__, inside, strides)) - self.start, strides


class Common(NamedTuple):
    """A block that two intervals share: its sizes, its place and strides in each of them."""

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
    """Return the elements that two intervals of one tensor share, as disjoint blocks."""
    if intersection(one.region, other.region) is None:
        return []
    theirs, out = other.boxes(), []
    for mine in one.boxes():
        for their in theirs:
            if (box := intersection(mine, their)) is not None:
                out.append(Common(box.shape, *one.place(box), *other.place(box)))
    return out


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
