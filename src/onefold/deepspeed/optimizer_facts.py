"""What callers read from `engine.optimizer`, which is torch's own optimizer.

| attribute                          | what it is                                                               |
|------------------------------------|--------------------------------------------------------------------------|
| `loss_scaler`                      | the engine's `LossScaler`; outside fp16 one whose scale is 1             |
| `loss_scale_config`                | the same object                                                          |
| `cur_scale`, `loss_scale`          | its scale; changes of the scaler are followed                            |
| `dynamic_loss_scale`               | whether the scale changes by itself                                      |
| `overflow`                         | whether the last step was skipped                                        |
| `custom_loss_scaler`               | false: the scale is the engine's own                                     |
| `needs_scaler()`                   | whether a backward pass needs a scaled loss                              |

They are plain attributes of the object: `optimizer.loss_scale = 8` changes nothing.
`optimizer.loss_scaler.cur_scale = 8` does.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from onefold.deepspeed.config import LossScaling
from onefold.deepspeed.scaling import LossScaler


def show_scale(optimizer: Any, scaler: LossScaler | None) -> None:
    """Set the attributes of this module's table on `optimizer`."""
    shown = scaler or LossScaler(LossScaling(static=1.0))
    seen: weakref.ref[Any] = weakref.ref(optimizer)

    def follow(scale: float) -> None:
        if (there := seen()) is not None:
            there.cur_scale = there.loss_scale = scale

    shown.follower = follow
    follow(shown.scale)
    optimizer.loss_scaler = optimizer.loss_scale_config = shown
    optimizer.dynamic_loss_scale = shown.dynamic
    optimizer.overflow = optimizer.custom_loss_scaler = False
    optimizer.needs_scaler = shown.is_needed


def show_leaves(optimizer: Any, leaves: list[nn.Module]) -> None:
    """Set `optimizer.leaf_parameters`, {leaf module: its trainable parameters}, and
    `ds_z3_leaf_module` of these parameters. Neither keeps the model alive.
    """
    optimizer.leaf_parameters = weakref.WeakKeyDictionary()
    for leaf in leaves:
        parameters = [p for p in leaf.parameters() if p.requires_grad]
        optimizer.leaf_parameters[leaf] = parameters
        for parameter in parameters:
            parameter.__dict__["ds_z3_leaf_module"] = weakref.proxy(leaf)
