"""What a rank holds, in closed form: the engine's layouts, bytes between steps, and a bound of the
bytes in a step.

With P the bytes of a unit's flat buffer (padding included), N ranks, by placement of parameters /
gradients / optimizer:

| stage | parameters | master weights        | moments (AdamW) | wire of a step with m micro-batches, × (N−1)/N        |
|-------|------------|-----------------------|-----------------|--------------------------------------------------------|
| 0     | P          | P₃₂ if 16-bit         | 2·P₃₂           | all-reduce 2P                                          |
| 1     | P          | P₃₂/N if 16-bit       | 2·P₃₂/N         | all-gather P, reduce-scatter P                         |
| 2     | P          | P₃₂/N if 16-bit       | 2·P₃₂/N         | all-gather P, reduce-scatter m·P                       |
| 3     | –          | P₃₂/N                 | 2·P₃₂/N         | all-gather 2m·P, m·P                                    |

At stage 3 some units are gathered m times only: those that only look up, and the last units (the
last unit of a forward pass and the units around it stay gathered until the backward pass). In fp32
at stages 0 to 2 the masters are (a slice of) the parameters themselves. Frozen parameters have
neither masters nor moments and are stored in the compute dtype. All of this follows from the
recipe's rows; the code never asks for the stage.

With groups of G of the N ranks (layout/spec.py; by default a group is a node), and a codec that
leaves e bytes of each byte, × (G−1)/G intra-group and (N−G)/NG inter-group:

| recipe (stage 3)          | beside the above at rest     | sent intra-group            | sent inter-group                |
|---------------------------|------------------------------|-----------------------------|---------------------------------|
| groups (all stages)       |                              | as above                    | as above                        |
| `shard_group`             | masters, moments: 1/G        | 3m·P                        | 2P, once                        |
| … `optimizer_over="all"`  | parameters (compute): P/G    | 3m·P                        | 2P, once                        |
| `second_copy`             | parameters (compute): P/G    | 3m·P                        | P once, m·P                     |
| `gather_codec`            | e·P/N (with the copy: e·P/G) | e·P for P of each gather    | e·P for P of each gather        |
| `reduce_codec`            |                              | e·P for P of each reduction | e·P for P of each reduction     |
| `frozen` (matrices)       | e·P/N instead of P/N         | e·P for P of each gather    | e·P for P of each gather        |

Sources: Wang et al. 2023 (ZeRO++, arXiv:2306.10209), section 4; Zhang et al. 2022 (MiCS,
arXiv:2205.00119), section 3; Zhao et al. 2023 (PyTorch FSDP), section 3.2.2.

Every size is that of a `ShardSpec` (layout/spec.py), by which the engine allocates and sends.

If a flat buffer's state is offloaded (`ShardSpec.tiers`), the device holds only the values that the
model computes with: the whole if it is resident, this rank's interval if it is gathered, nothing if
parameters are offloaded too. plan/offloaded.py counts the other tiers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from onefold.comm.communicators import flat_over, inner_of, nodes_of
from onefold.device import chunk_for
from onefold.layout import LOW, Dtypes, ShardSpec, Tiers, Topology
from onefold.memory import MASTERS, MOMENTS, PARAMETERS
from onefold.plan.shapes import ModelShape, Parameter, UnitShape
from onefold.quant.codecs import CODECS
from onefold.recipe import Recipe
from onefold.recipe.core import LARGE_TRAFFIC, SMALL_TRAFFIC
from onefold.recipe.optimizers import PLANNED, WHOLE
from onefold.recipe.rows import GROUP
from onefold.runtime.units import offloaded_units

# -- layouts ---------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _topology(group: int | str | None, ranks: int, per_node: int | None) -> Topology:
    return Topology(ranks, inner_of(group, range(ranks), per_node))


def topology_of(recipe: Recipe, ranks: int, per_node: int | None = None) -> Topology:
    """Return the groups of a recipe. A node is `per_node` successive ranks; None: all ranks. Raises
    ValueError: the groups do not divide the ranks.
    """
    return _topology(recipe.inner, ranks, per_node)


def decided(recipe: Recipe, ranks: int, per_node: int | None, nccl: bool) -> Recipe:
    """Return the recipe with `reduce` as the engine decides it where it is None. `per_node` as for
    `topology_of`.
    """
    flat = flat_over(nodes_of(range(ranks), per_node), topology_of(recipe, ranks, per_node))
    return recipe.with_sums(nccl, flat)


#: Moments of the parameter's size that an optimizer keeps.
MOMENTS_OF = {name: row.elementwise_states for name, row in PLANNED.items()}


@dataclass(frozen=True)
class UnitPlan:
    """A unit's flat buffers on one rank.

    Attributes:
        turns: it stays gathered from the forward to the backward pass; see `at_the_turn`.
    """

    name: str
    flats: tuple[ShardSpec, ...]
    looks_up_only: bool
    turns: bool = False

    @property
    def path(self) -> str:
        """The module's path; "" of the root."""
        return "" if self.name == "(root)" else self.name

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
    """Lay out the units as the engine does.

    Args:
        per_node: ranks of a node, as a launcher would say; None: all ranks.
        nccl: collectives are NCCL's, on the device; otherwise they are gloo's messages.

    Raises:
        ValueError: no such rank, or groups that do not divide the ranks.
    """
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(
            f"rank {rank} of {ranks}: expected at least one rank, and a rank below their number."
        )
    offloaded = offloaded_units([u.trainable for u in model.units], recipe, ranks)
    topology = topology_of(recipe, ranks, per_node)
    recipe = decided(recipe, ranks, per_node, nccl)

    def spec(
        parameters: list[Parameter], dtypes: Dtypes, stored: bool, offloaded: bool
    ) -> ShardSpec:
        trainable = parameters[0].trainable
        return ShardSpec(
            tuple((p.name, p.shape) for p in parameters),
            dtypes,
            recipe,
            topology,
            topology.position_of(rank),
            CODECS.__getitem__,
            trainable=trainable,
            stored=stored,
            tiers=Tiers.of(trainable, recipe) if offloaded and not stored else None,
            in_place=all(p.torch_dtype == dtypes.compute for p in parameters),
            native=nccl,
        )

    def unit_plan(unit: UnitShape, offloaded: bool) -> UnitPlan:
        groups: dict[tuple[Dtypes, bool, bool], list[Parameter]] = {}
        for p in unit.parameters:
            kind = p.dtypes(recipe), p.trainable, rests_encoded(p, recipe)
            groups.setdefault(kind, []).append(p)
        flats = (
            spec(group, dtypes, stored, offloaded) for (dtypes, _, stored), group in groups.items()
        )
        return UnitPlan(unit.name, tuple(flats), unit.looks_up_only)

    units = [unit_plan(u, index in offloaded) for index, u in enumerate(model.units)]
    turning = at_the_turn(units) if recipe.reshard_after_forward else set()
    return [replace(u, turns=True) if u.name in turning else u for u in units]


