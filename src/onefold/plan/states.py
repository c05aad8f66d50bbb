"""Closed forms over a recipe's rows: bytes at rest and bytes on the wire, for the very layouts that
the engine makes.

With P the bytes of a unit's flat buffer (padding included), N ranks, by placement of parameters /
gradients / optimizer:

| stage | parameters | master weights        | moments (AdamW) | wire of a step with m micro-batches, × (N−1)/N        |
|-------|------------|-----------------------|-----------------|--------------------------------------------------------|
| 0     | P          | P₃₂ if 16-bit         | 2·P₃₂           | all-reduce 2P                                          |
| 1     | P          | P₃₂/N if 16-bit       | 2·P₃₂/N         | all-gather P, reduce-scatter P                         |
| 2     | P          | P₃₂/N if 16-bit       | 2·P₃₂/N         | all-gather P, reduce-scatter m·P                       |
| 3     | –          | P₃₂/N                 | 2·P₃₂/N         | all-gather 2m·P, m·P                                    |

Units that only look up, and those at the turn (the last one that a forward pass uses, and those
around it: they stay gathered until the backward pass), are gathered m times at stage 3.
In fp32 the masters are (a slice of) the parameters themselves at stages 0 to 2. Frozen parameters
have neither masters nor moments and rest in the compute dtype. The rows are read from the recipe;
no stage is asked for.

With groups of G of the N ranks (layout/spec.py), by themselves those of a node, and e bytes of
each byte left by a codec, × (G−1)/G intra-group and (N−G)/NG inter-group:

| recipe (stage 3)          | beside the above at rest     | sent intra-group            | sent inter-group                |
|---------------------------|------------------------------|-----------------------------|---------------------------------|
| groups (all stages)       |                              | as above                    | as above                        |
| `shard_group`             | masters, moments: 1/G        | 3m·P                        | 2P, once                        |
| … `optimizer_over="all"`  | parameters (compute): P/G    | 3m·P                        | 2P, once                        |
| `second_copy`             | parameters (compute): P/G    | 3m·P                        | P once, m·P                     |
| `gather_codec`            | e·P/N (with the copy: e·P/G) | e·P for P of each gather    | e·P for P of each gather        |
| `reduce_codec`            | feedback: 4 bytes a sum      | e·P for P of each reduction | e·P for P of each reduction     |
| `frozen` (matrices)       | e·P/N instead of P/N         | e·P for P of each gather    | e·P for P of each gather        |

Sources: Wang et al. 2023 (ZeRO++, arXiv:2306.10209), section 4; Zhang et al. 2022 (MiCS,
arXiv:2205.00119), section 3; Zhao et al. 2023 (PyTorch FSDP), section 3.2.2.

Every size is that of a `ShardSpec` (layout/spec.py), which the engine allocates and sends by.

Of a flat buffer whose state rests off the device (`ShardSpec.tiers`) only what is computed with
stays here: all of it where it is kept whole, this rank's interval where it is gathered, nothing
where parameters rest elsewhere too. The rest is counted in plan/offloaded.py.

What a rank sends in a step, by level: all ranks at once, those of its group ("intra-group"), or one
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

What the engine's own kernels read and write of memory in a step (encoding, adding up, copies and
casts):

    gathers      the own interval once after a step: read in the compute dtype, written encoded; the whole each time: read encoded, written
    reductions   on each hop what goes to others: read, written encoded; what comes from them: read encoded, added to fp32 sums
    feedback     what is sent once more, read and written in fp32
    sums         on each hop, of the n elements that a rank sums: the parts of all N ranks read in the wire's dtype, the sum written;
                 where NCCL adds (reduce="native") its sum is read and written once
    gradients    each is copied into its unit's buffer, or added to it where an earlier micro-batch has left one
    casts        of sums of an earlier hop, or of several micro-batches, to the dtype of the wire, and of the masters where that is another

They run where the model is computed, so nothing hides them (Wang et al. 2023, ZeRO++, section 3.4,
fuses encoding into the kernels of the moves). What share of a copy's speed encoding reaches stands
in `onefold.plan.times`. Casts of masters for a gather run beside it, on the stream of the copies
up. On a calibrated machine its reference steps have measured copies and casts
(`Software.handed_s`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from onefold.comm.topology import inner_of
from onefold.layout import Dtypes, Hop, Level, ShardSpec, Tiers, Topology, grouped_as
from onefold.memory import MASTERS, PARAMETERS, RESIDUALS
from onefold.plan.schema import MOMENTS, MOVES
from onefold.plan.shapes import ModelShape, Parameter, UnitShape
from onefold.quant import codec
from onefold.recipe import Recipe
from onefold.recipe.rows import GROUP
from onefold.runtime.placement import offloaded_of_sizes

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
    times = 1
    phase: Phase = "last backward" if recipe.reduce_at == "boundary" else "backward"
    kind = "all-reduce" if flat.whole_master else "reduce-scatter"
    legs = []
    often = times_by_hop(flat, recipe, micro_batches)
    for hop, move, times in zip(flat.hops, flat.reduce_moves, often, strict=True):
        if hop.level == "inter-group" and recipe.gradients.over == GROUP:
            phase = "last backward"
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


# -- who stands where ----------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _topology(group: int | str | None, ranks: int, per_node: int | None) -> Topology:
    return Topology(ranks, inner_of(group, range(ranks), per_node))


def topology_of(recipe: Recipe, ranks: int, per_node: int | None = None) -> Topology:
    """The groups of a recipe; a node is `per_node` ranks in a row, all where nobody says.

    Raises:
        ValueError: the groups do not divide the ranks.
    """
    return _topology(recipe.group, ranks, per_node)


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


_LOW = ("float32", "bfloat16", "float16")
#: fp32 tensors of the parameter's size that an optimizer keeps for each trained element.
MOMENTS_OF = {
    "adamw": 2,
    "adam": 2,
    "lion": 1,
    "sgd-momentum": 1,
    "rmsprop": 1,
    "adagrad": 1,
    "sgd": 0,
}


@dataclass(frozen=True)
class UnitPlan:
    """A unit's flat buffers on one rank."""

    name: str
    path: str
    flats: tuple[ShardSpec, ...]
    looks_up_only: bool
    # It stays gathered between a forward pass and its backward pass: see `_at_the_turn`
    turns: bool = False

    @property
    def resident(self) -> bool:
        return all(f.resident for f in self.flats)

    def encloses(self, other: UnitPlan) -> bool:
        return self is not other and (self.path == "" or other.path.startswith(self.path + "."))


