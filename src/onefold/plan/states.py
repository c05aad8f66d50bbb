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

With groups of G of the N ranks (plan/division.py), by themselves those of a node, and e bytes of
each byte left by a codec, × (G−1)/G inside and (N−G)/NG across:

| recipe (stage 3)          | beside the above at rest     | sent inside a group         | sent across groups              |
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

Of a flat buffer whose state rests off the device (`FlatPlan.tiers`) only what is computed with
stays here: all of it where it is kept whole, this rank's interval where it is gathered, nothing
where parameters rest elsewhere too. The rest is counted in plan/beyond.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from onefold.layout import FlatLayout, Slot, overlap
from onefold.memory import MASTERS, PARAMETERS, RESIDUALS
from onefold.plan.division import Division, Hop, adds_of, padded, position_of, topology_of
from onefold.plan.legs import Leg, gather_legs, merged, reduction_legs
from onefold.plan.schema import MOMENTS
from onefold.plan.shapes import ModelShape, Parameter, UnitShape
from onefold.quant import codec
from onefold.recipe import Placement, Recipe, Tier
from onefold.recipe.moments import bytes_of_moments
from onefold.recipe.options import SECTOR
from onefold.recipe.rows import GROUP
from onefold.runtime.flat import Dtypes, grouped_as
from onefold.runtime.placement import Tiers, block_at_rest, leaving_of_sizes

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
class FlatPlan:
    """One flat buffer of a unit on one rank of N, in integers: what `runtime.flat.Flat` is in
    tensors.

    `division` says which part is this rank's and how parts travel. `tiers` are those of a buffer
    whose state rests off the device, None for any other. `format` is what Adam's moments rest in,
    None for the masters' dtype.
    """

    layout: FlatLayout
    dtypes: Dtypes
    trainable: bool
    division: Division
    ranks: int
    whole_master: bool
    unsharded: bool
    resident: bool
    tiers: Tiers | None = None
    format: str | None = None

    @property
    def numel(self) -> int:
        return self.layout.numel

    @property
    def interval(self) -> tuple[int, int]:
        return self.layout.interval(self.division.position)

    @property
    def owned(self) -> tuple[int, int]:
        if self.whole_master:
            return 0, self.numel
        return (
            self.division.shard(self.layout.shard_numel)
            if self.division.over_group
            else self.interval
        )

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Of a reduction of its gradients."""
        return self.division.hops(self.layout.shard_numel, self.whole_master)

    @property
    def broadcast_back(self) -> bool:
        """Sums go on to who holds them too."""
        return self.ranks > 1 and self.owned != self.interval

    @property
    def spreads(self) -> tuple[Hop, ...]:
        """The hops by which they go on: back over those of the reduction, all where everybody holds
        them, else the last.
        """
        if not self.broadcast_back:
            return ()
        return self.hops[::-1] if self.whole_master else self.hops[-1:]

    @property
    def each(self) -> int:
        """Bytes of one interval in a gather."""
        name, numel = self.division.gathered, self.layout.shard_numel
        return padded(name, numel) if name is not None else numel * self.dtypes.compute.itemsize

    @property
    def shared(self) -> bool:
        """The kept copy holds the masters: they are no bytes of their own."""
        return self.resident and self.dtypes.compute == self.dtypes.master and self.tiers is None

    @property
    def own(self) -> int:
        """Elements that this rank owns, padding included."""
        return self.owned[1] - self.owned[0]

    def local(self, slot: Slot) -> int:
        """Elements of `slot` that this rank's optimizer steps."""
        a, b = overlap((slot.start, slot.end), self.owned)
        return b - a


@dataclass(frozen=True)
class UnitPlan:
    """A unit's flat buffers on one rank."""

    name: str
    path: str
    flats: tuple[FlatPlan, ...]
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
    away = leaving_of_sizes(
        [sum(p.numel for p in u.parameters if p.trainable) for u in model.units], recipe, ranks
    )
    topology = topology_of(recipe, ranks, per_node)
    plain = Division(
        topology,
        position_of(topology, rank),
        feedback=recipe.error_feedback,
        adds=adds_of(recipe, nccl),
    )
    units = [_unit(u, recipe, plain, index in away) for index, u in enumerate(model.units)]
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