def at_the_turn(units: Sequence[UnitPlan]) -> set[str]:
    """Return the names of the units that a forward pass uses last and the backward pass first
    (runtime/unit.py): the last gathered unit and the units around it.
    """
    gathered = [u for u in units if not u.resident]
    around = [u for u in gathered if u is gathered[-1] or u.encloses(gathered[-1])]
    return {u.name for u in around if not u.looks_up_only}


def rests_encoded(p: Parameter, recipe: Recipe) -> bool:
    """Return whether a frozen weight is stored encoded, by the rule of runtime/units.py."""
    frozen = recipe.frozen is not None and not p.trainable and len(p.shape) >= 2
    return frozen and p.torch_dtype in LOW and not p.looked_up


def outer(units: Sequence[UnitPlan]) -> frozenset[str]:
    """Return the names of the units that lie around other units."""
    around = {u.name for u in units if u.path == ""} if len(units) > 1 else set()
    names = {u.path: u.name for u in units}
    for unit in units:
        around.update(names[p] for p in _enclosing(unit.path)[1:-1] if p in names)
    return frozenset(around)


def _enclosing(path: str) -> list[str]:
    """Return the paths that may lie around a unit, from the root to its own."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts) + 1)]


def units_ahead(units: Sequence[UnitPlan], recipe: Recipe) -> int:
    """Return how many units are gathered ahead of use."""
    return recipe.units_ahead(any(f.topology.two_levels for u in units for f in u.flats))


# -- at rest ---------------------------------------------------------------------------------------


def at_rest(
    units: Sequence[UnitPlan], optimizer: str = "adamw", held: int | None = None
) -> dict[str, int]:
    """Return the bytes that a rank holds on its device between steps, by category, after gradients
    are dropped.

    Args:
        held: its bytes of moments, if it steps matrices whole (`onefold.plan.owned`).

    Raises:
        ValueError: the optimizer is not in `MOMENTS_OF`, or steps matrices whole and `held` is not
            given.
    """
    out = dict.fromkeys((PARAMETERS, MASTERS, MOMENTS), 0)
    for flat in (f for u in units for f in u.flats):
        for category, nbytes in resting(flat).items():
            out[category] += nbytes
        out[MOMENTS] += moments(flat, optimizer) if flat.tiers is None and held is None else 0
    out[MOMENTS] += held or 0
    return {k: v for k, v in out.items() if v}


def resting(flat: ShardSpec) -> dict[str, int]:
    """Return one flat buffer's bytes of parameters and masters on the device."""
    held = (
        (PARAMETERS, flat.parameter_bytes),
        (MASTERS, flat.master_bytes),
    )
    return {category: nbytes for category, nbytes in held if nbytes}


