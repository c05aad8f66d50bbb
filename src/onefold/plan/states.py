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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from onefold.comm.topology import inner_of
from onefold.layout import Dtypes, ShardSpec, Tiers, Topology, grouped_as
from onefold.memory import MASTERS, PARAMETERS, RESIDUALS
from onefold.plan.schema import MOMENTS
from onefold.plan.shapes import ModelShape, Parameter, UnitShape
from onefold.quant import codec
from onefold.recipe import Recipe
from onefold.runtime.unit import offloaded_of_sizes

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
    return [replace(u, turns=True) if u.name in turning else u for u in units]


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
    """Whether it is one of the frozen weights that rest encoded; see runtime/unit.py."""
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


def units_ahead(units: Sequence[UnitPlan], recipe: Recipe) -> int:
    """How many units are gathered ahead of use."""
    return recipe.units_ahead(any(f.topology.two_levels for u in units for f in u.flats))