def _unit(unit: UnitShape, recipe: Recipe, plain: Division, away: bool) -> UnitPlan:
    groups: dict[tuple[torch.dtype, bool, bool], list[Parameter]] = {}
    for p in unit.parameters:
        groups.setdefault(
            (grouped_as(getattr(torch, p.dtype), recipe), p.trainable, rests_encoded(p, recipe)), []
        ).append(p)
    flats = tuple(
        _flat(
            group,
            trainable,
            recipe,
            replace(plain, stored=encoded),
            Tiers.of(trainable, recipe) if away and not encoded else None,
        )
        for (_, trainable, encoded), group in groups.items()
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


def _flat(
    parameters: list[Parameter],
    trainable: bool,
    recipe: Recipe,
    division: Division,
    tiers: Tiers | None,
) -> FlatPlan:
    ranks, stored = division.topology.size, division.stored
    dtypes = Dtypes.of(getattr(torch, parameters[0].dtype), trainable, recipe)
    same = all(getattr(torch, p.dtype) == dtypes.compute == dtypes.master for p in parameters)
    unsharded = ranks == 1 and tiers is None and not stored and same
    alone = (
        ranks == 1
        and not stored
        and (dtypes.compute == dtypes.master if tiers is None else tiers.parameters is Tier.DEVICE)
    )
    resident = recipe.parameters.placement is Placement.REPLICATED or unsharded or alone
    block = max(recipe.block, block_at_rest(recipe, codec) if stored else 0)
    return FlatPlan(
        layout=_layout(
            tuple((p.name, p.shape) for p in parameters),
            ranks,
            SECTOR if tiers is not None and tiers.on_disk else 0,
            block,
        ),
        dtypes=dtypes,
        trainable=trainable,
        division=_divided(division, dtypes, resident, recipe),
        ranks=ranks,
        whole_master=recipe.optimizer.placement is Placement.REPLICATED or ranks == 1,
        unsharded=unsharded,
        resident=resident,
        tiers=tiers,
        format=recipe.moments,
    )


def _divided(plain: Division, dtypes: Dtypes, resident: bool, recipe: Recipe) -> Division:
    inside = recipe.parameters.over == GROUP and recipe.optimizer.over != GROUP
    low = str(dtypes.compute).removeprefix("torch.") in _LOW
    travels = plain.topology.size > 1 or plain.stored
    return replace(
        plain,
        over_group=recipe.optimizer.over == GROUP,
        has_secondary=inside and not plain.stored and not resident and plain.topology.outer > 1,
        gathered=(
            (recipe.frozen if plain.stored else recipe.parameters.codec)
            if low and travels and not resident
            else None
        ),
        reduced=recipe.gradients.codec if dtypes.sums == torch.float32 else None,
    )


@lru_cache(maxsize=4096)
def _layout(
    parameters: tuple[tuple[str, tuple[int, ...]], ...], ranks: int, sector: int, block: int
) -> FlatLayout:
    return FlatLayout.of(parameters, ranks, sector, block)


# -- at rest ---------------------------------------------------------------------------------------


def at_rest(units: list[UnitPlan], optimizer: str = "adamw") -> dict[str, int]:
    """Bytes that a rank holds on its device between steps, gradients dropped, by category.

    Raises:
        ValueError: the optimizer is not in `MOMENTS_OF`.
    """
    out = {PARAMETERS: 0, MASTERS: 0, RESIDUALS: 0, MOMENTS: 0}
    for flat in _flats(units):
        for category, nbytes in resting(flat).items():
            out[category] += nbytes
        out[MOMENTS] += moments(flat, optimizer) if flat.tiers is None else 0
    return {k: v for k, v in out.items() if v}


def resting(flat: FlatPlan) -> dict[str, int]:
    """Bytes of parameters, masters and error feedback of one flat buffer on the device; mirrors
    `Flat.resting_bytes`.
    """
    out = {PARAMETERS: copied(flat), RESIDUALS: residuals(flat)}
    full = flat.numel * flat.dtypes.compute.itemsize
    if flat.tiers is not None:
        here = (
            flat.numel if flat.resident else flat.own if flat.tiers.parameters is Tier.DEVICE else 0
        )
        out[PARAMETERS] += here * flat.dtypes.compute.itemsize
    elif flat.unsharded:
        out[PARAMETERS] = flat.layout.content * flat.dtypes.compute.itemsize
    elif flat.shared:
        out[PARAMETERS] = full
    elif not flat.division.stored:
        out[MASTERS] = flat.own * flat.dtypes.master.itemsize
        out[PARAMETERS] += full if flat.resident else 0
    return {k: v for k, v in out.items() if v}


def copied(flat: FlatPlan) -> int:
    """Bytes of what is kept to gather from beside the masters: a second copy, the own part encoded,
    or frozen weights at rest.
    """
    division = flat.division
    if division.gathered is not None:
        parts = (
            division.topology.outer
            if division.has_secondary
            else flat.own // max(flat.layout.shard_numel, 1)
        )
        return parts * flat.each
    return division.topology.outer * flat.each if division.has_secondary else 0


def residuals(flat: FlatPlan) -> int:
    """Bytes of what encoding its gradients lost, for each hop."""
    if not (flat.trainable and flat.division.feedback):
        return 0
    return sum(hop.span * torch.float32.itemsize for hop in flat.hops if flat.division.encodes(hop))


def moments(flat: FlatPlan, optimizer: str) -> int:
    """Bytes of optimizer states for what this rank steps of `flat`; Adam keeps a 4-byte count for
    each parameter that it sees any of.
    """
    if optimizer not in MOMENTS_OF:
        raise ValueError(f"optimizer {optimizer!r}: expected one of {', '.join(MOMENTS_OF)}.")
    if not flat.trainable:
        return 0
    step = 4 if optimizer in ("adamw", "adam") else 0
    return sum(
        moments_of_slot(flat, slot, optimizer) + step
        for slot in flat.layout.slots
        if flat.local(slot)
    )


def moments_of_slot(flat: FlatPlan, slot: Slot, optimizer: str) -> int:
    """Bytes of the states with an element for each that this rank steps of one parameter."""
    numel, count = flat.local(slot), MOMENTS_OF[optimizer]
    if flat.format is None:
        return count * numel * flat.dtypes.master.itemsize
    return bytes_of_moments(numel, flat.format, whole=slot.numel, moments=count)


# -- on the wire -----------------------------------------------------------------------------------


def wire(units: list[UnitPlan], recipe: Recipe, micro_batches: int = 1) -> dict[str, int]:
    """Payload bytes that a rank sends in one optimizer step with `micro_batches` forward and
    backward passes, by move.

    All but the last micro-batch run under `onefold.no_sync`. Every unit is used once in each pass.
    """
    out = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}
    for leg in legs_of(units, recipe, micro_batches):
        out[leg.move] += leg.nbytes
    return {k: v for k, v in out.items() if v}


