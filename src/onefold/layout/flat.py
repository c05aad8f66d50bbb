"""Where every element of a unit lives: one flat address space, cut into one interval a rank.

A unit of three parameters over four ranks (`.` is alignment, `-` is padding at the end):

    address   0        320  384      640            1280 1300  1536
              |w.......|....|b.......|v.............|....------|
    rank 0    [0 ........... 384)
    rank 1                  [384 ........ 768)
    rank 2                                [768 ....... 1152)
    rank 3                                             [1152 .. 1536)

What the checker in `__post_init__` verifies:

1. slots are in order, do not overlap, and each starts at a multiple of `ALIGNMENT` elements, or of
   `block` if there is one, so that blocks counted from a parameter's beginning lie on one rank
   each;
2. the intervals of the ranks tile the space exactly, all of one length, cut at multiples of
   `quantum` elements;
3. no slot reaches past the end.

Every length here is in elements, never bytes. Pure integer arithmetic: no tensors, no processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from onefold.recipe.moments import BLOCK

# Slots start, and ranks are cut, at multiples of this. 64 elements are a whole number of SIMD
# vectors for every dtype, so an element-wise kernel computes an element with the same instructions
# wherever the cut falls (bit-equal stages), and 64 bytes even for int8, which is what device
# kernels want of a view.
ALIGNMENT = 64
# Ranks are cut at multiples of this wherever that costs under 0.5 % of padding; always in recipes
# whose moments rest in blocks.


@dataclass(frozen=True)
class Slot:
    """One parameter's place: `numel` elements of logical `shape` from address `start`."""

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
class Part:
    """What a slot is of a parameter as it is known outside: the elements from `first` on of a
    tensor of `shape`.

    Ordinarily it is all of it. A tile is rows of it (tiling). `names` are the parameter's, first
    the one that it goes by.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    first: int = 0

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """The address space of one flat buffer: `slots` in order, `numel` elements with padding, cut
    for `ranks` ranks.
    """

    slots: tuple[Slot, ...]
    numel: int
    ranks: int
    quantum: int
    block: int = 0

    def __post_init__(self) -> None:
        unit = max(ALIGNMENT, self.block)
        if self.block % ALIGNMENT or self.quantum % unit:
            raise ValueError(
                f"ranks cut at multiples of {self.quantum} elements would divide blocks of {unit}"
            )
        if self.ranks < 1 or self.numel % (self.ranks * self.quantum):
            raise ValueError(
                f"{self.numel} elements do not cut into {self.ranks} intervals of a multiple of"
                f" {self.quantum}"
            )
        end = 0
        for slot in self.slots:
            if slot.start % unit or slot.start < end:
                raise ValueError(
                    f"slot {slot.name!r} starts at {slot.start}, expected a multiple of {unit} at"
                    f" or after {end}"
                )
            end = slot.end
        if end > self.numel:
            raise ValueError(
                f"the last slot ends at {end}, past the space of {self.numel} elements"
            )

    @classmethod
    def of(
        cls,
        parameters: Iterable[tuple[str, Sequence[int]]],
        ranks: int,
        sector: int = 0,
        block: int = 0,
    ) -> FlatLayout:
        """Lay `(name, shape)` pairs out in order for `ranks` ranks, cut at multiples of `sector`
        elements wherever that costs little.

        `block`: elements, counted from each parameter's beginning, that no two ranks may share; 0
        where any may be.
        """
        slots, end, unit = [], 0, max(ALIGNMENT, block)
        for name, shape in parameters:
            slot = Slot(name, tuple(int(n) for n in shape), round_up(end, unit))
            slots.append(slot)
            end = slot.end
        wished = [q for q in (sector, BLOCK) if q and round_up(end, ranks * q) - end <= end // 200]
        quantum = wished[0] if wished else unit
        return cls(tuple(slots), round_up(end, ranks * quantum), ranks, quantum, block)

    @property
    def shard_numel(self) -> int:
        """Elements a rank owns."""
        return self.numel // self.ranks

    @property
    def content(self) -> int:
        """Elements that are somebody's parameter; `numel - content` is alignment and padding."""
        return sum(slot.numel for slot in self.slots)

    def interval(self, rank: int) -> tuple[int, int]:
        """The addresses `[start, end)` that `rank` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def local(self, slot: Slot, rank: int) -> tuple[int, int]:
        """The part of `slot` that `rank` owns as addresses `[start, end)`; `start == end` where it
        owns none.
        """
        return overlap((slot.start, slot.end), self.interval(rank))

    def runs(self, active: Sequence[bool]) -> tuple[tuple[int, int], ...]:
        """The address ranges to move when only some slots take part (`active`, one flag a slot).

        Neighbouring active slots join into one range; with all of them active the range is the
        whole space, padding included, so that what travels is one contiguous message a rank.
        """
        if all(active):
            return ((0, self.numel),) if self.slots else ()
        runs: list[tuple[int, int]] = []
        for i, slot in enumerate(self.slots):
            if not active[i]:
                continue
            if runs and i and active[i - 1]:
                runs[-1] = (runs[-1][0], slot.end)
            else:
                runs.append((slot.start, slot.end))
        return tuple(runs)

    def picture(self, width: int = 72) -> str:
        """The space drawn as in this module's docstring."""
        scale = max(self.numel, 1) / width
        line = ["-"] * width
        for slot in self.slots:
            a, b = int(slot.start / scale), max(int(slot.start / scale) + 1, int(slot.end / scale))
            for i in range(a, min(b, width)):
                line[i] = "."
            line[min(a, width - 1)] = slot.name.rsplit(".", 1)[-1][0]
        rows = ["slots   |" + "".join(line) + "|"]
        for rank in range(self.ranks):
            a, b = self.interval(rank)
            i, j = int(a / scale), int(b / scale)
            rows.append(
                f"rank {rank:<3}|" + " " * i + "=" * (j - i) + " " * (width - j) + f"| [{a}, {b})"
            )
        return "\n".join(rows)


def overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The addresses in both ranges; an empty range at a's start where there are none."""
    start, end = max(a[0], b[0]), min(a[1], b[1])
    return (start, end) if start < end else (a[0], a[0])


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
