"""`torch_compile=True`: compile the forward of each repeated block; all share one compilation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onefold.tracing.repeat import repeated_blocks


def compile_blocks(model: nn.Module, args: Any) -> None:
    """Compile the forward of the model's repeated blocks.

    The backend and mode are those of the training arguments. The hooks that gather and release a
    block stay outside the compiled code.

    Raises:
        ValueError: the model has no repeated blocks.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise ValueError(
            f"torch_compile=True compiles the repeated blocks of a model, and this"
            f" {type(model).__name__} has none: leave it out."
        )
    options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    for block in blocks:
        forward: Any = torch.compile(block.forward, **{k: v for k, v in options.items() if v})
        block.forward = forward
