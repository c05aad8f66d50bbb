"""Where every element lives: positions of ranks, and the addresses in a flat buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from onefold.recipe.moments import BLOCK

# -- positions -------------------------------------------------------------------------------------
#
# Two levels of ranks: `outer` groups of `inner` consecutive ranks (usually a node) each.
#
# Six ranks in groups of three, on the left by their numbers, on the right by their positions in the
# address space:
#
#     group 0    rank 0   rank 1   rank 2         group 0    0   2   4        intra-group: 0 2 4  |  1 3 5
#     group 1    rank 3   rank 4   rank 5         group 1    1   3   5        inter-group: 0 1  |  2 3  |  4 5
#
# [Note: positions] A rank's position says which interval of a flat buffer it owns. Positions count
# across the groups first. So the ranks of an `inter_group`, one of each group, own adjacent
# intervals, and together these are one shard, the part of one rank in the division among an
# `intra_group`. A gather between groups and then inside them therefore needs no reordering.


@dataclass(frozen=True)
class Topology:
    """`size` ranks in groups of `inner`.

    Raises:
        ValueError: the groups do not divide the ranks.
    """

    size: int
    inner: int

    def __post_init__(self) -> None:
        if self.inner < 1 or self.size % self.inner:
            fitting = [n for n in range(1, self.size + 1) if self.size % n == 0]
            raise ValueError(
                f"groups of {self.inner} ranks do not divide {self.size}"
                f" rank{'s' if self.size > 1 else ''}: choose a size of"
                f" {', '.join(map(str, fitting))}."
            )

    @property
    def outer(self) -> int:
        """The number of groups."""
        return self.size // self.inner

    @property
    def order(self) -> list[int]:
        """The rank number, 0 to size − 1, of each position."""
        return [(p % self.outer) * self.inner + p // self.outer for p in range(self.size)]

    def intra_group(self, position: int) -> list[int]:
        """Return the positions in the group of `position`, which is one of them."""
        return list(range(position % self.outer, self.size, self.outer))

    def inter_group(self, position: int) -> list[int]:
        """Return the positions, one of each group, with the same shard as `position`."""
        first = position // self.outer * self.outer
        return list(range(first, first + self.outer))

    @property
    def two_levels(self) -> bool:
        """Whether there are several groups of several ranks: moves run inside and between them."""
        return 1 not in (self.inner, self.outer)

    def position_of(self, rank: int) -> int:
        """Return the position of the rank with this number, 0 to size − 1."""
        return rank % self.inner * self.outer + rank // self.inner


# -- addresses -------------------------------------------------------------------------------------
#
# The flat address space of a unit's parameters, divided into one interval for each rank.
#
# Three parameters over four ranks (`.` is alignment, `-` is padding at the end):
#
#     address   0        320  384      640            1280 1300  1536
#               |w.......|....|b.......|v.............|....------|
#     rank 0    [0 ........... 384)
#     rank 1                  [384 ........ 768)
#     rank 2                                [768 ....... 1152)
#     rank 3                                             [1152 .. 1536)
#
# 1. Slots are in order and do not overlap. Each starts at a multiple of `ALIGNMENT` elements, or of
#    `block` if there is one: blocks are counted from a parameter's beginning, and each must be on one
#    rank.
# 2. The intervals of the ranks tile the space exactly. All have the same length, a multiple of
#    `quantum` elements.
#
# Every length here is in elements, never bytes. Pure integer arithmetic: no tensors, no processes.


# Slots and intervals start at multiples of this. 64 elements are a whole number of SIMD vectors in
# every dtype, so an element-wise kernel computes an element with the same instructions wherever the
# intervals begin: stages are bit-equal. And 64 elements are at least 64 bytes, the alignment that
# device kernels expect of a view. (Intervals also start at multiples of BLOCK where that costs
# under 0.5 % of padding, and always in recipes that store moments in blocks.)
ALIGNMENT = 64


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: `numel` elements of logical `shape` from address `start` on."""

    name: str
    shape: tuple[int, ...]
    start: int

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def end(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """The addresses of a flat buffer: `slots` in order, divided among `ranks` ranks."""

    slots: tuple[Slot, ...]
    numel: int
    ranks: int

    @classmethod
    def of(
        cls,
        parameters: Iterable[tuple[str, Sequence[int]]],
        ranks: int,
        sector: int = 0,
        block: int = 0,
        rooms: Sequence[int] | None = None,
    ) -> FlatLayout:
        """Lay out `(name, shape)` pairs in order for `ranks` ranks. Intervals are multiples of
        `sector` elements if that costs little padding.

        `block`: the length, in elements, of blocks that must each be on one rank, counted from each
        parameter's beginning; 0 if there are none. `rooms`: elements to leave for each parameter,
        if that is more than it has: ranks that hold unequal parts of tensors have equal layouts.
        """
        named = [(name, tuple(int(n) for n in shape)) for name, shape in parameters]
        sizes = tuple(prod(shape) for _, shape in named) if rooms is None else tuple(rooms)
        starts, end, unit = [], 0, max(ALIGNMENT, block)
        for size in sizes:
            starts.append(round_up(end, unit))
            end = starts[-1] + size
        wished = [q for q in (sector, BLOCK) if q and round_up(end, ranks * q) - end <= end // 200]
        quantum = wished[0] if wished else unit
        slots = (Slot(*parameter, start) for parameter, start in zip(named, starts, strict=True))
        return cls(tuple(slots), round_up(end, ranks * quantum), ranks)

    @property
    def shard_numel(self) -> int:
        """Elements of each rank's interval."""
        return self.numel // self.ranks

    @property
    def content(self) -> int:
        """Elements that belong to a parameter; `numel - content` is alignment and padding."""
        return sum(slot.numel for slot in self.slots)

    def interval(self, rank: int) -> tuple[int, int]:
        """Return the addresses `[start, end)` that `rank` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel


def overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """Return the addresses in both ranges; an empty range at a's start if there are none."""
    start, end = max(a[0], b[0]), min(a[1], b[1])
    return (start, end) if start < end else (a[0], a[0])


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
