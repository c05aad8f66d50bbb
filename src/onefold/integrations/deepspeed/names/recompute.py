"""`deepspeed.checkpointing`: activation checkpointing, which is torch's."""

from __future__ import annotations

from typing import Any

import torch.utils.checkpoint

_configured = [False]


def configure_checkpointing(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Noted, no more: `checkpoint` is torch's, and activations are offloaded by the recipe."""
    _configured[0] = True


def checkpointing_is_configured() -> bool:
    return _configured[0]


def reset_checkpointing() -> None:
    """Nothing: no buffers are kept between steps."""


def checkpoint(function: Any, *args: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint` of the function, non-reentrant."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)