def units_of(
    model: ModelShape,
    recipe: Recipe,
    ranks: int,
    rank: int = 0,
    per_node: int | None = None,
    nccl: bool = False,
) -> list[UnitPlan]:
    """The units as the engine lays them out.

    Args:
        per_node: ranks of a node, as a launcher would say; None is all.
        nccl: what moves is an operation of the backend's own, on the device; else gloo's messages.

    Raises:
        ValueError: no such rank, or groups that do not divide the ranks.
    """
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(
            f"rank {rank} of {ranks}: expected at least one rank, and a rank below their number."
        )
    offloaded = offloaded_of_sizes([u.trainable for u in model.units], recipe, ranks)
    topology = topology_of(recipe, ranks, per_node)

    def spec(
        parameters: list[Parameter], trainable: bool, stored: bool, offloaded: bool
    ) -> ShardSpec:
        dtypes = Dtypes.of(getattr(torch, parameters[0].dtype), trainable, recipe)
        return ShardSpec.of(
            tuple((p.name, p.shape) for p in parameters),
            dtypes,
            recipe,
            topology,
            topology.position_of(rank),
            codec,
            trainable=trainable,
            stored=stored,
            tiers=Tiers.of(trainable, recipe) if offloaded and not stored else None,
            in_place=all(getattr(torch, p.dtype) == dtypes.compute for p in parameters),
            native=nccl,
        )

    units = [_unit(u, recipe, index in offloaded, spec) for index, u in enumerate(model.units)]
    turning = _at_the_turn(units) if recipe.reshard_after_forward else set()
    return [replace(u, turns=u.name in turning) for u in units]


