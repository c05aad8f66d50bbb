"""What a rank sends in a step, in closed form, by level: to all ranks at once, to those of its
group ("intra-group"), or to one rank of each group ("inter-group"). And what the engine's own
kernels read and write of memory to encode, add up, copy and cast.

A move over groups is two legs (layout/spec.py). Each leg sends equal bytes to each peer of its
level, so the bytes to other nodes follow from the ranks' positions. The counts are those of the
traffic ledger (`TrafficLedger.by_move`, `by_link`), to the byte.

| leg                                           | of each buffer, P bytes         | how often in a step of m micro-batches             |
|-----------------------------------------------|---------------------------------|----------------------------------------------------|
| gather, inter-group, then intra-group         | an interval, then a shard       | by the stage (plan/states.py)                      |
| gather from a second copy, intra-group        | a shard                         | the same; inter-group once, if it is trained       |
| reduction, intra-group, then inter-group      | a shard, then an interval       | m, or once at the boundary; inter-group once if    |
|                                               |                                 | gradients are divided in the group                 |
| sums to the other groups (HSDP, MiCS)         | an interval                     | as the inter-group hop of the reduction            |
| sums to all, inter-group, then intra-group    | an interval, then a shard       | as the reduction                                   |

Memory that kernels read and write:

    gathers      this rank's interval once after a step: read in the compute dtype, written encoded
                 the whole at each gather: read encoded, written in the compute dtype
    reductions   on each hop, parts for others: read, written encoded; parts of others: read encoded, added to fp32 sums
    feedback     what encoding lost, read and written in fp32
    sums         on each hop, of the n elements that a rank sums: the parts of all N ranks read in the wire's dtype, the sum written;
                 if NCCL adds (reduce="native"), its sum is read and written once
    gradients    each is copied into its unit's buffer, or added to what an earlier micro-batch left there
    casts        of sums of an earlier hop or of several micro-batches to the wire's dtype, and of sums to the masters' dtype

These kernels run where the model is computed, so nothing hides them (ZeRO++, Wang et al. 2023,
section 3.4, fuses encoding into the kernels of the moves). `onefold.plan.times` says what share of
a copy's speed encoding reaches. Casts of masters for a gather are not counted: they run beside it,
on the stream of the copies to the device. On a calibrated machine reference steps have measured
copies and casts (`Software.handed_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from onefold.comm import MOVES
from onefold.layout import Hop, Level, ShardSpec, Topology
from onefold.plan.states import UnitPlan
from onefold.recipe import Recipe
from onefold.recipe.rows import GROUP

_FP32 = 4
#: The compute behind which a move can hide. "first forward" and "last backward" belong to one
#: micro-batch; "both" is all compute.
Phase = Literal["forward", "backward", "both", "first forward", "last backward", "boundary"]


@dataclass(frozen=True)
class Leg:
    """One kind of move on one level.

    Attributes:
        move: its name in the ledger.
        gathers: each rank sends the same bytes to all peers, which a ring can carry; otherwise each
            peer gets a part of its own.
        nbytes: payload that one rank sends in a step.
        calls: collectives in a step.
        by_backend: NCCL adds up on the way.
    """

    move: str
    gathers: bool
    level: Level
    nbytes: int
    calls: int
    phase: Phase
    by_backend: bool = False


def gathered(flat: ShardSpec) -> list[tuple[Level, int]]:
    """Return (level, bytes) that this rank sends to its peers in one gather of the whole, whose
    parts are masters or copies of them.
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
    """Return (level, bytes) that update a second copy, before the first gather from it."""
    if not (flat.has_secondary and flat.trainable):
        return []
    level: Level = "inter-group" if flat.topology.two_levels else "all"
    return [(level, (flat.topology.outer - 1) * flat.each)]


def part_bytes(flat: ShardSpec, hop: Hop) -> int:
    """Return the bytes that one peer gets on a hop of a reduction."""
    if flat.reduce_codec is not None and flat.encodes(hop):
        return flat.reduce_codec.encoded_bytes(hop.own)
    return hop.own * flat.dtypes.wire.itemsize


def gather_legs(flat: ShardSpec, gathers: int) -> list[Leg]:
    """Return the legs of `gathers` gathers of one buffer in a step."""
    if not gathers:
        return []
    phase: Phase = "first forward" if flat.resident else "both"
    each = [(leg, gathers, phase) for leg in gathered(flat)]
    once = [(leg, 1, "first forward") for leg in renewed(flat)]
    return [
        Leg("all-gather", True, level, times * nbytes, times, when)  # type: ignore[arg-type]
        for (level, nbytes), times, when in (*each, *once)
    ]


