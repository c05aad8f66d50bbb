"""Call a module's forward and backward pass as a training loop does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward

from onefold.runtime.differentiate import tensors_in


def backward(scalar: torch.Tensor) -> None:
    """Run the backward pass. scalar.backward() would leave the mode CudaKernels meanwhile, and a
    recomputation would run other kernels, so this calls autograd's engine directly.
    """
    _engine_run_backward(
        (scalar,), (torch.ones_like(scalar),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )  # fmt: skip


def call(module: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, list | tuple) else module(batch)


def loss_of(output: Any) -> torch.Tensor:
    """Return the scalar to differentiate, in fp32: the output's loss, else its first scalar, else the
    sum of its first floating-point tensor. What has no gradient comes last.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    tensors = (
        [found]
        if isinstance(found, torch.Tensor)
        else [t for t in tensors_in(output) if t.dtype.is_floating_point]
    )
    if not tensors:
        raise ValueError(
            f"the module returned {type(output).__name__} without a floating-point tensor, so there"
            " is nothing to differentiate: let its forward return the loss, or give onefold.plan a"
            " loss=function in Python."
        )
    one = min(tensors, key=lambda t: (not t.requires_grad, t.numel() != 1))
    return one.float().reshape(()) if one.numel() == 1 else one.sum(dtype=torch.float32)


def vocabulary_of(module: nn.Module) -> int:
    """Return the vocabulary size of a language model: its config's, else the rows of its largest
    embedding; 0 if it has neither.
    """
    config = getattr(module, "config", None)
    found = getattr(config, "vocab_size", None)
    if isinstance(found, int):
        return found
    return max(
        (m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)), default=0
    )
