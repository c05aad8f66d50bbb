"""What a rank's state should take on the host and on the disk, worked out from the recipe and the
sizes of its intervals.

    rests on      host                                          NVMe
    masters       4 bytes an element of this rank's             4
    moments       8 (Adam)                                      8
    gradients     4, from their reduction to zero_grad()        4
    parameters    a copy in the compute dtype, unless masters   the same
                  are that and lie there

What is on its way to and from the disk is a fixed number of chunks however large the model is: in
the step AHEAD + 1 + BEHIND of them, each of masters, gradients and two moments; in the backward
pass the unit's own gradient, which is handed over, and the chunks being written. Where gradients
come in another dtype than the masters', the unit's own is there twice for a moment.

Stepping behind the backward pass holds the gradients of WAITING + 1 units that follow each other
there, in place of all, and the chunks of one unit's step. A run's first step is an ordinary one:
gradients for the disk go there, others wait for it on the host. There it makes the moments, which
are larger, and drops the gradients unit by unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MASTER, MOMENTS, GRADIENT = 4, 8, 4


def planned(engine: Any) -> dict[str, int]:
    """Bytes of this rank with AdamW and fp32 masters: "host_rest", "host_peak", "disk". One
    micro-batch a step, nothing left to accumulate.

    `engine`: what `onefold.engine_of` returns; only sizes, tiers and the recipe are read.
    """
    from onefold.recipe import Tier

    recipe = engine.recipe
    p, g, o = (row.tier for row in (recipe.parameters, recipe.gradients, recipe.optimizer))
    rest = dict.fromkeys(Tier, 0)
    gradients: list[int] = []  # of the flat buffers, in the order of the backward pass
    twice = low = 0
    for flat in (
        flat
        for index in engine.schedule.reduces
        for flat in engine.units[index].flats
        if flat.storage.offloaded
    ):
        own, compute = flat.owned[1] - flat.owned[0], flat.dtypes.compute.itemsize
        trained = any(entry.param.requires_grad for entry in flat.entries)
        rest[o] += own * (MASTER + (MOMENTS if trained else 0))
        if p is not Tier.DEVICE and (p is not o or compute != MASTER):
            rest[p] += own * compute
            low = compute if p is Tier.NVME else 0
        if trained:
            came = flat.dtypes.wire if flat.whole_master else flat.dtypes.sums
            gradients.append(own * GRADIENT)
            twice = max(twice, own * came.itemsize if came != flat.dtypes.master else 0)
    if g is Tier.NVME:
        rest[g] += sum(gradients)
    chunk, largest = MASTER * engine.transfers.chunk, max(gradients, default=0)
    peak = ordinary(gradients, chunk, low, g is Tier.NVME, o is Tier.NVME) + twice
    if recipe.step_in_backward:
        peak = behind = (
            held_at_once(gradients)
            + twice
            + (stepping(chunk, largest, 3, low) if o is Tier.NVME else 0)
        )
        if o is Tier.NVME:
            # The first step
            peak = max(behind, ordinary(gradients, chunk, low, g is Tier.NVME, True) + twice)
    return {
        "host_rest": rest[Tier.HOST],
        "host_peak": rest[Tier.HOST] + peak,
        "disk": rest[Tier.NVME],
    }


def held_at_once(gradients: Sequence[int]) -> int:
    """Bytes of gradients that wait for a step behind the backward pass; `gradients`: of its units,
    in its order.
    """
    from onefold.offload.in_backward import WAITING

    return max((sum(gradients[i : i + WAITING + 1]) for i in range(len(gradients))), default=0)


def ordinary(
    gradients: Sequence[int], chunk: int, low: int, gradients_on_disk: bool, on_disk: bool
) -> int:
    """Bytes of host memory, beyond what rests there, of a step that is taken at `optimizer.step()`;
    see `stepping`.
    """
    from onefold.runtime.storage import BEHIND

    held = 0 if gradients_on_disk else sum(gradients)
    if not on_disk:
        return held
    step = stepping(
        chunk,
        sum(-(-nbytes // chunk) for nbytes in gradients) * chunk,
        4 if gradients_on_disk else 3,
        low,
    )
    largest = max(gradients, default=0)
    written = min(BEHIND + 1, -(-largest // chunk)) * chunk  # on their way from the backward pass
    return held + (max(step, largest + written) if gradients_on_disk else step)


def stepping(chunk: int, nbytes: int, kinds: int, low: int) -> int:
    """Bytes of the buffers that a step of `nbytes` of masters on NVMe goes through.

    `chunk`: bytes of a buffer of masters, of which there are `kinds`; `low`: bytes an element of
    parameters beside the masters there.
    """
    from onefold.offload.step import AHEAD, BEHIND
    from onefold.runtime.storage import BEHIND as WRITES

    chunks = -(-nbytes // chunk)
    return kinds * chunk * min(chunks, AHEAD + 1 + BEHIND) + chunk // MASTER * low * min(
        chunks, WRITES + 1
    )
