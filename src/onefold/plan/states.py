"""What a rank holds between steps, on its device and off it, and what the host holds in a step.

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
parameters are offloaded too.

                 host                                            a disk
    at rest      masters, moments, parameters: by their rows     the same, and gradients, which keep their place
    in a step    + gradients, from their reduction to the end    –
                 + chunks on their way to and from the disk

Tests compare it with the engine's ledgers: bytes at rest are exact, the host's at peak are a bound.
The tiers are ZeRO-Offload's (Ren et al. 2021, section 4.1) and ZeRO-Infinity's (Rajbhandari et al.
2021, 5.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onefold import layout
from onefold.device import chunk_for
from onefold.device.copies import HOST_COPIES, HOST_WINDOWS, WINDOW
from onefold.layout import ShardSpec, round_up
from onefold.memory import GRADIENTS, IDLE, MASTERS, MOMENTS, PARAMETERS, STAGING
from onefold.offload.step import AHEAD, BEHIND, WAITING
from onefold.offload.transfers import BEHIND as WRITES
from onefold.plan.rank import UnitPlan
from onefold.recipe import Recipe, Tier
from onefold.recipe.moments import FORMATS
from onefold.recipe.optimizers import PLANNED
from onefold.recipe.options import SECTOR
from onefold.recipe.rows import GROUP, OFF_DEVICE

HOST, NVME = Tier.HOST.value, Tier.NVME.value
_CATEGORIES = {"master": MASTERS, "parameter": PARAMETERS, "gradient": GRADIENTS}


def filled(held: Mapping[str, int]) -> dict[str, int]:
    """Leave zeros out."""
    return {k: v for k, v in held.items() if v}


# -- on the device ---------------------------------------------------------------------------------


def at_rest(
    units: Sequence[UnitPlan], optimizer: str = "adamw", held: int | None = None
) -> dict[str, int]:
    """Return the bytes that a rank holds on its device between steps, by category, after gradients
    are dropped.

    Args:
        held: its bytes of moments, if it steps matrices whole (`onefold.plan.owned`).
    """
    out = Counter({MOMENTS: held or 0})
    for flat in (f for u in units for f in u.flats):
        out.update(resting(flat))
        if flat.tiers is None and held is None:
            out[MOMENTS] += moments(flat, optimizer)
    return filled(out)


def resting(flat: ShardSpec) -> dict[str, int]:
    """Return one flat buffer's bytes of parameters and masters on the device."""
    return filled({PARAMETERS: flat.parameter_bytes, MASTERS: flat.master_bytes})


def moments(flat: ShardSpec, optimizer: str) -> int:
    """Return the bytes of optimizer states for the part of `flat` that this rank steps. Some
    optimizers also keep a number for each parameter of which the rank steps any element: Adam's
    count of steps has 4 bytes. Adagrad makes it for every parameter, when it is made.
    """
    kept = PLANNED[optimizer]
    if not flat.trainable:
        return 0
    return sum(
        flat.moment_bytes(slot, kept.elementwise_states) + kept.number_bytes
        for slot in flat.layout.slots
        if kept.at_once or flat.local(slot)
    )


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


# -- off the device --------------------------------------------------------------------------------


@dataclass(frozen=True)
class OffloadedBytes:
    """One rank's bytes off its device.

    Attributes:
        rest: between steps, gradients dropped, by tier ("host", "nvme", ...) and category.
        peak: the same in a step, at most.
    """

    rest: Mapping[str, Mapping[str, int]]
    peak: Mapping[str, Mapping[str, int]]

    @property
    def host(self) -> int:
        """Bytes of host memory, at most."""
        return sum(self.peak[HOST].values())