def moments(flat: ShardSpec, optimizer: str) -> int:
    """Return the bytes of optimizer states for the part of `flat` that this rank steps. Some
    optimizers also keep a number for each parameter of which the rank steps any element: Adam's
    count of steps has 4 bytes. Adagrad makes it for every parameter, when it is made.
    """
    if optimizer not in MOMENTS_OF:
        raise ValueError(f"optimizer {optimizer!r}: expected one of {', '.join(MOMENTS_OF)}.")
    kept = PLANNED[optimizer]
    if kept.update == WHOLE:
        raise ValueError(f"{optimizer}: states of whole matrices are their owners'.")
    if not flat.trainable:
        return 0
    return sum(
        flat.moment_bytes(slot, kept.elementwise_states) + kept.number_bytes
        for slot in flat.layout.slots
        if kept.at_once or flat.local(slot)
    )


# -- a bound ---------------------------------------------------------------------------------------


def bound_of(
    units: Sequence[UnitPlan], recipe: Recipe, micro_batches: int = 1, window: int = 0
) -> int:
    """Return bytes that the engine's ledger never exceeds: S + 2G + ahead + C + 2R + in flight + T.

    - S: bytes between steps.
    - G: the largest gathered unit; ahead: as many more as are gathered before their use, of
      LARGE_TRAFFIC bytes at most, unless it is one. G counts once more if parameters come from a
      disk.
    - C: the largest sum of gathered units around one another.
    - R: the largest reduction of a unit: on each hop its buffer, the receive buffer, and the send
      buffer if it is a copy; in flight: `in_flight` of them, of LARGE_TRAFFIC bytes sent and
      received at most on each hop, unless it is one.
    - T: all gradients once they are reduced, with their copies if the masters have another dtype,
      and with the buffers that keep them whole or hold them in a group before. Of gradients that
      leave the device only the largest (or all while they are sent on), and those that copies to
      the host still read: at most the largest and a `window` (or twice the largest), or all. Two
      chunks in which the device adds or casts them.

    Small units do not count as ahead or in flight (SMALL_TRAFFIC) and add 1 MiB at most.
    """
    rest = sum(sum(resting(f).values()) for u in units for f in u.flats)
    prefetch, in_flight = units_ahead(units, recipe), recipe.in_flight if recipe.overlap else 0
    gathered = [sum(f.gathered_bytes for f in u.flats if not f.resident) for u in units]
    late, again = recipe.reduces_at == "boundary" and micro_batches > 1, micro_batches > 1
    names = outer(units)
    around = {u.path: g for g, u in zip(gathered, units, strict=True) if u.name in names}
    nested = max(
        (sum(around.get(path, 0) for path in _enclosing(u.path)) for u in units), default=0
    )
    flats = [[f for f in u.flats if f.trainable] for u in units]
    reductions = [sum(_on_its_way(f, late) for f in own) for own in flats]
    held_in_group = again and recipe.gradients.over == GROUP
    reduced = [_reduced(f, late, held_in_group) for own in flats for f in own]
    total = sum(stays for stays, _ in reduced)
    leaving = [0, *(leaves for _, leaves in reduced if leaves)]
    every = sum(gathered) if not recipe.reshard_after_forward else 0
    fetched = any(f.gathers_from_disk for u in units for f in u.flats)
    largest = max(gathered, default=0)
    before_use = min(largest * prefetch, max(largest, LARGE_TRAFFIC))
    ahead = max(every, largest * (2 + fetched) + before_use) + nested
    # Small units may be gathered, and small reductions in flight, beyond those counts
    small = min(sum(gathered), SMALL_TRAFFIC) if prefetch else 0
    small += min(sum(reductions), 3 * SMALL_TRAFFIC) if in_flight else 0
    leaves = max(leaving)
    read = min(max(window, 2 * leaves) + leaves, sum(leaving)) if window else 0
    if window and any(adds_on_device(f, again) for own in flats for f in own):
        read += 2 * sums_chunk(units)
    reduction = max(reductions, default=0)
    # The bytes of a reduction for each byte that its first hop sends and receives
    each = max(
        (
            _on_its_way(f, late) / (2 * f.numel * f.dtypes.wire.itemsize)
            for own in flats
            for f in own
        ),
        default=0,
    )
    hops = max((len(f.hops) for own in flats for f in own), default=0)
    beyond = reduction + hops * math.ceil(each * LARGE_TRAFFIC)
    reducing = 2 * reduction + min(in_flight * reduction, beyond)
    return rest + ahead + reducing + total + leaves + read + small


