"""What a rank sends in a step, by level: all ranks at once, those of its group ("inside"), or one
of each group ("across").

A move over groups is two legs (plan/division.py). Each leg is equal bytes to each peer of its
level, so that the bytes to other nodes follow from who stands where. The counts are those of the
traffic ledger (`TrafficLedger.by_move`, `by_link`), to the byte.

| leg                                           | of each buffer, P bytes         | how often in a step of m micro-batches            |
|-----------------------------------------------|---------------------------------|---------------------------------------------------|
| gather, across, then inside                   | an interval, then a shard       | as the stage says (plan/states.py)                |
| gather from a second copy, inside             | a shard                         | the same; across once, if it is trained           |
| reduction, inside, then across                | a shard, then an interval       | m, or once at the boundary; across once where     |
|                                               |                                 | gradients are divided in the group                |
| sums to the other groups, across (HSDP, MiCS) | an interval                     | as the reduction across                           |
| sums to all, across, then inside (stage 0)    | an interval, then a shard       | as the reduction                                  |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from onefold.plan.division import Hop, Level, encoded_bytes
from onefold.recipe import Recipe
from onefold.recipe.rows import GROUP

if TYPE_CHECKING:
    from onefold.plan.states import FlatPlan

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


def gather_legs(flat: FlatPlan, gathers: int) -> list[Leg]:
    """Of `gathers` gathers of one buffer in a step."""
    division, each = flat.division, flat.each
    if not gathers:
        return []
    phase: Phase = "first forward" if flat.resident else "both"
    hops = (
        division.copy_hops() if division.has_secondary else division.gather_hops(flat.whole_master)
    )
    legs = [
        Leg("all-gather", True, level, gathers * peers * parts * each, gathers, phase)
        for level, peers, parts in hops
    ]
    renewals = division.renewal_hops() if flat.trainable else ()
    return legs + [
        Leg("all-gather", True, level, peers * parts * each, 1, "first forward")
        for level, peers, parts in renewals
    ]


def reduction_legs(flat: FlatPlan, recipe: Recipe, micro_batches: int) -> list[Leg]:
    """Of the gradients of one buffer."""
    times = micro_batches if recipe.reduce_at == "micro-batch" else 1
    phase: Phase = "last backward" if recipe.reduce_at == "boundary" else "backward"
    move = "all-reduce" if flat.whole_master else "reduce-scatter"
    legs = []
    for hop in flat.hops:
        if hop.level == "across" and recipe.gradients.over == GROUP:
            times, phase = 1, "last backward"
        nbytes, by_backend = (
            times * (hop.size - 1) * hop_bytes(flat, hop),
            flat.division.added_by(hop) == "backend",
        )
        legs.append(Leg(move, False, hop.level, nbytes, times, phase, by_backend))
    for hop in flat.spreads:
        nbytes = times * (hop.size - 1) * hop.own * flat.dtypes.wire.itemsize
        legs.append(Leg("all-reduce", True, hop.level, nbytes, times, phase))
    return legs


def hop_bytes(flat: FlatPlan, hop: Hop) -> int:
    """What one peer is sent on a hop."""
    if flat.division.reduced is not None and flat.division.encodes(hop):
        return encoded_bytes(flat.division.reduced, hop.own)
    return hop.own * flat.dtypes.wire.itemsize


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
