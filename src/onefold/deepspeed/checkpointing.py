"""`deepspeed.checkpointing`: activation checkpointing by torch.utils.checkpoint."""

from __future__ import annotations

import logging
from typing import Any

import torch.utils.checkpoint

from onefold.deepspeed.utilities import log_dist

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]
_configured = [False]


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Record that checkpointing was configured, and warn about options that have no effect.

    Raises:
        NotImplementedError: `mpu_` is given.
    """
    if mpu_ is not None:
        raise NotImplementedError(
            "checkpointing.configure(mpu_=...): give onefold.shard(mesh=...) the axes beside data."
        )
    if asked := [name for name, value in options.items() if value]:
        log_dist(
            f"checkpointing.configure: {', '.join(asked)} without effect: checkpoint() is torch's;"
            " Recipe.zero(offload_activations=...) moves what it keeps to the host",
            ranks=[0],
            level=logging.WARNING,
        )
    _configured[0] = True


def is_configured() -> bool:
    return _configured[0]


def reset() -> None:
    """Do nothing: no buffers are kept between steps."""


def checkpoint(function: Any, *args: Any) -> Any:
    """Call the function under torch's non-reentrant `torch.utils.checkpoint.checkpoint`."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint
