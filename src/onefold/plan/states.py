"""Closed forms over a recipe's rows: bytes at rest and bytes on the wire, for the very layouts that the engine makes.

With P the bytes of a unit's flat buffer (padding included), N ranks, by placement of parameters / gradients / optimizer:

| stage | parameters | master weights        | moments (AdamW) | wire of a step with m micro-batches, × (N−1)/N        |
|-------|------------|-----------------------|-----------------|--------------------------------------------------------|
| 0     | P          | P₃₂ if 16-bit         | 2·P₃₂           | all-reduce 2P                                          |
| 1     | P          | P₃₂/N if 16-bit       | 2·P₃₂/N         | all-gather P, reduce-scatter P                         |
| 2     | P          | P₃₂/N if 16-bit       | 2·P₃₂/N         | all-gather P, reduce-scatter m·P                       |
| 3     | –          | P₃₂/N                 | 2·P₃₂/N         | all-gather 2m·P (units that only look up: m·P), m·P     |

In fp32 the masters are (a slice of) the parameters themselves at stages 0 to 2. Frozen parameters have neither masters nor moments and
rest in the compute dtype. The rows are read from the recipe; no stage is asked for.

Of a flat buffer whose state rests off the device (`FlatPlan.tiers`) only what is computed with stays here: all of it where it is kept
whole, this rank's interval where it is gathered, nothing where parameters rest elsewhere too. The rest is counted in plan/beyond.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from onefold.layout import FlatLayout, Slot, overlap
from onefold.memory import MASTERS, PARAMETERS
from onefold.plan.schema import MOMENTS
from onefold.plan.shapes import ModelShape, Parameter, UnitShape
from onefold.recipe import Placement, Recipe, Tier
from onefold.recipe.moments import bytes_of_moments
from onefold.recipe.tiers import SECTOR
from onefold.runtime.flat import Dtypes
from onefold.runtime.tiers import Tiers, leaving_of_sizes

#: fp32 tensors of the parameter's size that an optimizer keeps for each trained element.
MOMENTS_OF = {"adamw": 2, "adam": 2, "lion": 1, "sgd-momentum": 1, "rmsprop": 1, "adagrad": 1, "sgd": 0}


@dataclass(frozen=True)
class FlatPlan:
    """One flat buffer of a unit on one rank of N, in integers: what `runtime.flat.Flat` is in tensors.

    `tiers` are those of a buffer whose state rests off the device, None for any other. `format` is what Adam's moments rest in, None for
    the masters' dtype.
    """

    layout: FlatLayout
    dtypes: Dtypes
    trainable: bool
    rank: int
    ranks: int
    whole_master: bool
    passive: bool
    kept: bool
    tiers: Tiers | None = None
    format: str | None = None

    @property
    def numel(self) -> int:
        return self.layout.numel

    @property
    def interval(self) -> tuple[int, int]:
        return self.layout.interval(self.rank)

    @property
    def owned(self) -> tuple[int, int]:
        return (0, self.numel) if self.whole_master else self.interval

    @property
    def shared(self) -> bool:
        """The kept copy holds the masters: they are no bytes of their own."""
        return self.kept and self.dtypes.compute == self.dtypes.master and self.tiers is None

    @property
    def own(self) -> int:
        """Elements that this rank owns, padding included."""
        return self.owned[1] - self.owned[0]

    @property
    def is_its_master(self) -> bool:
        return self.whole_master and self.shared

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

    @property
    def kept(self) -> bool:
        return all(f.kept for f in self.flats)

    def encloses(self, other: UnitPlan) -> bool:
        return self is not other and (self.path == "" or other.path.startswith(self.path + "."))


def units_of(model: ModelShape, recipe: Recipe, ranks: int, rank: int = 0) -> list[UnitPlan]:
    """The units as the engine lays them out."""
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}: expected at least one rank, and a rank below their number.")
    away = leaving_of_sizes([sum(p.numel for p in u.parameters if p.trainable) for u in model.units], recipe, ranks)
    return [_unit(u, recipe, ranks, rank, index in away) for index, u in enumerate(model.units)]


def _unit(unit: UnitShape, recipe: Recipe, ranks: int, rank: int, away: bool) -> UnitPlan:
    groups: dict[tuple[str, bool], list[Parameter]] = {}
    for p in unit.parameters:
        low = p.dtype if p.dtype not in ("bfloat16", "float16") else "float32"
        groups.setdefault((low, p.trainable), []).append(p)
    flats = tuple(
        _flat(group, trainable, recipe, ranks, rank, Tiers.of(trainable, recipe) if away else None)
        for (_, trainable), group in groups.items()
    )
    return UnitPlan(unit.name, "" if unit.name == "(root)" else unit.name, flats, unit.looks_up_only)


def _flat(parameters: list[Parameter], trainable: bool, recipe: Recipe, ranks: int, rank: int, tiers: Tiers | None) -> FlatPlan:
    dtypes = Dtypes.of(getattr(torch, parameters[0].dtype), trainable, recipe)
    passive = ranks == 1 and tiers is None and all(getattr(torch, p.dtype) == dtypes.compute == dtypes.master for p in parameters)
    alone = ranks == 1 and (dtypes.compute == dtypes.master if tiers is None else tiers.parameters is Tier.DEVICE)
    return FlatPlan(
        layout=_layout(
            tuple((p.name, p.shape) for p in parameters), ranks, SECTOR if tiers is not None and tiers.on_disk else 0, recipe.block
        ),
        dtypes=dtypes,
        trainable=trainable,
        rank=rank,
        ranks=ranks,
        whole_master=recipe.optimizer.placement is Placement.REPLICATED or ranks == 1,
        passive=passive,
        kept=recipe.parameters.placement is Placement.REPLICATED or passive or alone,
        tiers=tiers,
        format=recipe.moments,
    )


@lru_cache(maxsize=4096)
def _layout(parameters: tuple[tuple[str, tuple[int, ...]], ...], ranks: int, sector: int, block: int) -> FlatLayout:
    return FlatLayout.of(parameters, ranks, sector, block)


# -- at rest -------------------------------------------------------------------------------------------------------------------


def at_rest(units: list[UnitPlan], optimizer: str = "adamw") -> dict[str, int]:
    """Bytes that a rank holds on its device between steps, gradients dropped, by category.

    Raises:
        ValueError: the optimizer is not in `MOMENTS_OF`.
    """
    out = {PARAMETERS: 0, MASTERS: 0, MOMENTS: 0}
    for flat in _flats(units):
        for category, nbytes in resting(flat).items():
            out[category] += nbytes
        out[MOMENTS] += moments(flat, optimizer) if flat.tiers is None else 0
    return {k: v for k, v in out.items() if v}


def resting(flat: FlatPlan) -> dict[str, int]:
    """Bytes of parameters and masters of one flat buffer on the device; mirrors `Flat.resting_bytes`."""
    if flat.tiers is not None:
        here = flat.numel if flat.kept else flat.own if flat.tiers.parameters is Tier.DEVICE else 0
        return {PARAMETERS: here * flat.dtypes.compute.itemsize} if here else {}
    if flat.passive:
        return {PARAMETERS: flat.layout.content * flat.dtypes.compute.itemsize}
    full = flat.numel * flat.dtypes.compute.itemsize
    if flat.shared:
        return {PARAMETERS: full}
    out = {MASTERS: flat.own * flat.dtypes.master.itemsize}
    return out | ({PARAMETERS: full} if flat.kept else {})


def moments(flat: FlatPlan, optimizer: str) -> int:
    """Bytes of optimizer states for what this rank steps of `flat`; Adam keeps a 4-byte count for each parameter that it sees any of."""
    if optimizer not in MOMENTS_OF:
        raise ValueError(f"optimizer {optimizer!r}: expected one of {', '.join(MOMENTS_OF)}.")
    if not flat.trainable:
        return 0
    step = 4 if optimizer in ("adamw", "adam") else 0
    return sum(moments_of_slot(flat, slot, optimizer) + step for slot in flat.layout.slots if flat.local(slot))


def moments_of_slot(flat: FlatPlan, slot: Slot, optimizer: str) -> int:
    """Bytes of the states with an element for each that this rank steps of one parameter."""
    numel, count = flat.local(slot), MOMENTS_OF[optimizer]
    if flat.format is None:
        return count * numel * flat.dtypes.master.itemsize
    return bytes_of_moments(numel, flat.format, whole=slot.numel, moments=count)


# -- on the wire ---------------------------------------------------------------------------------------------------------------


def wire(units: list[UnitPlan], recipe: Recipe, micro_batches: int = 1) -> dict[str, int]:
    """Payload bytes that a rank sends in one optimizer step with `micro_batches` forward and backward passes, by move.

    All but the last micro-batch run under `onefold.no_sync`. Every unit is used once in each pass.
    """
    if micro_batches < 1:
        raise ValueError(f"{micro_batches} micro-batches: expected at least 1.")
    out = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}
    reductions = micro_batches if recipe.reduce_at == "micro-batch" else 1
    for unit in units:
        for flat in unit.flats:
            if flat.ranks == 1:
                continue
            peers = flat.ranks - 1
            shard = flat.layout.shard_numel
            gathers = gathers_of(unit, flat, recipe, micro_batches)
            out["all-gather"] += gathers * shard * flat.dtypes.compute.itemsize * peers
            if flat.trainable:
                each = shard * peers * flat.dtypes.wire.itemsize
                if flat.whole_master:
                    out["all-reduce"] += 2 * each * reductions
                else:
                    out["reduce-scatter"] += each * reductions
    return {k: v for k, v in out.items() if v}


def gathers_of(unit: UnitPlan, flat: FlatPlan, recipe: Recipe, micro_batches: int) -> int:
    """How often a step gathers this buffer over the wire."""
    if flat.kept or flat.whole_master:
        stale = flat.kept and flat.trainable and not flat.whole_master
        return 1 if stale else 0
    return launches_of(unit, flat, recipe, micro_batches)


def launches_of(unit: UnitPlan, flat: FlatPlan, recipe: Recipe, micro_batches: int, backward: bool = True) -> int:
    """How often a step makes the whole of a buffer that is not kept, over the wire or not; with `backward=False` in forward passes only."""
    again = backward and recipe.reshard_after_forward and not unit.looks_up_only
    return 0 if flat.kept else micro_batches * (2 if again else 1)


def _flats(units: list[UnitPlan]) -> Iterator[FlatPlan]:
    for unit in units:
        yield from unit.flats