def _at_the_turn(units: Sequence[UnitPlan]) -> set[str]:
    """The names of the units that a forward pass uses last and the backward pass first
    (runtime/unit.py), if it uses them in this order: the last that is gathered, and those around
    it.
    """
    gathered = [u for u in units if not u.resident]
    around = [u for u in gathered if u is gathered[-1] or u.encloses(gathered[-1])]
    return {u.name for u in around if not u.looks_up_only and ".tiles." not in u.name}


def _unit(
    unit: UnitShape, recipe: Recipe, offloaded: bool, spec: Callable[..., ShardSpec]
) -> UnitPlan:
    groups: dict[tuple[torch.dtype, bool, bool], list[Parameter]] = {}
    for p in unit.parameters:
        groups.setdefault(
            (grouped_as(getattr(torch, p.dtype), recipe), p.trainable, rests_encoded(p, recipe)), []
        ).append(p)
    flats = tuple(
        spec(group, trainable, stored, offloaded)
        for (_, trainable, stored), group in groups.items()
    )
    return UnitPlan(
        unit.name, "" if unit.name == "(root)" else unit.name, flats, unit.looks_up_only
    )


def rests_encoded(p: Parameter, recipe: Recipe) -> bool:
    """Whether it is one of the frozen weights that rest encoded; see runtime/placement.py."""
    return (
        recipe.frozen is not None
        and not p.trainable
        and len(p.shape) >= 2
        and p.dtype in _LOW
        and not p.looked_up
    )


# -- at rest ---------------------------------------------------------------------------------------


def at_rest(units: Sequence[UnitPlan], optimizer: str = "adamw") -> dict[str, int]:
    """Bytes that a rank holds on its device between steps, gradients dropped, by category.

    Raises:
        ValueError: the optimizer is not in `MOMENTS_OF`.
    """
    out = dict.fromkeys((PARAMETERS, MASTERS, RESIDUALS, MOMENTS), 0)
    for flat in (f for u in units for f in u.flats):
        for category, nbytes in resting(flat).items():
            out[category] += nbytes
        out[MOMENTS] += moments(flat, optimizer) if flat.tiers is None else 0
    return {k: v for k, v in out.items() if v}


def resting(flat: ShardSpec) -> dict[str, int]:
    """Bytes of parameters, masters and error feedback of one flat buffer on the device."""
    out = {
        PARAMETERS: flat.parameter_bytes,
        RESIDUALS: flat.residual_bytes,
        MASTERS: flat.master_bytes,
    }
    return {k: v for k, v in out.items() if v}


def moments(flat: ShardSpec, optimizer: str) -> int:
    """Bytes of optimizer states for what this rank steps of `flat`; Adam keeps a 4-byte count for
    each parameter that it sees any of.
    """
    if optimizer not in MOMENTS_OF:
        raise ValueError(f"optimizer {optimizer!r}: expected one of {', '.join(MOMENTS_OF)}.")
    if not flat.trainable:
        return 0
    step = 4 if optimizer in ("adamw", "adam") else 0
    return sum(
        flat.moment_bytes(slot, MOMENTS_OF[optimizer]) + step
        for slot in flat.layout.slots
        if flat.local(slot)
    )


# -- on the wire -----------------------------------------------------------------------------------


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


def units_ahead(units: Sequence[UnitPlan], recipe: Recipe) -> int:
    """How many units are gathered ahead of use."""
    return recipe.units_ahead(any(f.topology.two_levels for u in units for f in u.flats))


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


_FP32 = 4


def coded_bytes(units: Sequence[UnitPlan], recipe: Recipe, micro_batches: int = 1) -> float:
    """Bytes of memory that encoding and decoding read and write in a step, by one rank."""
    total = 0.0
    for unit, flat in ((u, f) for u in units for f in u.flats):
        if flat.gather_codec is not None:
            part = flat.layout.shard_numel * flat.dtypes.compute.itemsize + flat.each
            launches = launches_of(unit, flat, recipe, micro_batches)
            total += launches * flat.ranks * part + puts_of(unit, flat, recipe, 1) * part
        if flat.trainable and flat.reduce_codec is not None:
            total += _reduced(flat, recipe, micro_batches)
    return total


