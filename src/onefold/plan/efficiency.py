"""What a whole step reaches of the rates that its parts were measured at: the software's efficiency of a calibrated machine.

`onefold doctor --calibrate` measures blocks, moves and the optimizer each alone, and then lets the engine train a small transformer of the
same blocks (`StepPoint`). Two shares make the sum of the parts equal to what those steps took, for each dtype, number of ranks and size:

    seconds of a step = blocks ÷ step_share + moves exposed ÷ move_share + optimizer

    stage 0, which sends once a step, tells   step_share   embedding, loss, casts, hooks, cold caches, the wait for the slowest rank
    stage 3, which sends in every unit, tells move_share   waiting in each unit instead of once, sending beside computing

A share above 1 says that the parts overlap, or that a block alone was slower. What no reference step has shown is not extrapolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from onefold.plan.hardware import Machine
from onefold.plan.measured import StepPoint
from onefold.plan.times import Software, Work, step_times, traffic_of
from onefold.recipe import Placement, Recipe

#: A calibrated machine before any reference step: everything that was measured to overlap does (its `contention` says how much that is).
PARTS = Software(overlap=1.0)
#: Factors by which a measured step may be off, and a share from 1 before anything is known of it (one deviation each).
NOISE, SPREAD = 1.05, 2.0
#: Shares are looked for between these.
LEAST, MOST = 0.05, 5.0
#: Turns of one share after the other.
ROUNDS = 10
GOLDEN = (math.sqrt(5) - 1) / 2
_PRECISION = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def shares(steps: Sequence[StepPoint], machine: Machine) -> tuple[float, float]:
    """(step_share, move_share) with which the time model says of these steps, of one dtype and size, what was measured.

    The likeliest pair: a measured step is off by `NOISE`, a share by a factor of `SPREAD` from 1, both log-normally. So a share that the
    steps say nothing about (moves that are hidden, or a lone rank's) stays at 1 rather than explain what noise there is.
    """
    found = {"step_share": 1.0, "move_share": 1.0}
    works = [(work_of(step, machine), step.seconds) for step in steps]

    def unlikely(name: str, share: float) -> float:
        software = replace(PARTS, **{**found, name: share})
        errors = [math.log(step_times(work, machine, software).step / seconds) for work, seconds in works]
        return sum((e / math.log(NOISE)) ** 2 for e in errors) + (math.log(share) / math.log(SPREAD)) ** 2

    for _ in range(ROUNDS if works else 0):
        for name in found:
            found[name] = _least(partial(unlikely, name))
    return found["step_share"], found["move_share"]


def work_of(step: StepPoint, machine: Machine) -> Work:
    """A reference step as the time model takes it."""
    recipe = Recipe.zero(step.stage, precision=_PRECISION[step.dtype])
    kept, late = recipe.parameters.placement is Placement.REPLICATED, recipe.reduce_at == "boundary"
    nccl = getattr(machine.measured, "backend", "nccl") != "gloo"
    return Work(
        flops=step.flops,
        traffic=tuple(traffic_of(step.wire, step.calls, machine, kept=kept, at_boundary=late, nccl=nccl)),
        precision=_PRECISION[step.dtype],
        tokens=float(step.tokens * step.micro_batches * machine.ranks),
        micro_batches=step.micro_batches,
        optimizer_numel=step.numel,
        hidden=step.hidden,
        micro_tokens=step.tokens,
    )


def _least(cost: Callable[[float], float]) -> float:
    """Where between `LEAST` and `MOST` a cost that falls and then rises is least: the golden section, on a logarithmic scale."""
    low, high = math.log(LEAST), math.log(MOST)
    a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_a, at_b = cost(math.exp(a)), cost(math.exp(b))
    for _ in range(22):  # 4.6 × 0.618^22: to 0.01 %
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - GOLDEN * (high - low)
            at_a = cost(math.exp(a))
        else:
            low, a, at_a = a, b, at_b
            b = low + GOLDEN * (high - low)
            at_b = cost(math.exp(b))
    return math.exp((low + high) / 2)
