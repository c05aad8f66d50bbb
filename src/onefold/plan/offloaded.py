"""Offloaded state in bytes: what the host and disks hold, and what moves between tiers in a step.

                 host                                            a disk
    at rest      masters, moments, parameters: by their rows     the same, and gradients, which keep their place
    in a step    + gradients, from their reduction to the end    –
                 + chunks on their way to and from the disk
                 + activations

    forward      up, read    parameters, for each unit's gather
    backward     up, read    the same again; down: gradients; written: gradients that are stored on NVMe
    step         read, written: masters, moments; up: the compute copy, if it is on the device

This follows offload/storage.py, offload/transfers.py and offload/step.py in the steady state. Tests
compare it with their ledgers: bytes at rest and moved are exact, bytes at peak are a bound. The
tiers are ZeRO-Offload's (Ren et al. 2021, section 4.1) and ZeRO-Infinity's (Rajbhandari et al.
2021, 5.1).

Activations that are on the host between the forward and the backward pass leave the slots of an
`Activity` and come back, as in offload/activations.py: of the storages that autograd saves the
large ones (`Activity.movable`), the first saved first.

    unit        0       1       2       loss    2       1       0
    kept        a       a b     a b c   a b c   a b c   a b     a
    on the host         a       a b     a b c   a b     a                 as far as the budget allows
    device      a       b       c       ·       c       b       a         + copies on their way, + what is fetched ahead
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from onefold import layout
from onefold.layout import ShardSpec, round_up
from onefold.memory import GRADIENTS, IDLE, MASTERS, MOMENTS, PARAMETERS, STAGING
from onefold.offload.activations import NEAR, SLAB
from onefold.offload.in_backward import WAITING
from onefold.offload.step import AHEAD, BEHIND
from onefold.offload.transfers import BEHIND as WRITES
from onefold.plan.activity import Activity, Slot
from onefold.plan.schema import MOVED
from onefold.plan.states import MOMENTS_OF, UnitPlan, moments
from onefold.plan.wire import puts_of, reductions_of
from onefold.recipe import Recipe, Tier
from onefold.recipe.moments import FORMATS
from onefold.recipe.options import SECTOR
from onefold.recipe.rows import OFF_DEVICE

Move = Literal["up", "down", "read", "written"]
#: The forward passes, the backward passes, or the optimizer's step.
TierPhase = Literal["forward", "backward", "step"]
HOST, NVME = Tier.HOST.value, Tier.NVME.value
_CATEGORIES = {"master": MASTERS, "parameter": PARAMETERS, "gradient": GRADIENTS}


@dataclass(frozen=True)
class Carried:
    """Bytes that one rank moves between tiers in a step, and the phase in which it does."""

    move: Move
    nbytes: float
    phase: TierPhase


@dataclass(frozen=True)
class OffloadedBytes:
    """One rank's bytes off its device.

    Attributes:
        rest: between steps, gradients dropped, by tier ("host", "nvme", ...) and category.
        peak: the same in a step, at most.
        carried: what a step moves.
        stepped: elements whose update runs on the host.
        cast: bytes that the host reads and writes to cast stepped masters to the compute dtype.
    """

    rest: Mapping[str, Mapping[str, int]]
    peak: Mapping[str, Mapping[str, int]]
    carried: tuple[Carried, ...]
    stepped: int
    cast: int = 0

    @property
    def host(self) -> int:
        """Bytes of host memory, at most."""
        return sum(self.peak[HOST].values())

    @property
    def moved(self) -> dict[str, int]:
        """Bytes of a step by move, as the engine's ledger counts them."""
        return moved_by(self.carried)


def moved_by(carried: Iterable[Carried]) -> dict[str, int]:
    """Add up bytes by move, without zeros."""
    sums: Counter[str] = Counter()
    for c in carried:
        sums[c.move] += round(c.nbytes)
    return filled({move: sums[move] for move in MOVED})


