"""A calibration made by hand, with figures that are easy to check."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from onefold.machine.calibration import Calibration, this_machine


def calibration(ranks: int = 2, **others: Any) -> Calibration:
    """This machine, as if measured now."""
    row = {"title": "a processor", "capacity": (1 << 34) // ranks, "fp32": 9e10, "attainable": 1.0}
    given: dict[str, Any] = {
        "gpu": row | {"memory_bandwidth": 1e10, "link": 2e9},
        "host": {"memory": 1 << 34, "nvme_bandwidth": 2e8, "nvme_write": 1e8},
        "machine": this_machine(),
        "device": "cpu",
        "ranks": ranks,
        "measured_at": datetime.now(UTC).replace(microsecond=0),
        "busy": 0.0,
        "disk": "/data",
        "kernel_share": 0.5,
        "hop_seconds": 1e-4,
        "contention": 0.5,
    }
    return Calibration(**given | others)
