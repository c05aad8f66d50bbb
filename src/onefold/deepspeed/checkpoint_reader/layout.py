"""Where each element of a parameter is stored: the rank, and the place in the rank's cell (see
shard.py).

Stages 1 and 2: the parameters of a group are concatenated, and the result is cut into N equal
parts. Padding at the end makes the number of elements a multiple of 2N. With `parameter_alignment`,
there is padding after each parameter as well.

    group     | a a a a a | b b b | c c c c c c | pad |
    cut            rank 0      |      rank 1          |

Stage 3: each parameter is cut into N equal parts, of which the last is padded. Each rank
concatenates its parts.

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
    """Elements `[begin, end)` of a cell on rank `rank`."""

    rank: int
    begin: int
    end: int


@dataclass(frozen=True)
class Place:
    """Where a parameter is stored.

    Attributes:
        cell: the index of its cell.
        begin: its first element in the whole group (stages 1, 2), or in each rank's cell (stage 3).
        numel: its number of elements, over all ranks.
        shape: its shape.
    """

    cell: int
    begin: int
    numel: int
    shape: tuple[int, ...]


class EqualCuts:
    """The layout of stages 1 and 2. `size[cell]` is the length of a rank's part, in elements."""

    def __init__(self, size: Sequence[int], ranks: int) -> None:
        self.size, self.ranks = size, ranks

    def parts(self, place: Place, start: int, stop: int) -> Iterator[Part]:
        """Yield where elements `[start, stop)` of the parameter are stored, in order."""
        size = self.size[place.cell]
        at, end = place.begin + start, place.begin + stop
        while at < end:
            rank = at // size
            upto = min(end, (rank + 1) * size)
            yield Part(rank, at - rank * size, upto - rank * size)
            at = upto

    def least(self, cell: int, rank: int, used: int) -> int:
        """Return how many elements the cell of `rank` must at least have, if the group's parameters
        take `used` elements together.
        """
        return max(0, min(self.size[cell], used - rank * self.size[cell]))


class CutsOfEach:
    """The layout of stage 3."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def parts(self, place: Place, start: int, stop: int) -> Iterator[Part]:
        """Yield where elements `[start, stop)` of the parameter are stored, in order."""
        size, at = -(-place.numel // self.ranks), start
        while at < stop:
            rank = at // size
            upto = min(stop, (rank + 1) * size)
            yield Part(rank, place.begin + at - rank * size, place.begin + upto - rank * size)
            at = upto

    def least(self, cell: int, rank: int, used: int) -> int:
        """Return how many elements the cell of every rank must at least have: `used`, the sum of
        its parts.
        """
        return used


def lay_out(
    shapes: Sequence[Mapping[str, Sequence[int]]],
    ranks: int,
    of_each: bool,
    paddings: Sequence[Sequence[int]] | None,
) -> tuple[dict[str, Place], list[int]]:
    """Return the place of every parameter, and the number of elements that each cell uses.

    Args:
        shapes: for each cell, the names and logical shapes of its parameters, in stored order.
        of_each: whether each parameter is cut by itself (stage 3).
        paddings: for each cell, the elements of padding after each parameter; None for no padding.

    Raises:
        CheckpointError: a name occurs twice, or the paddings do not fit.
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
