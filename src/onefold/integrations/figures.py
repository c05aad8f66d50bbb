"""Figures of memory and communication for the loggers of a host library (Trainer, Lightning).

TensorBoard, Weights & Biases and the library's other loggers show them.

| key                            | figure of this rank                               | when         |
|--------------------------------|---------------------------------------------------|--------------|
| onefold/wire_bytes             | bytes sent per step                               | always       |
| onefold/wire_wait_ms           | time waiting for other ranks, per step            | always       |
| onefold/memory_bytes           | bytes of training state on the device             | always       |
| onefold/memory_peak_bytes      | the peak of these bytes                           | always       |
| onefold/host_bytes, nvme_bytes | bytes of training state on the host, on NVMe      | with tiers   |
| onefold/moved_bytes            | bytes moved between tiers, per step               | with tiers   |
| onefold/io_wait_ms             | time waiting for NVMe, per step                   | with tiers   |
"""

from __future__ import annotations

from typing import Any

from torch import nn

from onefold.observe import Meter
from onefold.recipe.tiers import Tier, off_device


class Figures:
    """Averages a run's figures since the last `look`. Local, without synchronization."""

    def __init__(self, model: nn.Module, optimizer: Any, step: int) -> None:
        """Start counting. `step` is the number of optimizer steps done so far."""
        self._meter, self._step = Meter(model, optimizer), step
        recipe = self._meter.engine.recipe
        rows = (recipe.parameters, recipe.gradients, recipe.optimizer)
        self._tiers = any(row.tier is not Tier.DEVICE for row in rows)

    def look(self, step: int) -> dict[str, float]:
        """Return the figures since the last `look`. `step` is the number of steps done by now."""
        steps, self._step = step - self._step, step
        row = self._meter.step()
        memory, each = row["memory"], max(steps, 1)
        out: dict[str, float] = {
            "wire_bytes": row["wire_bytes"] // each,
            "wire_wait_ms": row["exposed_ms"] / each,
            "memory_bytes": sum(memory["now"].values()),
            "memory_peak_bytes": sum(memory["peak"].values()),
        }
        if self._tiers:
            out |= {
                **{f"{tier.value}_bytes": row[tier.value] for tier in off_device()},
                "moved_bytes": sum(row["moved_bytes"].values()) // each,
                "io_wait_ms": row["io_ms"] / each,
            }
        return {f"onefold/{name}": value for name, value in out.items()}