def adds_on_device(flat: ShardSpec, again: bool) -> bool:
    """Return whether gradients on their way to the host pass through buffers on a device with
    streams: they are added to those on the host (`again`), or cast.
    """
    if flat.tiers is None:
        return False
    return (again and not flat.tiers.gradients.on_disk) or flat.landed != flat.dtypes.master


def sums_chunk(units: Sequence[UnitPlan]) -> int:
    """Return the bytes of each of the two such buffers."""
    flats = (f for u in units for f in u.flats if f.tiers is not None)
    return chunk_for(max((f.own * f.dtypes.master.itemsize for f in flats), default=0))


def _reduced(flat: ShardSpec, late: bool, held_in_group: bool) -> tuple[int, int]:
    """Return the bytes of a flat buffer's reduced gradients: (on the device until the step, on
    their way to the host). `late`, `held_in_group`: before, they are whole, or held in a group.
    """
    sums, landed = flat.dtypes.sums.itemsize, flat.landed
    kept = flat.numel * sums if late else 0
    if held_in_group and not late and len(flat.hops) > 1:
        kept = flat.hops[0].own * sums
    sent_on = flat.whole_master or flat.broadcast_back
    elements = flat.own if sent_on else flat.layout.shard_numel
    if flat.tiers is not None:
        nbytes = elements * landed.itemsize
        return (kept + nbytes, 0) if flat.broadcast_back else (kept, nbytes)
    copied = flat.dtypes.master.itemsize if landed != flat.dtypes.master else 0
    # Sums that are sent on are copied at the end of the backward pass
    twice = landed.itemsize if sent_on else 0
    return kept + elements * (landed.itemsize + copied + twice), 0


def _on_its_way(flat: ShardSpec, late: bool) -> int:
    """Return a reduction's bytes on all its hops. `late`: its buffer is in the dtype of sums."""
    wire, sums, out = flat.dtypes.wire.itemsize, flat.dtypes.sums.itemsize, 0
    for at, hop in enumerate(flat.hops):
        out += hop.span * (sums if at else wire)
        if flat.added_by(hop) == "backend":
            out += hop.own * wire + (hop.span * wire if wire != sums and (late or at) else 0)
        elif flat.encodes(hop):
            room = flat.exchange(at, flat.dtypes.wire)
            out += room.sent + room.received
        else:
            out += hop.span * (2 * wire if wire != sums and (late or at) else wire)
        out += hop.own * sums if wire != sums or at + 1 < len(flat.hops) else 0
    return out