def reduction_legs(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> list[Leg]:
    """Return the legs of one buffer's gradients, and of its sums to other ranks that hold them."""
    times = 1
    phase: Phase = "last backward" if recipe.reduces_at == "boundary" else "backward"
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


@lru_cache(maxsize=4096)
def elsewhere(topology: Topology, per_node: int | None, rank: int, level: Level) -> tuple[int, int]:
    """Return (this rank's peers on a level, how many of them are on other nodes)."""
    inner = topology.inner
    numbers: Sequence[int] = range(topology.size)
    if level == "intra-group":
        numbers = range(rank // inner * inner, rank // inner * inner + inner)
    elif level == "inter-group":
        numbers = range(rank % inner, topology.size, inner)
    far = sum(n // per_node != rank // per_node for n in numbers) if per_node else 0
    return len(numbers) - 1, far


def wire(units: Sequence[UnitPlan], recipe: Recipe, micro_batches: int = 1) -> dict[str, int]:
    """Return the payload bytes that a rank sends in one optimizer step of `micro_batches`, by move.

    All micro-batches but the last run under `onefold.no_sync`. Each pass uses every unit once.
    """
    out = dict.fromkeys(MOVES, 0)
    for leg in legs_of(units, recipe, micro_batches):
        out[leg.move] += leg.nbytes
    return {k: v for k, v in out.items() if v}


def calls_of(units: Sequence[UnitPlan], recipe: Recipe, micro_batches: int) -> dict[str, int]:
    """Return the collectives of a step by move: one for each flat buffer that travels."""
    out = dict.fromkeys(MOVES, 0)
    reductions = micro_batches if recipe.reduces_at == "micro-batch" else 1
    for unit in units:
        for flat in unit.flats:
            out["all-gather"] += gathers_of(unit, flat, recipe, micro_batches)
            if flat.trainable:
                out["all-reduce" if flat.whole_master else "reduce-scatter"] += reductions
    return out


def legs_of(units: Sequence[UnitPlan], recipe: Recipe, micro_batches: int = 1) -> list[Leg]:
    """Return what a rank sends in a step: one leg for each kind of move, level and phase. Raises
    ValueError: less than one micro-batch.
    """
    if micro_batches < 1:
        raise ValueError(f"{micro_batches} micro-batches: expected at least 1.")
    kinds: dict[Leg, tuple[int, int]] = {}
    for unit, flat in ((u, f) for u in units for f in u.flats if f.ranks > 1):
        legs = gather_legs(flat, gathers_of(unit, flat, recipe, micro_batches))
        legs += reduction_legs(flat, recipe, micro_batches) if flat.trainable else []
        for leg in legs:
            kind = replace(leg, nbytes=0, calls=0)
            nbytes, calls = kinds.get(kind, (0, 0))
            kinds[kind] = nbytes + leg.nbytes, calls + leg.calls
    return [replace(kind, nbytes=n, calls=calls) for kind, (n, calls) in kinds.items() if n]


# -- how often in a step ---------------------------------------------------------------------------


def gathers_of(unit: UnitPlan, flat: ShardSpec, recipe: Recipe, micro_batches: int) -> int:
    """Return how often a step gathers this buffer over the wire."""
    if flat.whole_master:
        return 0
    if flat.resident:  # stale after a step
        return int(flat.trainable)
    return launches_of(unit, flat, recipe, micro_batches)


def launches_of(
    unit: UnitPlan, flat: ShardSpec, recipe: Recipe, micro_batches: int, backward: bool = True
) -> int:
    """Return how often a step makes the whole of a buffer that is not resident, over the wire or
    not; with `backward=False` in forward passes only.
    """
    again = backward and recipe.reshard_after_forward and not (unit.looks_up_only or unit.turns)
    return 0 if flat.resident else micro_batches * (2 if again else 1)


def puts_of(
    unit: UnitPlan, flat: ShardSpec, recipe: Recipe, micro_batches: int, backward: bool = True
) -> int:
    """Return how often a step reads this rank's masters for a buffer that is not resident. With a
    cached shard it does once, if the buffer is trained.
    """
    if flat.gather_codec is not None or flat.has_secondary:
        return int(flat.trainable)
    return launches_of(unit, flat, recipe, micro_batches, backward)


def hops_in_a_step(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> list[tuple[Hop, int]]:
    """Return each hop of a reduction, and how often a step takes it. If gradients are divided in
    the group, the group's sums wait for the boundary and cross once.
    """
    times = micro_batches if recipe.reduces_at == "micro-batch" else 1
    once = recipe.gradients.over == GROUP
    return [(hop, 1 if once and hop.level == "inter-group" else times) for hop in flat.hops]


def reductions_of(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> int:
    """Return how often a step hands sums over: as often as it takes the last hop."""
    return hops_in_a_step(flat, recipe, micro_batches)[-1][1]


# -- memory that kernels read and write ------------------------------------------------------------


def coded_bytes(units: Sequence[UnitPlan], recipe: Recipe, micro_batches: int = 1) -> float:
    """Return the bytes that encoding and decoding read and write in a step, on one rank."""
    total = 0.0
    for unit, flat in ((u, f) for u in units for f in u.flats):
        if flat.gather_codec is not None:
            part = flat.layout.shard_numel * flat.dtypes.compute.itemsize + flat.each
            launches = launches_of(unit, flat, recipe, micro_batches)
            total += launches * flat.ranks * part + puts_of(unit, flat, recipe, 1) * part
        if flat.trainable and flat.reduce_codec is not None:
            sums = 0.0
            for hop, times in hops_in_a_step(flat, recipe, micro_batches):
                if flat.encodes(hop):
                    each = hop.own * flat.dtypes.wire.itemsize + 2 * part_bytes(flat, hop)
                    each += 2 * _FP32 * hop.own
                    sums += times * (hop.size - 1) * each
            total += sums
    return total


def summed_bytes(units: Sequence[UnitPlan], recipe: Recipe, micro_batches: int = 1) -> float:
    """Return the bytes that adding up the parts of reductions reads and writes in a step, on one
    rank: N parts in one pass (comm/sums.py).

    Parts that arrive one by one (gloo) and encoded parts count nothing: the time of moves was
    measured with the former, and `coded_bytes` has the latter.
    """
    total = 0.0
    for flat in (f for u in units for f in u.flats if f.trainable and f.ranks > 1):
        sent = flat.dtypes.wire.itemsize
        for hop, times in hops_in_a_step(flat, recipe, micro_batches):
            adds = flat.added_by(hop)
            if adds != "pairwise":
                written = flat.landed if hop is flat.hops[-1] else flat.dtypes.sums
                parts = hop.size if adds == "at once" else 1
                total += times * added_bytes(hop.own, parts, sent, written.itemsize)
    return total


def added_bytes(numel: float, parts: int, wire: int, written: int) -> float:
    """Return the bytes that one pass reads and writes to add `parts` parts of `numel` elements,
    with `wire` and `written` bytes an element.

    No sum can move less: one addition for each element read is bound by memory on any GPU
    (Williams et al. 2009, Roofline).
    """
    return numel * (parts * wire + written)


def handled_bytes(units: Sequence[UnitPlan], recipe: Recipe, micro_batches: int = 1) -> float:
    """Return the bytes that copies and casts read and write in a step, on one rank."""
    flats = (f for u in units for f in u.flats if f.trainable and not f.unsharded)
    return sum(
        (_stored(f, recipe, micro_batches) + _passed_on(f, recipe, micro_batches) for f in flats),
        0.0,
    )


def _stored(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> float:
    """Bytes of copies of gradients into the buffer that is reduced."""
    d = flat.dtypes
    if recipe.reduces_at == "micro-batch" or micro_batches == 1:
        return micro_batches * flat.numel * (d.compute.itemsize + d.wire.itemsize)
    first, more = d.compute.itemsize + d.sums.itemsize, d.compute.itemsize + 2 * d.sums.itemsize
    return flat.numel * (first + (micro_batches - 1) * more)


def _passed_on(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> float:
    """Bytes of casts for further hops, and of sums on their way to the optimizer."""
    d, total, times = flat.dtypes, 0.0, 1
    late = recipe.reduces_at == "boundary" and micro_batches > 1
    for at, (hop, times) in enumerate(hops_in_a_step(flat, recipe, micro_batches)):
        # Parts for others are cast from the sums' dtype to the wire's; this rank's part stays, in
        # the wider dtype
        if d.sums != d.wire and (at > 0 or late):
            others = (hop.span - hop.own) * (d.sums.itemsize + d.wire.itemsize)
            total += times * (others + hop.own * (d.sums.itemsize - d.wire.itemsize))
    # Added to the sums of earlier micro-batches
    total += (times - 1) * flat.own * 3 * d.master.itemsize
    if flat.landed != d.master:
        total += times * flat.own * (flat.landed.itemsize + d.master.itemsize)
    return total
