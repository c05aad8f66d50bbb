"""What a rank sends in a step, by level: all ranks at once, those of its group ("intra-group"), or one
of each group ("inter-group").

A move over groups is two legs (layout/spec.py). Each leg is equal bytes to each peer of its
level, so that the bytes to other nodes follow from who stands where. The counts are those of the
traffic ledger (`TrafficLedger.by_move`, `by_link`), to the byte.

| leg                                           | of each buffer, P bytes         | how often in a step of m micro-batches            |
|-----------------------------------------------|---------------------------------|---------------------------------------------------|
| gather, inter-group, then intra-group         | an interval, then a shard       | as the stage says (plan/states.py)                |
| gather from a second copy, inside             | a shard                         | the same; across once, if it is trained           |
| reduction, inside, then across                | a shard, then an interval       | m, or once at the boundary; across once where     |
|                                               |                                 | gradients are divided in the group                |
| sums to the other groups, across (HSDP, MiCS) | an interval                     | as the reduction across                           |
| sums to all, across, then inside (stage 0)    | an interval, then a shard       | as the reduction                                  |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from onefold.comm.topology import inner_of
from onefold.layout import Level, ShardSpec, Topology
from onefold.recipe import Recipe
from onefold.recipe.groups import GROUP

#: What a move can hide behind. "first forward" and "last backward" are those of one micro-batch;
#: "both" is all compute.
Phase = Literal["forward", "backward", "both", "first forward", "last backward", "boundary"]


@dataclass(frozen=True)
class Leg:
    """One kind of move on one level.

    Attributes:
        move: as the ledger calls it. gathers: each rank sends the same to all (a ring can carry
            it), else each peer its own part.
        nbytes: payload that one rank sends in a step. calls: collectives. by_backend: sums that
            NCCL makes on the way.
    """

    move: str
    gathers: bool
    level: Level
    nbytes: int
    calls: int
    phase: Phase
    by_backend: bool = False


def gather_legs(flat: ShardSpec, gathers: int) -> list[Leg]:
    """Of `gathers` gathers of one buffer in a step."""
    if not gathers:
        return []
    phase: Phase = "first forward" if flat.resident else "both"
    legs = [
        Leg("all-gather", True, move.level, gathers * move.peers * move.nbytes, gathers, phase)
        for move in flat.gather_moves
    ]
    return legs + [
        Leg("all-gather", True, move.level, move.peers * move.nbytes, 1, "first forward")
        for move in flat.renewal_moves
    ]


def reduction_legs(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> list[Leg]:
    """Of the gradients of one buffer."""
    times = micro_batches if recipe.reduce_at == "micro-batch" else 1
    phase: Phase = "last backward" if recipe.reduce_at == "boundary" else "backward"
    kind = "all-reduce" if flat.whole_master else "reduce-scatter"
    legs = []
    for hop, move in zip(flat.hops, flat.reduce_moves, strict=True):
        if hop.level == "inter-group" and recipe.gradients.over == GROUP:
            times, phase = 1, "last backward"
        nbytes, by_backend = times * move.peers * move.nbytes, flat.added_by(hop) == "backend"
        legs.append(Leg(kind, False, hop.level, nbytes, times, phase, by_backend))
    for move in flat.broadcast_moves:
        nbytes = times * move.peers * move.nbytes
        legs.append(Leg("all-reduce", True, move.level, nbytes, times, phase))
    return legs


def merged(legs: Iterable[Leg]) -> list[Leg]:
    """One leg of each kind, empty ones left out."""
    found: dict[Leg, Leg] = {}
    for leg in legs:
        key = replace(leg, nbytes=0, calls=0)
        before = found.get(key, key)
        found[key] = replace(leg, nbytes=before.nbytes + leg.nbytes, calls=before.calls + leg.calls)
    return [leg for leg in found.values() if leg.nbytes]


def by_level(legs: Iterable[Leg]) -> dict[Level, int]:
    """Bytes by level."""
    out: dict[Level, int] = {}
    for leg in legs:
        out[leg.level] = out.get(leg.level, 0) + leg.nbytes
    return out


# -- who stands where ----------------------------------------------------------------------------


def topology_of(recipe: Recipe, ranks: int, per_node: int | None = None) -> Topology:
    """The groups of a recipe; a node is `per_node` ranks in a row, all where nobody says.

    Raises:
        ValueError: the groups do not divide the ranks.
    """
    return _topology(recipe.group, ranks, per_node)


@lru_cache(maxsize=256)
def _topology(group: int | str | None, ranks: int, per_node: int | None) -> Topology:
    return Topology(ranks, inner_of(group, range(ranks), per_node))


@lru_cache(maxsize=4096)
def elsewhere(topology: Topology, per_node: int | None, rank: int, level: Level) -> tuple[int, int]:
    """(peers of this rank on a level, those of them that are on other nodes)."""
    inner = topology.inner
    numbers: Sequence[int] = range(topology.size)
    if level == "intra-group":
        numbers = range(rank // inner * inner, rank // inner * inner + inner)
    elif level == "inter-group":
        numbers = range(rank % inner, topology.size, inner)
    far = sum(n // per_node != rank // per_node for n in numbers) if per_node else 0
    return len(numbers) - 1, far


def by_link(
    sent: Mapping[Level, int], topology: Topology, per_node: int | None, rank: int
) -> dict[str, int]:
    """What a rank sends on each level, by link: "inside" its node and "between" nodes; as
    `TrafficLedger.by_link` counts it.
    """
    between = 0
    for level, nbytes in sent.items():
        peers, far = elsewhere(topology, per_node, rank, level)
        between += nbytes * far // peers if peers else 0
    return {"inside": sum(sent.values()) - between, "between": between}
