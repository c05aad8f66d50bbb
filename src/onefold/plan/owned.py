"""What updates of whole matrices add to a plan: the states, bytes, buffers and FLOPs of owners.

Each matrix is stepped by one rank, its owner (layout/owners.py, optim/whole.py). Owners differ,
so a plan shows the largest figure of all ranks, each by itself.

| figure    | what it counts, of one rank                                                               |
|-----------|-------------------------------------------------------------------------------------------|
| `states`  | the states of its matrices, whole, and those of its intervals of all other parameters     |
| `sent`    | pieces of gradients to owners (and of masters, unless every rank has them whole), and new |
|           | pieces back: 2 Ψ / N or 3 Ψ / N elements for Ψ that are cut                               |
| `buffers` | whole masters and gradients of a round and of the next, and pieces that travel together,  |
|           | as the ledger counts them at most                                                         |
| `beside`  | what the ledger does not count then: the temporaries of one update                        |
| `flops`   | the matrix products of its updates                                                        |

Which parameters are stepped whole (`stepped_whole`): all, or matrices of the body if the optimizer
takes no others. Embeddings, the head, norms and biases are then stepped by the row's `rest`.
"""  # fmt: skip

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod

import torch

from onefold.layout import Level, ShardSpec, Slot
from onefold.layout.owners import Matrix, assign, balance, product_flops, rounds, sent
from onefold.plan.rank import Stage, UnitPlan
from onefold.plan.shapes import ModelShape
from onefold.recipe.optimizers import PLANNED, WHOLE, KnownOptimizer

#: The dtype in which Newton-Schulz iterations compute.
_PRODUCTS = torch.bfloat16


# -- which parameters ------------------------------------------------------------------------------


def stepped_whole(model: ModelShape | Stage, optimizer: str) -> frozenset[str]:
    """Return the names of the parameters that `optimizer` steps whole, none if it is element-wise.
    If it takes matrices alone, these are trained matrices, but no embedding and no head: the last matrix
    of the first embedding's shape, in its unit if there is one. `onefold train` gives the same ones to
    Muon.
    """
    if PLANNED[optimizer].update != WHOLE:
        return frozenset()
    every = [p for u in model.units for p in u.parameters]
    if not PLANNED[optimizer].rest:
        return frozenset(p.name for p in every if p.trainable)
    matrices = [p for p in every if len(p.shape) == 2 and not p.looked_up]
    table = next((p for p in every if p.looked_up), None)
    alike = [p for p in matrices if table is not None and p.shape == table.shape]
    beside = [p for u in model.units if table in u.parameters for p in alike if p in u.parameters]
    head = (beside or alike)[-1:]
    return frozenset(p.name for p in matrices if p.trainable and p not in head)


# -- the figures -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Balance:
    """How evenly owners divide the updates of matrices.

    Attributes:
        matrices: their number. ranks: that own them.
        busiest: the work of the busiest owner over the mean of all ranks.
        least: the least that any division of whole matrices among these ranks can reach.
    """

    matrices: int
    ranks: int
    busiest: float
    least: float


@dataclass(frozen=True)
class Owned:
    """The figures of one rank, or the largest of all ranks; see this module.

    Attributes:
        touched: bytes that its updates move on the device.
        host_states, host_touched: the same of offloaded state. carried: bytes of it that go up for the
            step and down again.
        messages: successive exchanges of a step.
        level: the ranks that exchange: all, or those of a group.
    """

    states: int
    sent: int
    buffers: int
    beside: int
    flops: int
    touched: int
    host_states: int
    host_touched: int
    carried: int
    messages: int
    level: Level
    balance: Balance


_FIGURES = [f.name for f in fields(Owned)][:9]


def place_of(flat: ShardSpec) -> tuple[int, int]:
    """Return (this rank's place among those that exchange pieces of `flat`, their number)."""
    if flat.whole_master:
        return 0, 1
    if flat.group_master:
        return flat.position // flat.topology.outer, flat.topology.inner
    return flat.position, flat.ranks