def offloaded_bytes(
    units: Sequence[UnitPlan],
    recipe: Recipe,
    micro_batches: int = 1,
    optimizer: str = "adamw",
    streams: bool = False,
    held: int | None = None,
    stepped: int | None = None,
) -> OffloadedBytes:
    """Return what the recipe keeps off the device, in steps of `micro_batches`.

    Args:
        streams: the device has streams. Then gradients come down in the masters' dtype, and the
            device adds those of later micro-batches ([Note: the device adds] in
            offload/storage.py). Else the host casts and adds.
        held, stepped: a rank's bytes of states on the host, and the elements that it steps there, if
            it steps matrices whole (`onefold.plan.owned`).
    """
    pairs = [(u, f) for u in units for f in u.flats if f.tiers is not None]
    flats = [f for _, f in pairs]
    reductions = max((reductions_of(f, recipe, micro_batches) for f in flats), default=1)
    # With several reductions gradients wait for those of the last micro-batch
    in_backward = recipe.step_in_backward and reductions == 1
    rest = {tier.value: Counter[str]() for tier in OFF_DEVICE}
    for f in flats:
        for tier, category, nbytes in _resting(f, optimizer if held is None else None):
            rest[tier][category] += nbytes
    rest[HOST][MOMENTS] += held or 0
    again = reductions > 1
    passing = Counter(_passing(flats, recipe, optimizer, again, in_backward, streams))
    peak = rest | {HOST: rest[HOST] + passing}
    if streams:
        rest[HOST][IDLE] = passing[STAGING]  # pinned, and therefore kept
    return OffloadedBytes(
        {tier: filled(held) for tier, held in rest.items()},
        {tier: filled(held) for tier, held in peak.items()},
        _carried(pairs, recipe, micro_batches, optimizer, streams),
        stepped=sum(f.local(slot) for f in flats if f.trainable for slot in f.layout.slots)
        if stepped is None
        else stepped,
        cast=sum(_cast(f, streams) for f in flats if f.trainable),
    )


def filled(held: Mapping[str, int]) -> dict[str, int]:
    """Leave zeros out."""
    return {k: v for k, v in held.items() if v}


