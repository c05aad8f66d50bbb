"""What encoding, decoding and adding up cost a step: bytes of memory that they read and write.

    gathers      the own interval once after a step: read in the compute dtype, written encoded; the whole each time: read encoded, written
    reductions   on each hop what goes to others: read, written encoded; what comes from them: read encoded, added to fp32 sums
    feedback     what is sent once more, read and written in fp32
    sums         on each hop, of the n elements that a rank sums: the parts of all N ranks read in the wire's dtype, the sum written;
                 where NCCL adds (reduce="native") its sum is read and written once

They are done where the model is computed, so nothing hides them (Wang et al. 2023, ZeRO++, section
3.4, fuses them into the kernels of the moves). What share of a copy's speed they reach stands in
`onefold.plan.times`.
"""

from __future__ import annotations

from collections.abc import Sequence

from onefold.layout import ShardSpec
from onefold.plan.states import UnitPlan, launches_of, puts_of
from onefold.recipe import Recipe
from onefold.recipe.groups import GROUP

_FP32 = 4


def coded_bytes(units: Sequence[UnitPlan], recipe: Recipe, micro_batches: int = 1) -> float:
    """Bytes of memory read and written in a step, by one rank."""
    total = 0.0
    for unit in units:
        for flat in unit.flats:
            low = flat.dtypes.compute.itemsize
            if flat.gather_codec is not None:
                part = flat.layout.shard_numel * low + flat.each
                total += (
                    launches_of(unit, flat, recipe, micro_batches) * flat.ranks * part
                    + puts_of(unit, flat, recipe, 1) * part
                )
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
        times = micro_batches if recipe.reduce_at == "micro-batch" else 1
        for at, hop in enumerate(flat.hops):
            times = 1 if hop.level == "inter-group" and recipe.gradients.over == GROUP else times
            adds = flat.added_by(hop)
            if adds == "pairwise":
                continue
            if adds == "backend" and flat.whole_master:  # a copy for it to add into
                total += times * 2 * hop.span * flat.dtypes.wire.itemsize
                continue
            sent_on = at + 1 == len(flat.hops) and (flat.whole_master or flat.broadcast_back)
            written = flat.dtypes.wire if sent_on else flat.dtypes.sums
            total += times * added_bytes(
                hop.own,
                hop.size if adds == "at once" else 1,
                flat.dtypes.wire.itemsize,
                written.itemsize,
            )
    return total


def added_bytes(numel: float, parts: int, wire: int, written: int) -> float:
    """Read and written by one pass that adds `parts` parts of `numel` elements, `wire` and
    `written` bytes an element: the least that any sum of them can move (Williams et al. 2009,
    Roofline: an addition for each element read is bound by memory, on any GPU).
    """
    return numel * (parts * wire + written)


def _reduced(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> float:
    times, total = micro_batches if recipe.reduce_at == "micro-batch" else 1, 0.0
    for hop in (h for h in flat.hops if flat.encodes(h)):
        times = 1 if hop.level == "inter-group" and recipe.gradients.over == GROUP else times
        coded = flat.part_bytes(hop)
        each = hop.own * flat.dtypes.wire.itemsize + 2 * coded + 2 * _FP32 * hop.own
        total += (
            times * (hop.size - 1) * (each + (4 * _FP32 * hop.own if flat.error_feedback else 0))
        )
    return total
