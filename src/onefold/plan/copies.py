"""What the engine's own kernels read and write of memory in a step (encoding, adding up, copies and
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

from collections.abc import Sequence

from onefold.layout import ShardSpec
from onefold.plan.states import UnitPlan
from onefold.plan.wire import hops_in_a_step, launches_of, part_bytes, puts_of
from onefold.recipe import Recipe

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
        for hop, times in hops_in_a_step(flat, recipe, micro_batches):
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


def _reduced(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> float:
    total = 0.0
    for hop, times in hops_in_a_step(flat, recipe, micro_batches):
        if flat.encodes(hop):
            each = hop.own * flat.dtypes.wire.itemsize + 2 * part_bytes(flat, hop)
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
    for at, (hop, times) in enumerate(hops_in_a_step(flat, recipe, micro_batches)):
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