def owned_matrices(
    units: Sequence[UnitPlan], names: Iterable[str], optimizer: str, own: bool = False
) -> Owned | None:
    """Return the figures for the parameters `names`, which are stepped whole; None if the optimizer is
    element-wise, or nothing is trained.

    Args:
        own: the figures of the rank that has these units; else the largest of each figure.
    """
    names, row = frozenset(names), PLANNED[optimizer]
    other = PLANNED[row.rest] if row.rest else row
    flats = [f for u in units for f in u.flats if f.trainable]
    if row.update != WHOLE or not flats:
        return None
    ranks = max(place_of(flat)[1] for flat in flats)
    out = {name: [0] * ranks for name in _FIGURES}
    matrices: list[Matrix] = []
    # Those that travel in the same rounds, by (bytes of an element, with their masters, on the host)
    kinds: dict[tuple[int, bool, bool], list[Matrix]] = {}
    for flat in flats:
        item, host = flat.dtypes.master.itemsize, flat.tiers is not None
        on = "host_" if host else ""
        for slot in filter(lambda slot: slot.numel, flat.layout.slots):
            pieces = pieces_of(flat, slot)
            if slot.name in names:
                matrices.append(Matrix(len(matrices), slot.shape, pieces))
                kinds.setdefault((item, not flat.shares_memory, host), []).append(matrices[-1])
                continue
            for at, start, stop in pieces:
                held = stop - start
                out[on + "states"][at] += (
                    other.elementwise_states * held * item + other.number_bytes
                )
                out[on + "touched"][at] += touched_by(other) * held
    owners, messages = assign(matrices, ranks), 0
    for (item, masters, host), some in kinds.items():
        for matrix in some:
            owner, kept = owners[matrix.key], row.tensor_bytes(matrix.shape, item)
            out["host_states" if host else "states"][owner] += kept + row.number_bytes
            out["flops"][owner] += product_flops(matrix.shape) if row.rest else 0
            out["touched"][owner] += touched_by(row) * matrix.numel
            temporaries = _temporaries(matrix, item, bool(row.rest))
            out["beside"][owner] = max(out["beside"][owner], temporaries)
            if host:
                out["carried"][owner] += kept
                for at, start, stop in matrix.pieces:  # gradients and masters up, masters down
                    out["carried"][at] += 2 * (stop - start) * item
        todo = rounds(some, owners)
        messages += (2 + masters) * len(todo)
        moved = sent(some, owners, ranks, masters)
        held_whole = _buffers(todo, owners, ranks, 1 + masters, host)
        for at in range(ranks):
            out["sent"][at] += moved[at] * item
            out["buffers"][at] = max(out["buffers"][at], held_whole[at] * item)
    return Owned(
        **{name: by[place_of(flats[0])[0]] if own else max(by) for name, by in out.items()},
        messages=messages,
        level="intra-group" if flats[0].group_master and flats[0].topology.two_levels else "all",
        balance=Balance(len(matrices), ranks, *balance(matrices, owners, ranks)),
    )


def pieces_of(flat: ShardSpec, slot: Slot) -> tuple[tuple[int, int, int], ...]:
    """Return (place, start, stop) of the elements of a parameter that each rank holds. Intervals are
    in the order of places, and equally long.
    """
    room = flat.own
    first, last = slot.start // room, (slot.end - 1) // room
    return tuple(
        (p, max(0, p * room - slot.start), min(slot.end, (p + 1) * room) - slot.start)
        for p in range(first, last + 1)
    )


def touched_by(optimizer: KnownOptimizer) -> int:
    """Return the bytes that an update moves for one element: it reads gradient and parameter and
    writes the parameter; it reads and writes states.
    """
    return 4 * (3 + 2 * optimizer.elementwise_states)


def _buffers(
    todo: Sequence[Sequence[Matrix]], owners: Mapping[int, int], ranks: int, times: int, host: bool
) -> list[int]:
    """Return the elements of each rank's buffers at most (optim/whole.py). `times`: 2 if masters travel
    with the gradients.
    """
    if ranks == 1:  # each is stepped where it lies
        return [0]
    # Elements by (round, place): of matrices, and of pieces that travel together
    own, pieces = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for at, some in enumerate(todo):
        between: dict[tuple[int, int], list[int]] = {}
        for m in some:
            own[at, owners[m.key]] += m.numel
            for place, start, stop in m.pieces:
                if place != owners[m.key]:
                    between.setdefault((place, owners[m.key]), []).append(stop - start)
        for ends, sizes in between.items():
            # One piece alone is sent from where it lies, to where it belongs
            if len(sizes) > 1 or host:
                pieces.update({(at, place): sum(sizes) for place in ends})

    def arrive(at: int, place: int) -> int:  # masters and gradients
        return 2 * own[at, place] + times * pieces[at, place]

    # While a round arrives, the one before is stepped, and masters and pieces of the last go back
    return [
        max(
            own[at - 1, place] + pieces[at - 1, place] + arrive(at, place) + arrive(at + 1, place)
            for at in range(len(todo))
        )
        for place in range(ranks)
    ]


def _temporaries(matrix: Matrix, item: int, products: bool) -> int:
    """Return the bytes of tensors that one update makes. With products: the momentum's step in the
    masters' dtype, two copies of it in the dtype of the products, and two products of it with
    itself. Else a root of second moments, and the step.
    """
    if not products:
        return 2 * matrix.numel * item
    if len(matrix.shape) < 2 or not matrix.numel:
        return 0
    *stack, rows, columns = matrix.shape
    squares = 2 * prod(stack) * min(rows, columns) ** 2
    return matrix.numel * (item + 2 * _PRODUCTS.itemsize) + squares * _PRODUCTS.itemsize
