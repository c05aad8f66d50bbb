"""What a training step on a calibrated machine reaches of the speed of its parts.

Passes, moves and the optimizer are each measured alone. Then the engine trains a small transformer
(`StepPoint`), and three figures make the sum of the parts equal to what those steps took, for each
dtype and number of ranks:

    seconds of a step = passes ÷ step + gradients · handed_s + moves exposed ÷ move + optimizer

    step        hooks, cold caches, the wait for the slowest of ranks that share cores       as much as there is compute
    handed_s    gradients cast, copied and added up, parameters cast                         told by few tokens for each weight
    move        waiting in each unit instead of once, sending beside computing               told by stage 3, which sends in every unit

A share above 1 says that parts overlap, or that alone they were slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onefold.doctor.calibration import Calibration
from onefold.doctor.measured import AtRanks, StepPoint
from onefold.plan.hardware import Machine, calibrated
from onefold.plan.times import DTYPES, Work, knows_passes, step_times
from onefold.plan.traffic import Software, traffic_of
from onefold.recipe import Placement, Recipe
from onefold.recipe.options import Precision

#: A calibrated machine before any reference step: everything that was measured to overlap does (its
#: `contention` says how much that is).
PARTS = Software(overlap=1.0)
#: Factors by which, one deviation each, a measured step may be off; and shares off 1, handing over
#: off one copy of each element.
NOISE, SPREAD = 1.05, (2.0, 2.0, 5.0)
#: Bytes of one element that is copied: read and written.
COPIED = 8
_PRECISION: dict[str, Precision] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Shares:
    """Of the rates of passes and of moves, what a step reaches; and the seconds that taking over an
    element of a gradient takes.
    """

    step: float = 1.0
    move: float = 1.0
    handed_s: float = 0.0

    @property
    def software(self) -> Software:
        """These as the time model takes them."""
        return replace(PARTS, step_share=self.step, move_share=self.move, handed_s=self.handed_s)


def measured_software(work: Work, machine: Machine) -> Software:
    """The defaults; on a calibrated machine everything that was measured to overlap does (its
    `contention` says how much that is), and steps reach what its reference steps reached.
    """
    if machine.measured is None:
        return Software()
    if work.kernels is None and not (work.hidden and work.micro_tokens):
        return PARTS
    dtype, traced = DTYPES[work.precision], knows_passes(work, machine)
    return shares_of(machine.measured, dtype, machine.ranks, traced).software


def shares_of(
    calibration: Calibration, dtype: str = "float32", ranks: int = 1, traced: bool = True
) -> Shares:
    """What a step of the engine reaches of the rates of its parts, as the reference steps showed.

    Args:
        traced: passes are priced operation by operation, else by their blocks' rate.
    """
    calibration.check_dtype(dtype)

    def at(a: AtRanks) -> Shares:
        steps = [s for s in a.steps if s.dtype == dtype]
        return calibration.once(
            ("shares", a.ranks, dtype, traced),
            lambda: shares(steps, calibrated(calibration, a.ranks), traced),
        )

    return Shares(
        step=calibration.between(ranks, lambda a: at(a).step),
        move=calibration.between(ranks, lambda a: at(a).move),
        handed_s=calibration.between(ranks, lambda a: at(a).handed_s),
    )


def shares(steps: Sequence[StepPoint], machine: Machine, traced: bool = True) -> Shares:
    """The likeliest figures for which the time model says of these steps, all of one dtype, what
    was measured.

    Each step's error and each figure's distance from 1 (for gradients, from one copy) are taken to
    be log-normal, `NOISE` and `SPREAD` wide. So a figure that the steps say nothing about (moves
    that are hidden, or a lone rank's) stays there rather than explain what noise there is. Found by
    Gauss and Newton's steps, halved where they do not lead downhill.

    Args:
        traced: passes are priced operation by operation, else by their blocks' rate.
    """
    if not steps:
        return Shares()
    works = [(work_of(step, machine, traced), step.seconds) for step in steps]
    copy = COPIED / machine.gpu.memory_bandwidth

    def figures(x: np.ndarray) -> Shares:
        return Shares(math.exp(x[0]), math.exp(x[1]), copy * math.exp(x[2]))

    def residuals(x: np.ndarray) -> np.ndarray:
        software = figures(x).software
        errors = [
            math.log(step_times(work, machine, software).step / seconds) / math.log(NOISE)
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
    """A reference step as the time model takes it."""
    recipe = Recipe.zero(step.stage, precision=_PRECISION[step.dtype])
    resident, late = (
        recipe.parameters.placement is Placement.REPLICATED,
        recipe.reduce_at == "boundary",
    )
    nccl = machine.measured is None or machine.measured.backend != "gloo"
    return Work(
        flops=step.flops,
        traffic=tuple(
            traffic_of(
                step.wire, step.calls, machine, resident=resident, at_boundary=late, nccl=nccl
            )
        ),
        precision=_PRECISION[step.dtype],
        tokens=float(step.tokens * step.micro_batches * machine.ranks),
        micro_batches=step.micro_batches,
        optimizer_numel=step.stepped,
        hidden=step.hidden,
        micro_tokens=step.tokens,
        kernels=step.kernels if traced else None,
        handed=float(step.numel * step.micro_batches),
    )
