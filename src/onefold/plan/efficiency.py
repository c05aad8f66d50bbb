"""What a training step on a calibrated machine reaches of the speed of its parts.

Passes, moves and the optimizer are each measured alone. Then the engine trains a small transformer
(`StepPoint`). For each dtype and number of ranks, three figures of `Software` make the sum of the
parts equal to the seconds of those steps:

    seconds of a step = passes ÷ step_share + gradients · handed_s + moves exposed ÷ move_share + optimizer

    step_share    hooks, cold caches, the wait for the slowest of ranks that share cores     grows with compute
    handed_s      gradients cast, copied and added up, parameters cast                       seen in steps of few tokens for each weight
    move_share    waiting in each unit instead of once, sending beside computing             seen at stage 3, which sends in every unit
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onefold.machine.calibration import Calibration
from onefold.machine.measured import AtRanks, StepPoint
from onefold.plan.hardware import Machine, calibrated
from onefold.plan.times import DTYPES, Work, knows_passes, step_times
from onefold.plan.traffic import Software, traffic_of
from onefold.recipe import Placement, Recipe
from onefold.recipe.options import Precision

#: A calibrated machine without reference steps. Everything that was measured to overlap does (the
#: machine's `contention` says how much that is).
PARTS = Software(overlap=1.0)
#: Standard deviations, as factors: of a measured step; of the two shares from 1, and of handing
#: over from one copy of each element.
NOISE, SPREAD = 1.05, (2.0, 2.0, 5.0)
#: Bytes of one element that is copied: read and written.
COPIED = 8
_PRECISION: dict[str, Precision] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def measured_software(work: Work, machine: Machine) -> Software:
    """Return the defaults; on a calibrated machine, what its reference steps reached."""
    if machine.measured is None:
        return Software()
    if work.kernels is None and not (work.hidden and work.micro_tokens):
        return PARTS
    dtype, traced = DTYPES[work.precision], knows_passes(work, machine)
    return shares_of(machine.measured, dtype, machine.ranks, traced)


def shares_of(
    calibration: Calibration, dtype: str = "float32", ranks: int = 1, traced: bool = True
) -> Software:
    """Return what a step of the engine reaches of the rates of its parts, by the reference steps.

    Args:
        traced: passes are priced operation by operation, otherwise by the rate of their blocks.
    """
    calibration.check_dtype(dtype)

    def at(a: AtRanks) -> Software:
        steps = [s for s in a.steps if s.dtype == dtype]
        return calibration.once(
            ("shares", a.ranks, dtype, traced),
            lambda: shares(steps, calibrated(calibration, a.ranks), traced),
        )

    return replace(
        PARTS,
        step_share=calibration.between(ranks, lambda a: at(a).step_share),
        move_share=calibration.between(ranks, lambda a: at(a).move_share),
        handed_s=calibration.between(ranks, lambda a: at(a).handed_s),
    )


def shares(steps: Sequence[StepPoint], machine: Machine, traced: bool = True) -> Software:
    """Return the likeliest figures: those with which the time model predicts these steps, all of
    one dtype, best.

    The error of each step and the distance of each figure from 1 (of `handed_s`: from one copy) are
    assumed to be log-normal, with deviations `NOISE` and `SPREAD`. A figure on which the steps have
    no effect (hidden moves, moves of a single rank) thus stays there instead of explaining noise.
    The search takes Gauss-Newton steps, halved while they do not lead downhill.

    Args:
        traced: passes are priced operation by operation, otherwise by the rate of their blocks.
    """
    if not steps:
        return PARTS
    works = [(work_of(step, machine, traced), step.seconds) for step in steps]
    copy = COPIED / machine.gpu.memory_bandwidth

    def figures(x: np.ndarray) -> Software:
        step, move, handed = map(math.exp, x)
        return replace(PARTS, step_share=step, move_share=move, handed_s=copy * handed)

    def residuals(x: np.ndarray) -> np.ndarray:
        errors = [
            math.log(step_times(work, machine, figures(x)).step / seconds) / math.log(NOISE)
            for work, seconds in works
        ]
        return np.array([*errors, *(x / np.log(SPREAD))])

    at = np.zeros(3)
    now = residuals(at)
    for _ in range(30):
        slopes = np.stack(
            [(residuals(at + 1e-4 * np.eye(3)[i]) - now) / 1e-4 for i in range(3)], axis=1
        )
        change = np.clip(np.linalg.lstsq(slopes, -now, rcond=None)[0], -1, 1)
        while (after := residuals(at + change)) @ after > now @ now and abs(change).max() > 1e-4:
            change = change / 2
        if abs(change).max() <= 1e-4:
            break
        at, now = at + change, after
    return figures(at)


def work_of(step: StepPoint, machine: Machine, traced: bool = True) -> Work:
    """Return a reference step as the time model takes it."""
    recipe = Recipe.zero(step.stage, precision=_PRECISION[step.dtype])
    traffic = traffic_of(
        step.wire,
        step.calls,
        machine,
        resident=recipe.parameters.placement is Placement.REPLICATED,
        at_boundary=recipe.reduces_at == "boundary",
        nccl=machine.measured is None or machine.measured.backend != "gloo",
    )
    return Work(
        flops=step.flops,
        traffic=tuple(traffic),
        precision=_PRECISION[step.dtype],
        tokens=float(step.tokens * step.micro_batches * machine.ranks),
        micro_batches=step.micro_batches,
        optimizer_numel=step.stepped,
        hidden=step.hidden,
        micro_tokens=step.tokens,
        kernels=step.kernels if traced else None,
        handed=float(step.numel * step.micro_batches),
    )
