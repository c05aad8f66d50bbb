"""Memory and wire of a run as numbers among a host's logs (Trainer, Lightning), so that TensorBoard,
Weights & Biases and its other loggers show them.

| key                          | of this rank                                        | where        |
|------------------------------|-----------------------------------------------------|--------------|
| onefold/wire_bytes           | bytes sent, a step                                  | always       |
| onefold/wire_wait_ms         | waiting for other ranks, a step                     | always       |
| onefold/memory_bytes         | held on the device for the training's states        | always       |
| onefold/memory_peak_bytes    | the same at its highest                             | always       |
| onefold/host_bytes, nvme_bytes | held there                                        | with tiers   |
| onefold/moved_bytes          | between tiers, a step                               | with tiers   |
| onefold/io_wait_ms           | waiting for NVMe, a step                            | with tiers   |
"""

from __future__ import annotations

from typing import Any

from torch import nn

from onefold.observe import Meter
from onefold.recipe import Tier


class Figures:
    """What happened since the last look. Local, no synchronization."""

    def __init__(self, model: nn.Module, optimizer: Any, step: int) -> None:
        """`step`: the optimizer steps done so far."""
        self._meter, self._step = Meter(model, optimizer), step
        recipe = self._meter.engine.recipe
        rows = (recipe.parameters, recipe.gradients, recipe.optimizer)
        self._tiers = any(row.tier is not Tier.DEVICE for row in rows)

    def look(self, step: int) -> dict[str, float]:
        """The figures of the steps since the last look; `step`: those done by now."""
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
                "host_bytes": row["host"],
                "nvme_bytes": row["nvme"],
                "moved_bytes": sum(row["moved_bytes"].values()) // each,
                "io_wait_ms": row["io_ms"] / each,
            }
        return {f"onefold/{name}": value for name, value in out.items()}
