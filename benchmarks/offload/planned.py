"""What a rank's state should take on the host and on the disk: what `onefold plan` says of the
layout that the engine has.
"""

from __future__ import annotations

from typing import Any


def planned(engine: Any) -> dict[str, int]:
    """Bytes of this rank with AdamW: "host_rest", "host_peak", "disk". One micro-batch a step.

    `engine`: what `onefold.engine_of` returns; only its layout and recipe are read.
    """
    from onefold.plan.offloaded import offloaded_bytes
    from onefold.plan.states import UnitPlan

    units = [UnitPlan(u.name, tuple(f.spec for f in u.flats), False) for u in engine.units]
    found = offloaded_bytes(units, engine.recipe)
    return {
        "host_rest": sum(found.rest["host"].values()),
        "host_peak": sum(found.peak["host"].values()),
        "disk": sum(found.rest["nvme"].values()),
    }