def offloaded_bytes(
    units: Sequence[UnitPlan],
    recipe: Recipe,
    micro_batches: int = 1,
    optimizer: str = "adamw",
    streams: bool = False,
    held: int | None = None,
) -> OffloadedBytes:
    """Return what the recipe keeps off the device, in steps of `micro_batches`. Not counted: masters of
    the host that it has cast for the device, usually those of one or two units.

    Args:
        streams: the device has streams. Then gradients come down in the masters' dtype, and the
            device adds those of later micro-batches ([Note: the device adds] in
            offload/storage.py). Else the host casts and adds.
        held: a rank's bytes of states on the host, if it steps matrices whole (`onefold.plan.owned`).
    """
    flats = [f for u in units for f in u.flats if f.tiers is not None]
    once = recipe.reduces_at == "boundary" or recipe.gradients.over == GROUP
    again = micro_batches > 1 and not once
    # With several reductions gradients wait for those of the last micro-batch
    in_backward = recipe.step_in_backward and not again
    rest = {tier.value: Counter[str]() for tier in OFF_DEVICE}
    for f in flats:
        for tier, category, nbytes in _resting(f, optimizer if held is None else None):
            rest[tier][category] += nbytes
    rest[HOST][MOMENTS] += held or 0
    passing = Counter(_passing(flats, recipe, optimizer, again, in_backward, streams))
    peak = rest | {HOST: rest[HOST] + passing}
    if streams:  # pinned, and therefore kept
        rest[HOST][IDLE] = passing[STAGING] + passing[GRADIENTS]
    return OffloadedBytes(
        {tier: filled(held) for tier, held in rest.items()},
        {tier: filled(held) for tier, held in peak.items()},
    )


def _resting(flat: ShardSpec, optimizer: str | None) -> Iterable[tuple[str, str, int]]:
    """Yield (tier, category, bytes) of one flat buffer, with its moments if `optimizer` says which."""
    assert flat.tiers is not None
    for tier, kind, nbytes in flat.offloaded:
        yield tier.value, _CATEGORIES[kind], nbytes
    if not flat.trainable or optimizer is None:
        return
    # In files moments have room for padding too. Memory keeps Adam's counts, and moments that are
    # too small to be packed
    tier = flat.tiers.optimizer
    if tier.on_disk:
        yield tier.value, MOMENTS, states_on_disk(flat, flat.own, optimizer)
        held = sum(
            flat.moment_bytes(slot, PLANNED[optimizer].elementwise_states)
            for slot in flat.layout.slots
            if not _stays(flat, slot)
        )
        yield HOST, MOMENTS, moments(flat, optimizer) - held
    else:
        yield tier.value, MOMENTS, moments(flat, optimizer)


def _stays(flat: ShardSpec, slot: layout.Slot) -> bool:
    """Return whether a parameter's moments are too small to be packed, and stay in memory while the
    others are on NVMe.
    """
    return (
        flat.moments is not None
        and FORMATS[flat.moments].packed
        and not FORMATS[flat.moments].of(slot.numel).packed
    )


def states_on_disk(flat: ShardSpec, numel: int, optimizer: str) -> int:
    """Return the bytes on NVMe of the moments of `numel` elements of a flat buffer."""
    if all(_stays(flat, slot) for slot in flat.layout.slots if flat.local(slot)):
        return 0
    each = numel * flat.dtypes.master.itemsize
    if flat.moments is not None:
        each = FORMATS[flat.moments].nbytes(numel)
    return PLANNED[optimizer].elementwise_states * each


# -- in a step -------------------------------------------------------------------------------------


def chunk_of(flats: Sequence[ShardSpec], recipe: Recipe) -> int:
    """Return the elements that are moved and stepped at a time: at most the largest interval."""
    return min(recipe.chunk, round_up(max(f.own for f in flats), SECTOR))


