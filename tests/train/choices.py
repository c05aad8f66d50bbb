"""What tests of the choice of a stage ask."""

from __future__ import annotations

from typing import Any

from onefold.plan.job import Job
from onefold.train.choose import Asked


def asked(stage: str = "auto", **changes: Any) -> Asked:
    """Four ranks with room for everything; `changes` are of the machine, or of the job and its
    recipe.
    """
    here: dict[str, Any] = {"ranks": 4, "local_ranks": 4, "free": 1 << 34, "device": "cpu"}
    here |= {name: changes.pop(name) for name in here if name in changes}
    job = {
        "micro_batch": 2,
        "seq": 32,
        "precision": "fp32",
        "checkpointing": "none",
        "offload": "none",
    }
    return Asked(stage, Job.of({**job, **changes}, "a test"), **here)
