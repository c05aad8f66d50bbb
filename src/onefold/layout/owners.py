"""Who steps which matrix, when an update looks at whole matrices. Pure: the step and the plan ask it.

Each rank holds an interval of a matrix. One rank, its *owner*, gets the other pieces, makes the
update, and sends the new pieces back:

    rank 0    [ Q | K'   ]            gradient pieces of K ──► rank 1
    rank 1    [ 'K | V   ]            owner of K: update ──► new pieces of K to rank 0
    rank 2    [ O        ]            owner of O: it has all of it, which travels nowhere

`assign` gives matrices to owners, the longest update first. `rounds` puts the matrices in the order
in which they travel: in each round every owner has about as much to do as the others.

FLOPs are those of five Newton-Schulz iterations (Jordan et al., Muon, 2024): for an m × n matrix with
m ≤ n each multiplies X Xᵀ (2 m² n), its square (2 m³), and their sum with X (2 m² n).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

#: Elements of the matrices that one owner gets in one round, unless one matrix has more.
ROUND = 8 << 20
_ITERATIONS = 5
#: Reads and writes of the rest of an update (momentum, decay), in FLOPs for each element: what an
#: accelerator multiplies while it moves some forty bytes.
_PER_ELEMENT = 4000


@dataclass(frozen=True)
class Matrix:
    """A parameter that is stepped whole.

    Attributes:
        key: whatever tells it from the others; the same on every rank.
        shape: of the matrix, or of a stack of matrices in its last two dimensions.
        pieces: (rank, start, stop) of the elements that each rank holds, in order, none empty.
    """

    key: int
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int, int], ...]

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def work(self) -> int:
        """FLOPs of its update."""
        return product_flops(self.shape) + _PER_ELEMENT * self.numel


def product_flops(shape: Sequence[int]) -> int:
    """Return the FLOPs of the matrix products in the update of a matrix. Of three dimensions, the first
    counts the matrices of a stack; of more (convolutions), all but the first are one.
    """
    numel = prod(shape)
    if len(shape) < 2 or not numel:
        return 0
    stack, rows, columns = (
        (shape[0], shape[1], shape[2]) if len(shape) == 3 else (1, shape[0], numel // shape[0])
    )
    m, n = sorted((rows, columns))
    return stack * _ITERATIONS * (4 * m * m * n + 2 * m**3)


#: How far the busiest owner may be above the mean of all ranks, if fewer bytes travel so.
SLACK = 1.05


def assign(
    matrices: Iterable[Matrix], ranks: int, known: Mapping[int, int] | None = None
) -> dict[int, int]:
    """Return the owner of each matrix, by its key: matrices that lie on one rank first, and the
    longest updates first, each to the rank that holds most of it, as long as that has no more than
    `SLACK` of its share to do; else to the rank that has the least. No rank can do less than the longest update takes.

    Args:
        ranks: their number.
        known: owners that were chosen before, and stay. Their keys may be among `matrices` or not.
    """
    every, out = sorted(matrices, key=lambda m: (-m.work, m.key)), dict(known or {})
    loads = [0] * ranks
    for matrix in (m for m in every if m.key in out):
        loads[out[matrix.key]] += matrix.work
    # Those on one rank are given first: they are what may travel nowhere
    new = sorted((m for m in every if m.key not in out), key=lambda m: len(m.pieces) > 1)
    total = sum(matrix.work for matrix in every)
    share = max([total / ranks, *(m.work for m in new)]) * SLACK
    for matrix in new:
        held = Counter[int]()
        for rank, start, stop in matrix.pieces:
            held[rank] += stop - start
        fitting = [rank for rank in held if loads[rank] + matrix.work <= share]
        owner = loads.index(min(loads))
        if fitting:
            owner = max(fitting, key=lambda rank: (held[rank], -loads[rank], -rank))
        out[matrix.key] = owner
        loads[owner] += matrix.work
    return out


def rounds(matrices: Iterable[Matrix], owners: Mapping[int, int]) -> list[list[Matrix]]:
    """Return the matrices in the order in which they travel. In each round an owner gets the next
    of its matrices, longest first: one, or several small ones that have at most `ROUND` elements.
    """
    out: list[list[Matrix]] = []
    at: dict[int, tuple[int, int]] = {}  # the round of an owner, and its elements there
    for matrix in sorted(matrices, key=lambda m: (-m.work, m.key)):
        number, taken = at.get(owners[matrix.key], (0, 0))
        if taken and taken + matrix.numel > ROUND:
            number, taken = number + 1, 0
        at[owners[matrix.key]] = number, taken + matrix.numel
        if number == len(out):
            out.append([])
        out[number].append(matrix)
    return out


def sent(
    matrices: Iterable[Matrix], owners: Mapping[int, int], ranks: int, masters: bool
) -> list[int]:
    """Return the elements that each rank sends in one step. All ranks together send each element of a
    matrix that is not its owner's once with the gradients, and once back: 2 Ψ / N a rank for Ψ
    elements that are cut evenly and owned evenly, or 3 Ψ / N where the weights (`masters`) travel too.
    """
    out = [0] * ranks
    for matrix in matrices:
        owner = owners[matrix.key]
        for rank, start, stop in matrix.pieces:
            if rank != owner:
                out[rank] += (stop - start) * (2 if masters else 1)
                out[owner] += stop - start
    return out


def balance(
    matrices: Iterable[Matrix], owners: Mapping[int, int], ranks: int
) -> tuple[float, float]:
    """Return (the FLOPs of the busiest owner over the mean of all ranks, the least that any
    division of whole matrices among these ranks can reach).
    """
    loads, longest = [0] * ranks, 0
    for matrix in matrices:
        loads[owners[matrix.key]] += matrix.work
        longest = max(longest, matrix.work)
    mean = sum(loads) / ranks
    return (max(loads) / mean, max(1.0, longest / mean)) if mean else (1.0, 1.0)
