"""What the engine's own kernels cost a step: bytes of memory that its copies and casts read and
write.

    gradients    each is copied into its unit's buffer, or added to it where an earlier micro-batch has left one
    reductions   sums of an earlier hop, or of several micro-batches, are cast to the dtype of the wire
    sums         added to those of earlier micro-batches; cast to the dtype of the masters, where that is another

They run where the model is computed, so nothing hides them. Casts of masters for a gather run
beside it, on the stream of the copies up. On a calibrated machine its reference steps have measured
them (`Software.handed_s`). Adding up and encoding are counted in plan/coding.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from onefold.layout import ShardSpec
from onefold.plan.states import UnitPlan
from onefold.recipe import Recipe
from onefold.recipe.groups import GROUP


def handled_bytes(units: Sequence[UnitPlan], recipe: Recipe, micro_batches: int = 1) -> float:
    """Bytes of memory read and written in a step, by one rank."""
    total = 0.0
    for unit in units:
        for flat in (f for f in unit.flats if f.trainable and not f.unsharded):
            total += _stored(flat, recipe, micro_batches) + _passed_on(flat, recipe, micro_batches)
    return total


def _stored(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> float:
    """Gradients on their way into the buffer that is reduced."""
    d = flat.dtypes
    if recipe.reduce_at == "micro-batch" or micro_batches == 1:
        return micro_batches * flat.numel * (d.compute.itemsize + d.wire.itemsize)
    first, more = d.compute.itemsize + d.sums.itemsize, d.compute.itemsize + 2 * d.sums.itemsize
    return flat.numel * (first + (micro_batches - 1) * more)


def _passed_on(flat: ShardSpec, recipe: Recipe, micro_batches: int) -> float:
    """What is sent on, and sums on their way to where the optimizer finds them."""
    d, total = flat.dtypes, 0.0
    times = micro_batches if recipe.reduce_at == "micro-batch" else 1
    for at, hop in enumerate(flat.hops):
        if hop.level == "inter-group" and recipe.gradients.over == GROUP:
            times = 1
        wide = d.sums != d.wire and (
            at > 0 or (recipe.reduce_at == "boundary" and micro_batches > 1)
        )
        # Parts for others are cast from the dtype of sums to that of the wire; the own one stays,
        # and weighs more
        if wide:
            others = (hop.span - hop.own) * (d.sums.itemsize + d.wire.itemsize)
            total += times * (others + hop.own * (d.sums.itemsize - d.wire.itemsize))
    # Added to what earlier micro-batches left
    total += (times - 1) * flat.own * 3 * d.master.itemsize
    if flat.landed != d.master:
        total += times * flat.own * (flat.landed.itemsize + d.master.itemsize)
    return total