def legs_of(units: list[UnitPlan], recipe: Recipe, micro_batches: int = 1) -> list[Leg]:
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
    return recipe.units_ahead(any(f.division.two_levels for u in units for f in u.flats))


def gathers_of(unit: UnitPlan, flat: FlatPlan, recipe: Recipe, micro_batches: int) -> int:
    """How often a step gathers this buffer over the wire."""
    if flat.resident or flat.whole_master:
        stale = flat.resident and flat.trainable and not flat.whole_master
        return 1 if stale else 0
    return launches_of(unit, flat, recipe, micro_batches)


def launches_of(
    unit: UnitPlan, flat: FlatPlan, recipe: Recipe, micro_batches: int, backward: bool = True
) -> int:
    """How often a step makes the whole of a buffer that is not kept, over the wire or not; with
    `backward=False` in forward passes only.
    """
    again = backward and recipe.reshard_after_forward and not (unit.looks_up_only or unit.turns)
    return 0 if flat.resident else micro_batches * (2 if again else 1)


def reductions_of(flat: FlatPlan, recipe: Recipe, micro_batches: int) -> int:
    """How often a step hands sums over: at each micro-batch, or at the boundary where they wait for
    it whole or in the group.
    """
    held = recipe.gradients.over == GROUP and len(flat.hops) > 1
    return micro_batches if recipe.reduce_at == "micro-batch" and not held else 1


def puts_of(
    unit: UnitPlan, flat: FlatPlan, recipe: Recipe, micro_batches: int, backward: bool = True
) -> int:
    """How often a step reads this rank's masters for a buffer that is not kept: once for what is
    encoded or copied, if it is trained.
    """
    if flat.division.gathered is not None or flat.division.has_secondary:
        return int(flat.trainable)
    return launches_of(unit, flat, recipe, micro_batches, backward)


def _flats(units: list[UnitPlan]) -> Iterator[FlatPlan]:
    for unit in units:
        yield from unit.flats
