"""What a rank sends in a step, in closed form, by level: all ranks at once, those of its group ("intra-group"), or one
of each group ("inter-group").

A move over groups is two legs (layout/spec.py). Each leg is equal bytes to each peer of its
level, so that the bytes to other nodes follow from who stands where. The counts are those of the
traffic ledger (`TrafficLedger.by_move`, `by_link`), to the byte.

| leg                                           | of each buffer, P bytes         | how often in a step of m micro-batches            |
|-----------------------------------------------|---------------------------------|---------------------------------------------------|
| gather, inter-group, then intra-group         | an interval, then a shard       | as the stage says (above)                         |
| gather from a second copy, intra-group        | a shard                         | the same; inter-group once, if it is trained      |
| reduction, intra-group, then inter-group      | a shard, then an interval       | m, or once at the boundary; inter-group once where |
|                                               |                                 | gradients are divided in the group                |
| sums to the other groups (HSDP, MiCS)         | an interval                     | as the inter-group hop of the reduction           |
| sums to all, inter-group, then intra-group    | an interval, then a shard       | as the reduction                                  |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from onefold.comm import MOVES
from onefold.layout import Hop, Level, ShardSpec, Topology
from onefold.plan.states import UnitPlan
from onefold.recipe import Recipe
from onefold.recipe.rows import GROUP

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


def gathered(flat: ShardSpec) -> list[tuple[Level, int]]:
    """(level, bytes) that one gather sends to this rank's peers, from the ranks whose masters (or
    copies) together are the whole, each once.
    """
    inner, outer = flat.topology.inner, flat.topology.outer
    inside: tuple[Level, int] = "intra-group", (inner - 1) * outer * flat.each
    if flat.has_secondary or (outer > 1 and flat.group_master and not flat.whole_master):
        return [inside]
    if flat.whole_master:
        return []
    if not flat.topology.two_levels:
        return [("all", (flat.ranks - 1) * flat.each)]
    return [("inter-group", (outer - 1) * flat.each), inside]


def renewed(flat: ShardSpec) -> list[tuple[Level, int]]:
    """The same of what brings a second copy up to date, before it is gathered from."""
    if not (flat.has_secondary and flat.trainable):
        return []
    level: Level = "inter-group" if flat.topology.two_levels else "all"
    return [(level, (flat.topology.outer - 1) * flat.each)]


def part_bytes(flat: ShardSpec, hop: Hop) -> int:
    """What one peer is sent on a hop of a reduction."""
    if flat.reduce_codec is not None and flat.encodes(hop):
        return flat.reduce_codec.encoded_bytes(hop.own)
    return hop.own * flat.dtypes.wire.itemsize


def gather_legs(flat: ShardSpec, gathers: int) -> list[Leg]:
    """Of `gathers` gathers of one buffer in a step."""
    if not gathers:
        return []
    phase: Phase = "first forward" if flat.resident else "both"
    again = [
        Leg("all-gather", True, level, gathers * nbytes, gathers, phase)
        for level, nbytes in gathered(flat)
    ]
    once = [
        Leg("all-gather", True, level, nbytes, 1, "first forward")
        for level, nbytes in renewed(flat)
    ]
    return again + once


def reduction_legs(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> list[Leg]:
    """Of the gradients of one buffer, and of its sums on their way to who holds them too."""
    times = 1
    phase: Phase = "last backward" if recipe.reduce_at == "boundary" else "backward"
    kind = "all-reduce" if flat.whole_master else "reduce-scatter"
    legs = []
    for hop, times in hops_in_a_step(flat, recipe, micro_batches):
        if hop.level == "inter-group" and recipe.gradients.over == GROUP:
            phase = "last backward"
        nbytes = times * (hop.size - 1) * part_bytes(flat, hop)
        by_backend = flat.added_by(hop) == "backend"
        legs.append(Leg(kind, False, hop.level, nbytes, times, phase, by_backend))
    for hop in flat.broadcast_back:
        nbytes = times * (hop.size - 1) * hop.own * flat.dtypes.wire.itemsize
        legs.append(Leg("all-reduce", True, hop.level, nbytes, times, phase))
    return legs


def merged(legs: Iterable[Leg]) -> list[Leg]:
    """One leg of each kind, empty ones left out."""
    kinds: dict[tuple[Any, ...], list[Leg]] = {}
    for leg in legs:
        kind = leg.move, leg.gathers, leg.level, leg.phase, leg.by_backend
        kinds.setdefault(kind, []).append(leg)
    found = [
        replace(
            same[0], nbytes=sum(leg.nbytes for leg in same), calls=sum(leg.calls for leg in same)
        )
        for same in kinds.values()
    ]
    return [leg for leg in found if leg.nbytes]


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


def wire(units: Sequence[UnitPlan], recipe: Recipe, micro_batches: int = 1) -> dict[str, int]:
    """Payload bytes that a rank sends in one optimizer step with `micro_batches` forward and
    backward passes, by move.

    All but the last micro-batch run under `onefold.no_sync`. Every unit is used once in each pass.
    """
    out = dict.fromkeys(MOVES, 0)
    for leg in legs_of(units, recipe, micro_batches):
        out[leg.move] += leg.nbytes
    return {k: v for k, v in out.items() if v}


def calls_of(units: Sequence[UnitPlan], recipe: Recipe, micro_batches: int) -> dict[str, int]:
    """Collectives of a step by move: one for each flat buffer that travels."""
    out = dict.fromkeys(MOVES, 0)
    reductions = micro_batches if recipe.reduce_at == "micro-batch" else 1
    for unit in units:
        for flat in unit.flats:
            out["all-gather"] += gathers_of(unit, flat, recipe, micro_batches)
            if flat.trainable:
                out["all-reduce" if flat.whole_master else "reduce-scatter"] += reductions
    return out


def legs_of(units: Sequence[UnitPlan], recipe: Recipe, micro_batches: int = 1) -> list[Leg]:
    """The same by level, kind of move and phase.

    Raises:
        ValueError: less than one micro-batch.
    """
    if micro_batches < 1:
        raise ValueError(f"{micro_batches} micro-batches: expected at least 1.")
    found = []
    for unit in units:
        for flat in (f for f in unit.flats if f.ranks > 1):
            found += gather_legs(flat, gathers_of(unit, flat, recipe, micro_batches))
            found += reduction_legs(flat, recipe, micro_batches) if flat.trainable else []
    return merged(found)


def gathers_of(unit: UnitPlan, flat: ShardSpec, recipe: Recipe, micro_batches: int) -> int:
    """How often a step gathers this buffer over the wire."""
    if flat.resident or flat.whole_master:
        stale = flat.resident and flat.trainable and not flat.whole_master
        return 1 if stale else 0
    return launches_of(unit, flat, recipe, micro_batches)


def launches_of(
    unit: UnitPlan, flat: ShardSpec, recipe: Recipe, micro_batches: int, backward: bool = True
) -> int:
    """How often a step makes the whole of a buffer that is not kept, over the wire or not; with
    `backward=False` in forward passes only.
    """
    again = backward and recipe.reshard_after_forward and not (unit.looks_up_only or unit.turns)
    return 0 if flat.resident else micro_batches * (2 if again else 1)


def reductions_of(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> int:
    """How often a step hands sums over: at each micro-batch, or at the boundary where they wait for
    it whole or in the group.
    """
    return times_by_hop(flat, recipe, micro_batches)[-1]


def hops_in_a_step(
    flat: ShardSpec, recipe: Recipe, micro_batches: int
) -> Iterator[tuple[Hop, int]]:
    """Each hop of a reduction, and how often a step takes it."""
    return zip(flat.hops, times_by_hop(flat, recipe, micro_batches), strict=True)


def times_by_hop(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> tuple[int, ...]:
    """How often a step takes each hop of a reduction: where gradients are divided in the group, the
    group's sums wait for the boundary and cross once.
    """
    times = micro_batches if recipe.reduce_at == "micro-batch" else 1
    once = recipe.gradients.over == GROUP
    return tuple(1 if once and hop.level == "inter-group" else times for hop in flat.hops)


def puts_of(
    unit: UnitPlan, flat: ShardSpec, recipe: Recipe, micro_batches: int, backward: bool = True
) -> int:
    """How often a step reads this rank's masters for a buffer that is not kept: once for what is
    encoded or copied, if it is trained.
    """
    if flat.gather_codec is not None or flat.has_secondary:
        return int(flat.trainable)
    return launches_of(unit, flat, recipe, micro_batches, backward)
