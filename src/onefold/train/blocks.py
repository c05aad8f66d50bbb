"""What is done to a model block by block: recomputing activations, compiling."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onefold.plan.recompute import repeated_blocks
from onefold.train.errors import TrainError


def checkpoint_activations(model: nn.Module, how: str) -> None:
    """Recompute blocks in the backward pass instead of keeping what they computed.

    Args:
        how: "none", "full" (every block) or "selective" (every second block: half the memory for
            half the recompute).

    Raises:
        TrainError: the model has no way to do it.
    """
    if how == "none":
        return
    # transformers 5 calls it activation_checkpointing_enable, earlier ones
    # gradient_checkpointing_enable
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or getattr(
        model, "gradient_checkpointing_enable", None
    )
    if enable is None or not getattr(model, "supports_gradient_checkpointing", True):
        raise TrainError(
            f"--activation-checkpointing {how}: {type(model).__name__} has no"
            " activation_checkpointing_enable or gradient_checkpointing_enable. Give it one, or"
            " use torch.utils.checkpoint inside its forward."
        )
    enable({"use_reentrant": False})
    if how == "selective":
        flagged = [m for m in repeated_blocks(model) if getattr(m, "gradient_checkpointing", False)]
        if not flagged:
            raise TrainError(
                f"--activation-checkpointing selective: {type(model).__name__} does not switch its"
                " blocks one by one; use full."
            )
        for block in flagged[1::2]:
            block.gradient_checkpointing = False  # type: ignore[assignment]


def compile_blocks(model: nn.Module) -> None:
    """`torch.compile` the forward of each repeated block, so that all of them share one
    compilation.

    The forward alone, not `block.compile()`: gathering and releasing happen in hooks around it,
    which have nothing to compile.

    Raises:
        TrainError: no repeated block was found.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise TrainError(
            "--compile compiles the repeated blocks of a model, and this one has none; leave it"
            " out."
        )
    for block in blocks:
        block.forward = torch.compile(block.forward)
