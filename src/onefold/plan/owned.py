"""What updates of whole matrices add to a plan: the states, bytes, buffers and FLOPs of owners.

Each matrix is stepped by one rank, its owner (layout/owners.py, optim/whole.py). Owners differ,
so every figure here is one for each rank. A plan shows the largest of all ranks, each by itself.

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

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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


def stepped_whole(
    model: ModelShape | Stage, optimizer: str, stacks: bool = False
) -> frozenset[str]:
    """Return the names of the parameters that `optimizer` steps whole, none if it is element-wise.
    If it takes matrices alone, these are trained matrices, but no embedding, and nothing of the
    largest embedding's shape, which is the head. `onefold train` gives the same ones to Muon.

    Args:
        stacks: the optimizer takes stacks of matrices too, in three dimensions.
    """
    if PLANNED[optimizer].update != WHOLE:
        return frozenset()
    every = [p for u in model.units for p in u.parameters]
    if not PLANNED[optimizer].rest:
        return frozenset(p.name for p in every if p.trainable)
    head = max((p.shape for p in every if p.looked_up), default=())
    dims = (2, 3) if stacks else (2,)
    return frozenset(
        p.name
        for p in every
        if p.trainable and len(p.shape) in dims and not p.looked_up and p.shape != head
    )


# -- the figures -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Balance:
    """How evenly owners divide the updates of matrices.

    Attributes:
        matrices: their number. elements: of all of them.
        ranks: that own them.
        staying: matrices that lie with their owner, and travel nowhere.
        busiest: the work of the busiest owner over the mean of all ranks.
        least: the least that any division of whole matrices among these ranks can reach.
    """

    matrices: int
    elements: int
    ranks: int
    staying: int
    busiest: float
    least: float


@dataclass(frozen=True)
class _Rank:
    """The figures of one rank; see this module. Of offloaded state, `host_states` are on the host,
    `carried` are bytes that go up for the step and down again, and `host_numel` elements are stepped
    there.
    """

    states: int = 0
    host_states: int = 0
    sent: int = 0
    buffers: int = 0
    beside: int = 0
    flops: int = 0
    numel: int = 0
    touched: int = 0
    host_numel: int = 0
    carried: int = 0


@dataclass(frozen=True)
class OwnedMatrices:
    """The figures of every rank that exchanges pieces; see this module.

    Attributes:
        by_place: by place among these ranks.
        messages: successive exchanges of a step.
        level: the ranks that exchange: all, or those of a group.
    """

    by_place: tuple[_Rank, ...]
    balance: Balance
    messages: int
    level: Level

    def at(self, place: int) -> _Rank:
        """Return the figures of one rank, by its place."""
        return self.by_place[place]

    @cached_property
    def most(self) -> _Rank:
        """The largest of each figure over all ranks."""
        names = _Rank.__dataclass_fields__
        return _Rank(**{name: max(getattr(r, name) for r in self.by_place) for name in names})


@dataclass
class _Kind:
    """Matrices that travel in the same rounds: of one dtype, with or without their masters, on the
    device or from the host. `products`: their update multiplies matrices.
    """

    itemsize: int
    masters: bool
    host: bool
    products: bool
    matrices: list[Matrix] = field(default_factory=list)


def place_of(flat: ShardSpec, position: int | None = None) -> int:
    """Return the place of a rank among those that exchange pieces of `flat`."""
    position = flat.position if position is None else position
    if flat.whole_master:
        return 0
    return position // flat.topology.outer if flat.group_master else position


def owned_matrices(
    units: Sequence[UnitPlan], names: Iterable[str], optimizer: str
) -> OwnedMatrices | None:
    """Return the figures of all ranks for the parameters `names`, which are stepped whole; None if
    the optimizer is element-wise, or nothing is trained.
    """
    names, row = frozenset(names), PLANNED[optimizer]
    other = PLANNED[row.rest] if row.rest else row
    flats = [f for u in units for f in u.flats if f.trainable]
    if row.update != WHOLE or not flats:
        return None
    ranks = max(_ranks_of(f) for f in flats)
    out = [dict.fromkeys(_Rank.__dataclass_fields__, 0) for _ in range(ranks)]
    matrices: list[Matrix] = []
    of: dict[int, ShardSpec] = {}
    kinds: dict[tuple[int, bool, bool], _Kind] = {}
    for flat in flats:
        item, host = flat.dtypes.master.itemsize, flat.tiers is not None
        states, numel = ("host_states", "host_numel") if host else ("states", "numel")
        for slot in flat.layout.slots:
            if not slot.numel:
                continue
            pieces = pieces_of(flat, slot)
            if slot.name in names:
                matrix = Matrix(len(matrices), slot.shape, pieces)
                matrices.append(matrix)
                of[matrix.key] = flat
                known = kinds.setdefault(
                    (item, flat.shares_memory, host),
                    _Kind(item, not flat.shares_memory, host, bool(row.rest)),
                )
                known.matrices.append(matrix)
                continue
            for place, start, stop in pieces:
                held = stop - start
                out[place][states] += other.elementwise_states * held * item + other.number_bytes
                out[place][numel] += held
                out[place]["touched"] += 0 if host else touched_by(other) * held
    owners = assign(matrices, ranks)
    for matrix in matrices:
        flat, mine = of[matrix.key], out[owners[matrix.key]]
        item, host = flat.dtypes.master.itemsize, flat.tiers is not None
        kept = row.tensor_bytes(matrix.shape, item)
        mine["host_states" if host else "states"] += kept + row.number_bytes
        mine["flops"] += product_flops(matrix.shape) if row.rest else 0
        mine["numel"] += matrix.numel
        mine["touched"] += touched_by(row) * matrix.numel
        if host:
            mine["carried"] += kept
            for place, start, stop in matrix.pieces:  # gradients and masters up, masters down
                out[place]["carried"] += 2 * (stop - start) * item
    messages = 0
    for kind in kinds.values():
        elements = sent(kind.matrices, owners, ranks, kind.masters)
        todo = rounds(kind.matrices, owners)
        messages += (2 + kind.masters) * len(todo)
        for place, (buffers, beside) in enumerate(_buffers(todo, owners, ranks, kind)):
            out[place]["sent"] += elements[place] * kind.itemsize
            out[place]["buffers"] = max(out[place]["buffers"], buffers)
            out[place]["beside"] = max(out[place]["beside"], beside)
    busiest, least = balance(matrices, owners, ranks)
    staying = sum({rank for rank, _, _ in m.pieces} == {owners[m.key]} for m in matrices)
    return OwnedMatrices(
        tuple(_Rank(**each) for each in out),
        Balance(len(matrices), sum(m.numel for m in matrices), ranks, staying, busiest, least),
        messages,
        "intra-group" if flats[0].group_master and flats[0].topology.two_levels else "all",
    )


def _ranks_of(flat: ShardSpec) -> int:
    """Return how many ranks exchange pieces of a flat buffer."""
    if flat.whole_master:
        return 1
    return flat.topology.inner if flat.group_master else flat.ranks


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
    todo: Sequence[Sequence[Matrix]], owners: dict[int, int], ranks: int, kind: _Kind
) -> list[tuple[int, int]]:
    """Return (`buffers`, `beside`) of each rank, in the order of events of the step
    (optim/whole.py).
    """
    if ranks == 1:  # each is stepped where it lies
        return [(0, max(_temporaries(m, kind) for some in todo for m in some))]
    times = 1 + kind.masters
    own, temporaries = ([[0] * ranks for _ in todo] for _ in range(2))  # by round, then by place
    there, back = ([[0] * ranks for _ in todo] for _ in range(2))  # buffers, the same
    for at, some in enumerate(todo):
        between: dict[tuple[int, int], list[int]] = {}
        for m in some:
            owner = owners[m.key]
            own[at][owner] += m.numel
            temporaries[at][owner] = max(temporaries[at][owner], _temporaries(m, kind))
            for place, start, stop in m.pieces:
                if place != owner:
                    between.setdefault((place, owner), []).append(stop - start)
        for ends, sizes in between.items():
            # One piece alone is sent from where it lies, to where it belongs
            if len(sizes) > 1 or kind.host:
                for place in ends:
                    there[at][place] += times * sum(sizes)
                    back[at][place] += sum(sizes)
    found = []
    for place in range(ranks):
        # In elements, as the ledger is told of them
        begin = [[2 * a[place], b[place]] for a, b in zip(own, there, strict=True)]
        end = [[-b[place], -a[place]] for a, b in zip(own, back, strict=True)]
        changes = [*begin[0]]
        for at in range(len(todo)):
            changes += begin[at + 1] if at + 1 < len(todo) else []
            changes += [-there[at][place], -own[at][place]]
            changes += end[at - 1] if at else []
            changes += [back[at][place]]
        peak = max(itertools.accumulate(changes))
        beside = max(each[place] for each in temporaries)
        found.append((peak * kind.itemsize, beside))
    return found


def _temporaries(matrix: Matrix, kind: _Kind) -> int:
    """Return the bytes of tensors that one update makes. With products: the momentum's step in the
    masters' dtype, two copies of it in the dtype of the products, and two products of it with
    itself. Else a root of second moments, and the step.
    """
    if not kind.products:
        return 2 * matrix.numel * kind.itemsize
    if len(matrix.shape) < 2 or not matrix.numel:
        return 0
    rows, columns = matrix.shape[-2:]
    least = min(rows, columns)
    stack = prod(matrix.shape[:-2])
    return (
        matrix.numel * (kind.itemsize + 2 * _PRODUCTS.itemsize)
        + 2 * stack * least**2 * _PRODUCTS.itemsize
    )
