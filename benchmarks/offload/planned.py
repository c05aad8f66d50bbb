"""What a rank's state should take on the host and on the disk, worked out from the recipe and the sizes of its intervals.

    rests on      host                                          NVMe
    masters       4 bytes an element of this rank's             4
    moments       8 (Adam)                                      8
    gradients     4, from their reduction to zero_grad()        4
    parameters    a copy in the compute dtype, unless masters   the same
                  are that and lie there

What is on its way to and from the disk is a fixed number of chunks however large the model is: in the step AHEAD + 1 + BEHIND of them,
each of masters, gradients and two moments; in the backward pass the unit's own gradient, which is handed over, and the chunks being
written. Stepping behind the backward pass holds the gradients of a few units at a time in place of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MASTER, MOMENTS, GRADIENT = 4, 8, 4
_WRITTEN = 4
"""Chunks of gradients that wait for the disk."""


def planned(engine: Any) -> dict[str, int]:
    """Bytes of this rank with AdamW and fp32 masters: "host_rest", "host_peak", "disk".

    `engine`: what `onefold.engine_of` returns; only sizes, tiers and the recipe are read.
    """
    from onefold.recipe import Tier

    p, g, o = (row.tier for row in (engine.recipe.parameters, engine.recipe.gradients, engine.recipe.optimizer))
    rest = dict.fromkeys(Tier, 0)
    gradients: list[int] = []
    for flat in engine.at_home:
        own, compute = flat.owned[1] - flat.owned[0], flat.dtypes.compute.itemsize
        trained = any(entry.param.requires_grad for entry in flat.entries)
        rest[o] += own * (MASTER + (MOMENTS if trained else 0))
        if p is not Tier.DEVICE and (p is not o or compute != MASTER):
            rest[p] += own * compute
        if trained:
            gradients.append(own * GRADIENT)
    behind = bool(engine.recipe.step_in_backward)
    if g is Tier.NVME:
        rest[g] += sum(gradients)
    held = _held_at_once(gradients) if behind else 0 if g is Tier.NVME else sum(gradients)
    passing = _passing(engine.recipe.chunk, gradients, g is Tier.NVME and not behind) if o is Tier.NVME else 0
    return {"host_rest": rest[Tier.HOST], "host_peak": rest[Tier.HOST] + held + passing, "disk": rest[Tier.NVME]}


def _held_at_once(gradients: Sequence[int]) -> int:
    """Bytes of gradients that wait for a step behind the backward pass: at most of the largest units."""
    from onefold.optim.behind import WAITING

    return sum(sorted(gradients)[-WAITING - 1 :])


def _passing(numel: int, gradients: Sequence[int], on_disk: bool) -> int:
    """Bytes of host memory for chunks of `numel` elements on their way. `on_disk`: gradients go there and come back too."""
    from onefold.optim.offloaded import AHEAD, BEHIND

    chunk, kinds = MASTER * numel, 4 if on_disk else 3
    chunks = sum(-(-nbytes // chunk) for nbytes in gradients)
    stepping = kinds * chunk * min(chunks, AHEAD + 1 + BEHIND)
    return max(stepping, max(gradients) + min(_WRITTEN * chunk, max(gradients))) if on_disk and gradients else stepping
