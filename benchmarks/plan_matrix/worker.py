"""One rank of a part of the matrix, started by `launch.run_ranks`."""

from __future__ import annotations

from typing import Any

from benchmarks.launch import join_over_gloo
from benchmarks.plan_matrix import measuring
from benchmarks.plan_matrix.settings import Cell


def join(job: dict[str, Any]) -> None:
    """One rank alone meets nobody."""
    if job["ranks"] > 1:
        join_over_gloo(job)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """One setting after another."""
    parts = [[Cell(**cell) for cell in part] for part in job["settings"]]
    seen = [measuring.measure(part, job["rounds"], job["usual"]) for part in parts]
    return {"rank": job["rank"], "settings": seen}
