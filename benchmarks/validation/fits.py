"""Every constant fitted again: least squares of log(predicted ÷ published), in steps of 0.01."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from benchmarks.validation.runs import RUNS, Run
from benchmarks.validation.systems import DEEPSPEED_OVERLAP, SYSTEMS, System
from onefold.plan.traffic import Software


def misfit(system: System, runs: Iterable[Run]) -> float:
    """Mean square of log(predicted ÷ published), over the rows that the constant may see."""
    seen = [math.log(run.predict(system) / run.published) ** 2 for run in runs if run.fitted]
    return sum(seen) / len(seen)


def with_constant(system: System, **constants: float) -> System:
    return replace(system, software=replace(system.software, **constants))


def refit(name: str) -> float:
    """The value of a system's one constant that fits its rows best."""
    system, runs = SYSTEMS[name], RUNS[name]()
    grid = [i / 100 for i in range(5, 101)]
    return min(
        grid, key=lambda value: misfit(with_constant(system, **{system.fitted: value}), runs)
    )


def shared() -> dict[str, float]:
    """The constants that fit the Azure report best together, on a coarse grid."""
    system, runs = SYSTEMS["azure"], RUNS["azure"]()
    grid = itertools.product(
        (0.75, 0.76, 0.77, 0.78, 0.79),
        (0.06, 0.08, 0.1, 0.12, 0.14),
        (6e-6, 6.5e-6, 7e-6, 7.5e-6),
        (0.6, 0.62, 0.64, 0.66, 0.68),
    )
    names = ("kernel_share", "overlap", "hop_seconds", "link_share")
    found = min(
        (dict(zip(names, values, strict=True)) for values in grid),
        key=lambda constants: misfit(with_constant(system, **constants), runs),
    )
    return found


def in_use() -> dict[str, float]:
    """What the package uses for the constants of `shared`."""
    soft = Software()
    return {
        "kernel_share": soft.kernel_share,
        "overlap": DEEPSPEED_OVERLAP,
        "hop_seconds": soft.hop_seconds,
        "link_share": SYSTEMS["azure"].software.link_share,
    }


def answer_to_e46(**constants: float) -> float:
    """Planner case E46 (175B, micro-batch 16, 1,024 over 128 GPUs) with other constants."""
    system = with_constant(SYSTEMS["azure"], **constants)
    rates = {run.what: run for run in RUNS["azure"]()}
    few, many = (
        rates[f"175B, 1024 tokens × 16, {gpus} GPUs"].predict(system) for gpus in (128, 1024)
    )
    return many / few