def summed_bytes(units: Sequence[UnitPlan], recipe: Recipe, micro_batches: int = 1) -> float:
    """Bytes of memory that adding up the parts of reductions reads and writes in a step, by one
    rank: N parts in one pass (comm/sums.py). Of parts that come one by one (gloo) and of encoded
    ones nothing: the first is in what moves were measured to take, the others are in `coded_bytes`.
    """
    total = 0.0
    for flat in (f for u in units for f in u.flats if f.trainable and f.ranks > 1):
        sent = flat.dtypes.wire.itemsize
        for hop, times in _often(flat, recipe, micro_batches):
            adds = flat.added_by(hop)
            if adds == "backend" and flat.whole_master:  # a copy for it to add into
                total += times * 2 * hop.span * sent
            elif adds != "pairwise":
                written = flat.landed if hop is flat.hops[-1] else flat.dtypes.sums
                parts = hop.size if adds == "at once" else 1
                total += times * added_bytes(hop.own, parts, sent, written.itemsize)
    return total


def added_bytes(numel: float, parts: int, wire: int, written: int) -> float:
    """Read and written by one pass that adds `parts` parts of `numel` elements, `wire` and
    `written` bytes an element: the least that any sum of them can move (Williams et al. 2009,
    Roofline: an addition for each element read is bound by memory, on any GPU).
    """
    return numel * (parts * wire + written)


def _often(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> Iterator[tuple[Hop, int]]:
    """Each hop of a reduction, and how often a step takes it."""
    return zip(flat.hops, times_by_hop(flat, recipe, micro_batches), strict=True)


def _reduced(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> float:
    total = 0.0
    for hop, times in _often(flat, recipe, micro_batches):
        if flat.encodes(hop):
            each = hop.own * flat.dtypes.wire.itemsize + 2 * flat.part_bytes(hop)
            each += (6 if flat.error_feedback else 2) * _FP32 * hop.own
            total += times * (hop.size - 1) * each
    return total


def handled_bytes(units: Sequence[UnitPlan], recipe: Recipe, micro_batches: int = 1) -> float:
    """Bytes of memory that copies and casts read and write in a step, by one rank."""
    return sum(
        (
            _stored(flat, recipe, micro_batches) + _passed_on(flat, recipe, micro_batches)
            for u in units
            for flat in u.flats
            if flat.trainable and not flat.unsharded
        ),
        0.0,
    )


def _stored(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> float:
    """Gradients on their way into the buffer that is reduced."""
    d = flat.dtypes
    if recipe.reduce_at == "micro-batch" or micro_batches == 1:
        return micro_batches * flat.numel * (d.compute.itemsize + d.wire.itemsize)
    first, more = d.compute.itemsize + d.sums.itemsize, d.compute.itemsize + 2 * d.sums.itemsize
    return flat.numel * (first + (micro_batches - 1) * more)


def _passed_on(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> float:
    """What is sent on, and sums on their way to where the optimizer finds them."""
    d, total, times = flat.dtypes, 0.0, 1
    late = recipe.reduce_at == "boundary" and micro_batches > 1
    for at, (hop, times) in enumerate(_often(flat, recipe, micro_batches)):
        # Parts for others are cast from the dtype of sums to that of the wire; the own one stays,
        # and weighs more
        if d.sums != d.wire and (at > 0 or late):
            others = (hop.span - hop.own) * (d.sums.itemsize + d.wire.itemsize)
            total += times * (others + hop.own * (d.sums.itemsize - d.wire.itemsize))
    # Added to what earlier micro-batches left
    total += (times - 1) * flat.own * 3 * d.master.itemsize
    if flat.landed != d.master:
        total += times * flat.own * (flat.landed.itemsize + d.master.itemsize)
    return total
