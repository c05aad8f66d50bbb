"""Models of a few kilobytes whose activations go to the host all the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import onefold
from onefold.offload.activations import ActivationStore


def offloaded(module: nn.Module, recipe: onefold.Recipe) -> tuple[nn.Module, ActivationStore]:
    """`module`, sharded, and its store, which takes tensors of any size and copies up ahead."""
    model = onefold.shard(module, recipe)
    store = onefold.engine_of(model).activations.store
    assert store is not None
    store.smallest, store.ahead = 1, 4096
    return model, store


def top_hooks() -> Any:
    """The saved-tensor hooks in place here; None without any."""
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top or None
