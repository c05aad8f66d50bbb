"""Which elements of a parameter lie where: on which rank, at which elements of the rank's cell (see
shard.py).

Stages 1 and 2: a group's parameters lie one after another, and the whole is cut into N equal parts.
The padding at the end makes the number of elements a multiple of 2N; with `parameter_alignment`
there is some behind each parameter as well.

    group     | a a a a a | b b b | c c c c c c | pad |
    cut            rank 0      |      rank 1          |

Stage 3: every parameter is cut into N equal parts by itself, the last one padded; a rank lays its
parts one after another.

    rank 0    | a a a | b b | c c c |
    rank 1    | a a . | b . | c c c |          . is padding
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from onefold.checkpoint.errors import CheckpointError


class Part(NamedTuple):
    """Elements `[begin, end)` of a cell of rank `rank`."""

    rank: int
    begin: int
    end: int


@dataclass(frozen=True)
class Place:
    """A parameter in its cell: `begin` is its address in the group (stages 1, 2) or in each rank's
    cell (stage 3).
    """

    cell: int
    begin: int
    numel: int
    shape: tuple[int, ...]


class EqualCuts:
    """Stages 1 and 2. `size[cell]` is the length of a rank's part, in elements."""

    def __init__(self, size: Sequence[int], ranks: int) -> None:
        self.size, self.ranks = size, ranks

    def parts(self, place: Place, start: int, stop: int) -> Iterator[Part]:
        """Where elements `[start, stop)` of the parameter lie, in order."""
        size = self.size[place.cell]
        at, end = place.begin + start, place.begin + stop
        while at < end:
            rank = at // size
            upto = min(end, (rank + 1) * size)
            yield Part(rank, at - rank * size, upto - rank * size)
            at = upto

    def least(self, cell: int, rank: int, used: int) -> int:
        """Elements that the cell of `rank` must have at least, where the parameters take `used` of
        the group's.
        """
        return max(0, min(self.size[cell], used - rank * self.size[cell]))


class CutsOfEach:
    """Stage 3."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def parts(self, place: Place, start: int, stop: int) -> Iterator[Part]:
        """Where elements `[start, stop)` of the parameter lie, in order."""
        size, at = -(-place.numel // self.ranks), start
        while at < stop:
            rank = at // size
            upto = min(stop, (rank + 1) * size)
            yield Part(rank, place.begin + at - rank * size, place.begin + upto - rank * size)
            at = upto

    def least(self, cell: int, rank: int, used: int) -> int:
        """Elements that the cell of every rank must have: `used`, the parts laid one after
        another.
        """
        return used


def lay_out(
    shapes: Sequence[Mapping[str, Sequence[int]]],
    ranks: int,
    of_each: bool,
    paddings: Sequence[Sequence[int]] | None,
) -> tuple[dict[str, Place], list[int]]:
    """The place of every parameter, and the elements that each cell uses.

    Args:
        shapes: for each cell, names and logical shapes in the order in which they lie.
        of_each: whether each parameter is cut by itself (stage 3).
        paddings: for each cell, the elements of padding behind each parameter; None: there are
            none.

    Raises:
        CheckpointError: a name comes twice, or paddings do not fit.
    """
    places: dict[str, Place] = {}
    used = []
    for cell, named in enumerate(shapes):
        behind = list(paddings[cell]) if paddings is not None and not of_each else [0] * len(named)
        if len(behind) != len(named):
            raise CheckpointError(
                f"group {cell} has {len(named)} parameters, but paddings of {len(behind)}: the"
                " checkpoint contradicts itself."
            )
        at = 0
        for (name, shape), padding in zip(named.items(), behind, strict=True):
            if name in places:
                raise CheckpointError(
                    f"the parameter {name!r} lies in two of the optimizer's groups: the checkpoint"
                    " contradicts itself."
                )
            numel = prod(shape)
            places[name] = Place(cell, at, numel, tuple(shape))
            at += (-(-numel // ranks) if of_each else numel) + padding
        used.append(at)
    return places, used
