"""Bytes that the engine never exceeds, in closed form."""

from __future__ import annotations

from onefold.layout import ShardSpec
from onefold.plan.replayed import outer
from onefold.plan.schema import MOMENTS
from onefold.plan.states import UnitPlan, at_rest, units_ahead
from onefold.recipe import Recipe
from onefold.recipe.core import SMALL_TRAFFIC
from onefold.recipe.rows import GROUP


def bound_of(units: list[UnitPlan], recipe: Recipe, micro_batches: int = 1, window: int = 0) -> int:
    """Bytes that the engine's ledger never exceeds, in closed form.

    S + G·(ahead + 2) + C + R·(in_flight + 2) + T, where S is what rests, G the largest gathered
    unit, ahead how many are gathered before their use, C the gathered units around one another at
    most, R the largest reduction of a unit (on each hop its buffer, what is received, what is sent
    where that is a copy), T all gradients once they are reduced (and copied where the masters have
    another dtype), and as long as they are kept whole or held in a group. Of what is stepped off
    the device T has the largest alone, or all while they are sent on, and
    what copies to the host still read: at most a `window` and the largest, or all of it. Where
    parameters come from a disk, G counts once more. Small units that do not count as ahead or under
    way (SMALL_TRAFFIC) add 1 MiB at most.
    """
    rest = {k: v for k, v in at_rest(units).items() if k != MOMENTS}
    prefetch, in_flight = units_ahead(units, recipe), recipe.in_flight if recipe.overlap else 0
    gathered = [sum(f.gathered_bytes for f in u.flats if not f.resident) for u in units]
    late, again = recipe.reduce_at == "boundary" and micro_batches > 1, micro_batches > 1
    names = outer(list(units))
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
    ahead = max(every, max(gathered, default=0) * (prefetch + 2 + fetched)) + nested
    # Small units may be gathered, and small reductions be under way, beyond those counts: the
    # latter with what they send and receive.
    small = min(sum(gathered), SMALL_TRAFFIC) * bool(prefetch) + min(
        sum(reductions), 3 * SMALL_TRAFFIC
    ) * bool(in_flight)
    read = min(window + max(leaving), sum(leaving)) if window else 0
    return (
        sum(rest.values())
        + ahead
        + max(reductions, default=0) * (in_flight + 2)
        + total
        + max(leaving)
        + read
        + small
    )


def _reduced(flat: ShardSpec, late: bool, held_in_group: bool) -> tuple[int, int]:
    """Bytes of a flat buffer's gradients once they are reduced: (on the device until the step, on
    their way to the host). `late`, `held_in_group`: they are kept whole, or in a group, before.
    """
    sums, landed = flat.dtypes.sums.itemsize, flat.landed
    kept = flat.numel * sums if late else 0
    if held_in_group and not late and len(flat.hops) > 1:
        kept = flat.hops[0].own * sums
    sent_on = flat.whole_master or flat.broadcast_back
    nbytes = (flat.own if sent_on else flat.layout.shard_numel) * landed.itemsize
    if flat.tiers is not None:
        return (kept + nbytes, 0) if flat.broadcast_back else (kept, nbytes)
    elements = flat.own if sent_on else flat.layout.shard_numel
    copied = flat.dtypes.master.itemsize if landed != flat.dtypes.master else 0
    # Sums that are sent on wait for the end of backward
    twice = landed.itemsize if sent_on else 0
    return kept + elements * (landed.itemsize + copied + twice), 0


def _on_its_way(flat: ShardSpec, late: bool) -> int:
    """Bytes of a reduction on all its hops; `late`: it was kept whole, in the dtype of sums."""
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


def _enclosing(path: str) -> list[str]:
    """The paths of whatever may lie around a unit, its own among them."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts) + 1)]