# -- at rest ---------------------------------------------------------------------------------------


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
        yield tier.value, MOMENTS, _states(flat, flat.own, optimizer)
        held = sum(
            flat.moment_bytes(slot, MOMENTS_OF[optimizer])
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


def _states(flat: ShardSpec, numel: int, optimizer: str) -> int:
    """Return the bytes on NVMe of the moments of `numel` elements of a flat buffer."""
    if all(_stays(flat, slot) for slot in flat.layout.slots if flat.local(slot)):
        return 0
    each = numel * flat.dtypes.master.itemsize
    if flat.moments is not None:
        each = FORMATS[flat.moments].nbytes(numel)
    return MOMENTS_OF[optimizer] * each


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
        backward = step = backward + step
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
        (1 + on_disk) * chunk * f.dtypes.master.itemsize + _states(f, chunk, optimizer)
        for f in disk
    )
    chunks = [-(-f.own // chunk) for f in disk]
    # In the backward pass each buffer is stepped alone
    many = max(chunks) if in_backward else sum(chunks)
    out = each * min(many, AHEAD + 1 + BEHIND)
    low = [f.dtypes.compute.itemsize for f in disk if f.lies_apart]
    return out + (max(low) * chunk * min(many, WRITES + 1) if low else 0)


# -- moves -----------------------------------------------------------------------------------------


def _carried(
    pairs: Iterable[tuple[UnitPlan, ShardSpec]],
    recipe: Recipe,
    micro_batches: int,
    optimizer: str,
    streams: bool,
) -> tuple[Carried, ...]:
    """Return what a step moves: one entry for each move and phase."""
    sums = Counter[tuple[Move, TierPhase]]()
    for unit, flat in pairs:
        moves = _moves(unit, flat, recipe, micro_batches, optimizer, streams)
        for c in moves if flat.own else ():
            sums[c.move, c.phase] += c.nbytes  # type: ignore[assignment]
    return tuple(Carried(move, n, phase) for (move, phase), n in sums.items() if n)


def _moves(
    unit: UnitPlan,
    flat: ShardSpec,
    recipe: Recipe,
    micro_batches: int,
    optimizer: str,
    streams: bool,
) -> Iterable[Carried]:
    """Yield what a step moves of one flat buffer."""
    assert flat.tiers is not None
    d, own, p = flat.dtypes, flat.own, flat.tiers.parameters
    compute, master = own * d.compute.itemsize, own * d.master.itemsize
    if p is not Tier.DEVICE:
        move: Move = "read" if p.on_disk else "up"
        forward = puts_of(unit, flat, recipe, micro_batches, backward=False)
        both = puts_of(unit, flat, recipe, micro_batches)
        yield Carried(move, forward * compute, "forward")
        yield Carried(move, (both - forward) * compute, "backward")
    if not flat.trainable:
        return
    reductions = reductions_of(flat, recipe, micro_batches)
    landed = master if streams else own * flat.landed.itemsize
    yield Carried("down", reductions * landed, "backward")
    in_backward = recipe.step_in_backward and reductions == 1
    on_disk = flat.tiers.gradients.on_disk and not in_backward
    if streams and not on_disk:
        yield Carried("up", (reductions - 1) * master, "backward")
    if on_disk:
        yield Carried("written", reductions * master, "backward")
        yield Carried("read", (reductions - 1) * master, "backward")
    if flat.tiers.optimizer.on_disk:
        states = master + _states(flat, own, optimizer)
        yield Carried("read", states + (master if on_disk else 0), "step")
        yield Carried("written", states + (compute if flat.lies_apart else 0), "step")
    if p is Tier.DEVICE:
        yield Carried("up", compute, "step")


def _cast(flat: ShardSpec, streams: bool) -> int:
    """Return the bytes that the host reads and writes to cast the masters of a flat buffer."""
    assert flat.tiers is not None
    d = flat.dtypes
    # Without streams the copy to the device casts
    if d.compute == d.master or (flat.tiers.parameters is Tier.DEVICE and not streams):
        return 0
    return flat.own * (d.master.itemsize + d.compute.itemsize)


# -- activations -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnHost:
    """An activity of which the host holds a part.

    Attributes:
        activity: what is left on the device.
        moved: bytes of a micro-batch that go down and come up again.
        nbytes: bytes of host memory for them, in whole slabs.
    """

    activity: Activity
    moved: int = 0
    nbytes: int = 0

    def carried(self, micro_batches: int) -> tuple[Carried, ...]:
        """Return what a step of `micro_batches` moves."""
        total = self.moved * micro_batches
        if not total:
            return ()
        return Carried("down", total, "forward"), Carried("up", total, "backward")


def on_host(activity: Activity, budget: int, shared: bool) -> OnHost:
    """Move up to `budget` bytes of an activity to the host.

    Args:
        shared: the device is a CPU: copies to the host finish at once.
    """
    near = down = min(NEAR, budget // 8)
    order = _in_order(activity.slots)
    gone: dict[str, int] = {}
    for unit in order:
        gone[unit] = min(activity.movable.get(unit, 0), budget - sum(gone.values()))
    total = sum(gone.values())
    slots, seen = [], dict.fromkeys(order, 0)
    last = {slot.unit: i for i, slot in enumerate(activity.slots) if slot.phase == "forward"}
    for i, slot in enumerate(activity.slots):
        if slot.phase == "forward":  # saved by other units so far
            saved = sum(seen.values())
            seen[slot.unit] = gone[slot.unit] if i == last[slot.unit] else 0
            # Copies in flight hold `near` bytes, or twice the largest of them
            large = min(activity.largest.get(slot.unit, 0), gone[slot.unit])
            down = max(down, min(2 * large, down + large))
            waits = 0 if shared else down
        else:  # saved before this unit; what later units saved has been read
            if slot.unit in order:
                del order[order.index(slot.unit) :]
            saved = sum(gone[unit] for unit in order)
            # What is fetched ahead: `near` bytes, or one copy
            waits = max([near, *(activity.largest.get(unit, 0) for unit in order[-1:])])
        left = slot.peak - saved + min(waits, saved)
        slots.append(replace(slot, peak=max(left, slot.logits + slot.gradients)))
    slabs = min(budget, -(-total // SLAB) * SLAB)
    return OnHost(replace(activity, slots=tuple(slots)), total, slabs)


def _in_order(slots: Sequence[Slot]) -> list[str]:
    """Return the units in the order in which their forward passes end. A unit that runs again (a
    root with the loss) is where it runs last.
    """
    order = list(dict.fromkeys(s.unit for s in reversed(slots) if s.phase == "forward"))
    return order[::-1]
