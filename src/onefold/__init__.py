"""Onefold: PyTorch training with every byte of training state held once.

model = onefold.shard(model, onefold.Recipe.zero(stage=3))
optim = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
loss = model(batch).loss; loss.backward()
onefold.clip_grad_norm_(model, 1.0)
optim.step(); optim.zero_grad()
"""

from typing import Any

from onefold.comm import StallError
from onefold.memory.nvme import TierError
from onefold.optim import GradScaler
from onefold.recipe import Placement, Recipe, Row, Tier
from onefold.runtime import Engine, ShardedParameter, ShardedParameterError
from onefold.shard import clip_grad_norm_, engine_of, full_params, full_state_dict, load_full_state_dict, no_sync, shard

__version__ = "0.1.0"
#: Loaded when they are first asked for: training alone needs none of them.
_LAZY = {
    "checkpoint": ("Checkpointer", "CheckpointError", "load", "load_async", "save", "save_async"),
    "checkpoint.adapters": ("load_adapters", "save_adapters"),
    "checkpoint.dcp": ("dcp_state_dict",),
    "checkpoint.export": ("export",),
    "checkpoint.huggingface": ("load_pretrained",),
}
_ROOMS = ("checkpoint", "observe", "plan")

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Engine",
    "GradScaler",
    "Placement",
    "Recipe",
    "Row",
    "ShardedParameter",
    "ShardedParameterError",
    "StallError",
    "Tier",
    "TierError",
    "checkpoint",
    "clip_grad_norm_",
    "dcp_state_dict",
    "engine_of",
    "export",
    "full_params",
    "full_state_dict",
    "initialize",
    "load",
    "load_adapters",
    "load_async",
    "load_full_state_dict",
    "load_pretrained",
    "no_sync",
    "observe",
    "plan",
    "save",
    "save_adapters",
    "save_async",
    "shard",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _ROOMS:
        return importlib.import_module(f"onefold.{name}")
    for room, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(f"onefold.{room}"), name)
    raise AttributeError(f"module 'onefold' has no attribute {name!r}")


def initialize(*args: Any, **kwargs: Any) -> Any:
    """DeepSpeed's four-tuple over the same machinery; see `onefold.integrations.deepspeed.initialize`."""
    from onefold.integrations.deepspeed import initialize as build

    return build(*args, **kwargs)
