"""Which engine works on which module. Weak on the module's side: the registry keeps no model alive."""

from __future__ import annotations

import weakref

from torch import nn

from onefold.runtime.engine import Engine

_engines: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


def register(module: nn.Module, engine: Engine) -> None:
    _engines[module] = engine


def is_sharded(module: nn.Module) -> bool:
    return module in _engines


def engine_of(module: nn.Module) -> Engine:
    """The engine behind a sharded module.

    Raises:
        ValueError: the module was not sharded.
    """
    engine = _engines.get(module)
    if engine is None:
        if is_sharded(getattr(module, "_orig_mod", module)):
            raise ValueError(
                "this is what torch.compile made around a sharded model, whose names it changes: call it to train, and give Onefold's "
                "functions the module that onefold.shard(module, recipe) returned."
            )
        raise ValueError(f"this {type(module).__name__} was not sharded; give the module that onefold.shard(module, recipe) returned.")
    return engine
