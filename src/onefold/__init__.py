"""Onefold: PyTorch training with every byte of training state held once.

model = onefold.shard(model, onefold.Recipe.zero(stage=3))
optim = torch.optim.AdamW(model.parameters(), lr=3e-4)
loss = model(batch).loss; loss.backward()
onefold.clip_grad_norm_(model, 1.0)
optim.step(); optim.zero_grad()

[Note: names are loaded when they are first asked for] torch takes seconds to import. The command
`onefold` must report a misspelt option, and react to Ctrl-C, before that. So this file imports
nothing of the package; `_FROM` says which module has each name.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onefold.comm import StallError
    from onefold.deepspeed.setup import initialize
    from onefold.memory import TierError
    from onefold.optim.clip import GradScaler, clip_grad_norm_
    from onefold.recipe import Recipe, Row, Tier
    from onefold.runtime import Engine, ShardedParameter, ShardedParameterError
    from onefold.runtime.hooks import engine_of
    from onefold.runtime.state.dicts import full_state_dict, load_full_state_dict
    from onefold.runtime.state.start import full_params, keep_gathered
    from onefold.runtime.uninitialized import UninitializedError
    from onefold.sharding import no_sync, shard, unshard

__version__ = "0.1.0"
#: {module of this package: names in it that the package exports}.
_FROM = {
    "comm": ("StallError",),
    "memory": ("TierError",),
    "optim.clip": ("GradScaler", "clip_grad_norm_"),
    "recipe": ("Recipe", "Row", "Tier"),
    "runtime": ("Engine", "ShardedParameter", "ShardedParameterError"),
    "runtime.uninitialized": ("UninitializedError",),
    "runtime.state.dicts": ("full_state_dict", "load_full_state_dict"),
    "runtime.state.start": ("full_params", "keep_gathered"),
    "runtime.hooks": ("engine_of",),
    "sharding": ("no_sync", "shard", "unshard"),
    "checkpoint": ("Checkpointer", "CheckpointError", "load", "save", "save_async"),
    "pretrained.adapters": ("load_adapters", "save_adapters"),
    "checkpoint.dcp": ("dcp_state_dict",),
    "pretrained.export": ("export",),
    "pretrained.huggingface": ("load_pretrained",),
    "pretrained.whole_tensors": ("stream_params",),
    "deepspeed.setup": ("initialize",),
}
#: Modules that read checkpoints of other libraries, by `recognizes(path)` and `open_source(path)`.
#: Imported only for a folder that Onefold has not written.
READERS = (
    "onefold.deepspeed.reader",
    "onefold.pretrained.huggingface",
)
# `hf` and `lightning` are not in __all__: they need transformers and Lightning, and
# `from onefold import *` must not
_ROOMS = (
    "checkpoint",
    "deepspeed",
    "ema",
    "hf",
    "lightning",
    "observe",
    "parallel",
    "plan",
    "pretrained",
    "tiling",
)

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Engine",
    "GradScaler",
    "Recipe",
    "Row",
    "ShardedParameter",
    "ShardedParameterError",
    "StallError",
    "Tier",
    "TierError",
    "UninitializedError",
    "checkpoint",
    "clip_grad_norm_",
    "dcp_state_dict",
    "deepspeed",
    "ema",
    "engine_of",
    "export",
    "full_params",
    "full_state_dict",
    "initialize",
    "keep_gathered",
    "load",
    "load_adapters",
    "load_full_state_dict",
    "load_pretrained",
    "no_sync",
    "observe",
    "parallel",
    "plan",
    "save",
    "save_adapters",
    "save_async",
    "shard",
    "stream_params",
    "unshard",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _ROOMS:
        return importlib.import_module(f"onefold.{name}")
    for module, names in _FROM.items():
        if name in names:
            found = getattr(importlib.import_module(f"onefold.{module}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module 'onefold' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
