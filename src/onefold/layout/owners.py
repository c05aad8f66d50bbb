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

import heapq
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
        return update_flops(self.shape)


def update_flops(shape: Sequence[int]) -> int:
    """Return the FLOPs of the update of a matrix. Of three dimensions, the first counts the matrices
    of a stack; of more (convolutions), all but the first are one.
    """
    return product_flops(shape) + _PER_ELEMENT * prod(shape)


def product_flops(shape: Sequence[int]) -> int:
    """Return those of its FLOPs that are matrix products."""
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
    """Return the owner of each matrix, by its key.

    A rank that holds most of a matrix becomes its owner, as long as it has no more than `SLACK` of
    its share to do; else the rank that has the least. The longest updates are given first; or those
    of matrices that lie on one rank before them, if all are divided about as evenly so. No rank can
    do less than the longest update takes.

    Args:
        ranks: their number.
        known: owners that were chosen before, and stay. Their keys may be among `matrices` or not.
    """
    every, known = list(matrices), known or {}
    loads = [0] * ranks
    for matrix in every:
        if matrix.key in known:
            loads[known[matrix.key]] += matrix.work
    new = sorted((m for m in every if m.key not in known), key=lambda m: (-m.work, m.key))
    total = sum(matrix.work for matrix in every)
    share = max(total / ranks, new[0].work if new else 0) * SLACK
    longest, busiest = _given(new, loads, share)
    stay, rest = {}, []
    for matrix in new:
        rank = matrix.pieces[0][0] if len(matrix.pieces) == 1 else None
        if rank is not None and loads[rank] + matrix.work <= share:
            stay[matrix.key] = rank
            loads[rank] += matrix.work
        else:
            rest.append(matrix)
    others, with_them = _given(rest, loads, share)
    return {**known, **(stay | others if with_them <= max(share, busiest) else longest)}


def _given(
    matrices: Sequence[Matrix], loads: Sequence[int], share: float
) -> tuple[dict[int, int], int]:
    """Return (the owners of matrices that are given away in this order, what the busiest has to do).

    Args:
        loads: what each rank has to do before.
        share: what a rank should have to do at most.
    """
    out: dict[int, int] = {}
    loads = list(loads)
    least = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(least)
    for matrix in matrices:
        held: dict[int, int] = {}
        for rank, start, stop in matrix.pieces:
            held[rank] = held.get(rank, 0) + stop - start
        fitting = [rank for rank in held if loads[rank] + matrix.work <= share]
        if fitting:
            owner = max(fitting, key=lambda rank: (held[rank], -loads[rank], -rank))
        else:
            while least[0][0] != loads[least[0][1]]:  # it has got more since
                heapq.heapreplace(least, (loads[least[0][1]], least[0][1]))
            owner = least[0][1]
        out[matrix.key] = owner
        loads[owner] += matrix.work
    return out, max(loads)


def rounds(
    matrices: Iterable[Matrix], owners: Mapping[int, int], room: int = ROUND
) -> list[list[Matrix]]:
    """Return the matrices in the order in which they travel. In each round an owner gets the next
    of its matrices, longest first: one, or several small ones that have at most `room` elements.
    """
    out: list[list[Matrix]] = []
    at: dict[int, tuple[int, int]] = {}  # the round of an owner, and its elements there
    for matrix in sorted(matrices, key=lambda m: (-m.work, m.key)):
        number, taken = at.get(owners[matrix.key], (0, 0))
        if taken and taken + matrix.numel > room:
            number, taken = number + 1, 0
        at[owners[matrix.key]] = number, taken + matrix.numel
        if number == len(out):
            out.append([])
        out[number].append(matrix)
    return out


@dataclass(frozen=True)
class Traffic:
    """What a step sends, in elements, by rank.

    Attributes:
        gradients: pieces of gradients that the rank sends to owners.
        back: new pieces that it sends as an owner.
        matrices: their number. staying: those that lie with their owner, and travel nowhere.
    """

    gradients: tuple[int, ...]
    back: tuple[int, ...]
    matrices: int
    staying: int

    def sent(self, rank: int, masters: bool) -> int:
        """Elements that a rank sends. `masters`: pieces of the weights travel to owners too."""
        return self.gradients[rank] * (2 if masters else 1) + self.back[rank]


def traffic(matrices: Iterable[Matrix], owners: Mapping[int, int], ranks: int) -> Traffic:
    """Return what one step sends. All ranks together send each element of a matrix that is not its
    owner's once with the gradients, and once back: 2 Ψ / N a rank for Ψ elements that are cut evenly
    and owned evenly, or 3 Ψ / N where weights travel too.
    """
    gradients, back = [0] * ranks, [0] * ranks
    count = staying = 0
    for matrix in matrices:
        owner = owners[matrix.key]
        count += 1
        staying += {rank for rank, _, _ in matrix.pieces} == {owner}
        for rank, start, stop in matrix.pieces:
            if rank != owner:
                gradients[rank] += stop - start
                back[owner] += stop - start
    return Traffic(tuple(gradients), tuple(back), count, staying)


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
