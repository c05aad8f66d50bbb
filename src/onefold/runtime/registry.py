"""Which engine works on which module. References to modules are weak: the registry keeps no model
alive.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from onefold.runtime.engine import Engine
from onefold.runtime.entry import Entry

_engines: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


def register(module: nn.Module, engine: Engine) -> None:
    _engines[module] = engine


def unregister(module: nn.Module) -> None:
    del _engines[module]


_spoilt: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def spoil(module: nn.Module, why: BaseException) -> None:
    """Make the model refuse to be called until `shard()` takes it again: it is neither sharded nor
    as it was before.
    """
    said = f"{type(why).__name__}: {why}"

    def refuse(_: nn.Module, *args: Any) -> None:
        raise RuntimeError(
            f"this model is not sharded: changing it under onefold.unsharded failed ({said}). Its"
            " parameters are whole, and it would train on every rank by itself. Mend it and call"
            " onefold.shard(model, recipe) on every rank, or start from a checkpoint."
        )

    _spoilt[module] = module.register_forward_pre_hook(refuse, prepend=True)


def accept_again(module: nn.Module) -> None:
    """Undo `spoil`: `shard()` takes the model again."""
    handle = _spoilt.pop(module, None)
    if handle is not None:
        handle.remove()


def is_sharded(module: nn.Module) -> bool:
    return module in _engines


def engine_of_entry(entry: Entry) -> Engine | None:
    """Return the engine that a sharded parameter belongs to; None if its model is gone."""
    engine = entry.engine()
    return engine if isinstance(engine, Engine) else None


def engine_of(module: nn.Module) -> Engine:
    """Return the engine of a sharded module.

    Raises:
        ValueError: the module was not sharded.
        TypeError: the argument is not a module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"a {type(module).__name__} was given where the model is expected that"
            " onefold.shard(module, recipe) returned."
        )
    engine = _engines.get(module)
    if engine is None:
        if is_sharded(getattr(module, "_orig_mod", module)):
            raise ValueError(
                "this is what torch.compile made around a sharded model, whose names it changes:"
                " call it to train, and give Onefold's functions the module that"
                " onefold.shard(module, recipe) returned."
            )
        raise ValueError(
            f"this {type(module).__name__} was not sharded; give the module that"
            " onefold.shard(module, recipe) returned."
        )
    return engine