def _passing(
    flats: Sequence[ShardSpec],
    recipe: Recipe,
    optimizer: str,
    again: bool,
    in_backward: bool,
    streams: bool,
) -> dict[str, int]:
    """Return the host's bytes of gradients and of data on its way when their sum is largest.

    Args:
        again: gradients are added to earlier ones.
        in_backward: units are stepped in the backward pass.
    """
    trained = [f for f in flats if f.trainable and f.own]
    on_disk = (
        any(f.tiers is not None and f.tiers.gradients.on_disk for f in trained) and not in_backward
    )
    kept = sorted((f.own * f.dtypes.master.itemsize for f in trained), reverse=True)
    # Sums land beside the kept gradients if those are on NVMe, or if the host casts or adds
    beside = max(
        (
            f.own * (f.dtypes.master if streams else f.landed).itemsize
            for f in trained
            if on_disk or (not streams and (again or f.landed != f.dtypes.master))
        ),
        default=0,
    )
    stay = 0 if on_disk or in_backward else sum(kept)
    arriving = beside + (sum(kept[: WAITING + 1]) if in_backward else stay)
    step = _step_staging(flats, recipe, optimizer, on_disk, in_backward)
    backward = _backward_staging(flats, recipe, on_disk, streams)
    if streams:  # buffers are pinned, and each phase finds those of the other
        backward = step = backward + step + _casts(flats, recipe)
    elif in_backward:
        backward += step
    phases = [{GRADIENTS: arriving, STAGING: backward}, {GRADIENTS: stay, STAGING: step}]
    # The first step runs after the backward pass, and makes the moments
    if in_backward:
        first = _passing(flats, recipe, optimizer, again, in_backward=False, streams=streams)
        made = sum(
            nbytes
            for f in trained
            for tier, category, nbytes in _resting(f, optimizer)
            if (tier, category) == (HOST, MOMENTS)
        )
        made = 0 if streams else made  # pinned gradients do not make room for them
        phases.append(first | {GRADIENTS: max(0, first.get(GRADIENTS, 0) - made)})
    return filled(max(phases, key=lambda held: sum(held.values())))


def _backward_staging(
    flats: Sequence[ShardSpec], recipe: Recipe, on_disk: bool, streams: bool
) -> int:
    """Return the bytes of gradients that wait for the disk, and of units that are read from it."""
    read = sorted(
        f.own * f.dtypes.compute.itemsize
        for f in flats
        if f.tiers is not None and f.tiers.parameters.on_disk
    )
    ahead = 2 + recipe.units_ahead(any(f.topology.two_levels for f in flats))
    master = max((f.dtypes.master.itemsize for f in flats), default=0)
    waiting = (WRITES + 1) * chunk_of(flats, recipe) * master if on_disk else 0
    if streams:  # pinned buffers of one size do not make way for those of another
        sizes = Counter(read)
        return sum(nbytes * min(many, ahead) for nbytes, many in sizes.items()) + waiting
    return sum(read[::-1][:ahead]) + waiting


def _casts(flats: Sequence[ShardSpec], recipe: Recipe) -> int:
    """Return the bytes in which the host casts new masters of a disk for the device: so much, if
    copies lag behind.
    """
    sizes = Counter[int]()
    for f in flats:
        assert f.tiers is not None
        if f.tiers.optimizer.on_disk and f.tiers.parameters is Tier.DEVICE:
            chunk = chunk_of(flats, recipe)
            each = f.dtypes.compute.itemsize * (f.dtypes.compute != f.dtypes.master)
            sizes += Counter(min(chunk, f.own - a) * each for a in range(0, f.own, chunk))
    limit = max(HOST_WINDOWS * WINDOW, HOST_COPIES * max(sizes, default=0))
    return sum(min(nbytes * many, limit + nbytes) for nbytes, many in sizes.items())


def _step_staging(
    flats: Sequence[ShardSpec], recipe: Recipe, optimizer: str, on_disk: bool, in_backward: bool
) -> int:
    """Return the bytes of chunks of masters, gradients and moments that are read, stepped and
    written, and of compute copies on their way to the disk.
    """
    disk = [
        f
        for f in flats
        if f.trainable and f.tiers is not None and f.tiers.optimizer.on_disk and f.own
    ]
    if not disk:
        return 0
    chunk = chunk_of(flats, recipe)
    each = max(
        (1 + on_disk) * chunk * f.dtypes.master.itemsize + states_on_disk(f, chunk, optimizer)
        for f in disk
    )
    chunks = [-(-f.own // chunk) for f in disk]
    # In the backward pass each buffer is stepped alone
    many = max(chunks) if in_backward else sum(chunks)
    out = each * min(many, AHEAD + 1 + BEHIND)
    low = [f.dtypes.compute.itemsize for f in disk if f.lies_apart]
    return out + (max(low) * chunk * min(many, WRITES + 1) if low else 0)
