"""Micro-batches under no_sync: the stages that tests go through, and how each is left unreduced."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

#: Stages by name, with the options of the recipe: whole gradients until the boundary at "at the
#: boundary" and stages 0 and 1.
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (0, {}),
    "stage 1": (1, {}),
    "stage 2": (2, {}),
    "stage 2 at the boundary": (2, {"reduce_at": "boundary"}),
    "stage 3": (3, {}),
    "stage 3 at the boundary": (3, {"reduce_at": "boundary"}),
}
# Those that keep gradients whole under no_sync
KEEPING = [name for name in MODES if name not in ("stage 2", "stage 3")]


def no_sync(model: nn.Module) -> Any:
    import onefold

    return model.no_sync() if isinstance(model, DistributedDataParallel) else onefold.no_sync(model)
