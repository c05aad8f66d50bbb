"""The hooks that tie an engine to the modules of its units, and which engine works on which module."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch import nn

from onefold.runtime.differentiate import in_autograd, keep_from_compiler, mapped
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Unit
from onefold.runtime.parameters.parameter import (
    disable_torch_function,
    refuse_pickling,
)

# -- which engine ----------------------------------------------------------------------------------
#
# Which engine works on which module. References to modules are weak: the registry keeps no model
# alive.


engines: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


def is_sharded(module: nn.Module) -> bool:
    return module in engines


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
    engine = engines.get(module)
    if engine is None:
        raise ValueError(
            f"this {type(module).__name__} was not sharded; give the module that"
            " onefold.shard(module, recipe) returned, also where torch.compile made another of it."
        )
    return engine


# -- hooks on modules ------------------------------------------------------------------------------
#
# The hooks that tie an engine to the modules of its units.


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class _Around:
    """Tells the engine when the forward pass of a unit's module begins, ends, or raises. With `part`,
    the module is one of the root unit's: called by itself, it is a pass too.

    The hooks are bound methods, so pickling the module reaches `__reduce_ex__` below, which refuses it.
    """

    def __init__(self, engine: Engine, unit: Unit, part: bool) -> None:
        self.engine, self.unit, self.part = engine, unit, part
        # The dtype that floating-point inputs are cast to
        dtype = engine.recipe.parameters.dtype if engine.recipe.cast_inputs else None
        self.cast_to = None if dtype == torch.float32 else dtype

    def before(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        engine = self.engine
        if engine.full_params_depth or engine.closed:
            return None
        if self.part and (engine.stack or in_autograd()):
            return None
        begins = engine.passes.enter(self.unit, sys._getframe(1), self.part)
        return mapped((args, kwargs), self._cast) if begins and self.cast_to is not None else None

    def _cast(self, t: torch.Tensor) -> torch.Tensor:
        with disable_torch_function():
            return t.to(self.cast_to) if t.dtype in _FLOATS else t

    def after(self, _: nn.Module, args: Any, output: Any) -> Any:
        # Also when the forward pass raised an Exception: then the call that began the pass is over
        return None if self.engine.closed else self.engine.passes.leave(sys._getframe(1), output)

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # the parameters refuse it, with their names

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_pickling(self.unit.entries[0].slot.name if self.unit.flats else None)


def install(engine: Engine, unit: Unit, module: nn.Module, part: bool = False) -> None:
    """Let `engine` know when the forward pass of `unit`'s module begins, ends, or raises. `part`: the
    module is a part of the root unit's (an encoder, an embedding), which may be called by itself.
    """
    hooks = _Around(engine, unit, part)
    for hook in (_Around.before, _Around.after):
        keep_from_compiler(hook)
    engine.handles += [
        module.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True),
        module.register_forward_hook(hooks.after, always_call=True),
    ]


def guard(engine: Engine, module: nn.Module) -> None:
    """Refuse `state_dict()` and `load_state_dict()` of a sharded model: they would read and write
    one rank's intervals under the names of whole parameters. Refuse `state_dict()` while something
    has no value (runtime/uninitialized.py).
    """
    divided, unset = any(flat.divided for flat in engine.flats), engine.uninitialized

    def on_save(part: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not (engine.closed or engine.full_params_depth):
            unset.refuse("state_dict() would hold", here=True)
            if divided and not _is_for_keys():
                raise RuntimeError(
                    "state_dict() of a sharded model would hold this rank's intervals under the names"
                    " of whole parameters. Use onefold.full_state_dict(model) on every rank (rank 0"
                    " gets the whole), or call state_dict() inside `with onefold.full_params(model):`."
                )

    def on_load(part: nn.Module, *_: Any) -> None:
        if not (engine.closed or engine.full_params_depth):
            raise RuntimeError(
                "load_state_dict() on a sharded model would write whole parameters over this rank's"
                " intervals. Use onefold.load_full_state_dict(model, state_dict) on every rank, or"
                " load inside `with onefold.full_params(model, write=True):`."
            )

    for part in module.modules() if divided or unset else ():
        engine.handles.append(part.register_state_dict_pre_hook(on_save))
        if divided:
            engine.handles.append(part.register_load_state_dict_pre_hook(on_load))


#: Methods of peft's wrappers that ask the module that they save whole for its keys alone, while
#: they read values from the state dict that they were given.
_ASK_FOR_KEYS = ("adapter_state_dict", "adapter_state_dict_load_map")


def _is_for_keys() -> bool:
    """Return whether the caller of `state_dict()` reads the keys of its result, and no values.

    The caller's name is all there is: peft calls `state_dict()` without arguments (peft/utils/other.py,
    `ModulesToSaveWrapper.adapter_state_dict`), as somebody does who wants the values.
    """
    frame: FrameType | None = sys._getframe(2)  # torch's state_dict(), below the hook
    while frame is not None and frame.f_code.co_name == "state_dict":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in _ASK_FOR_KEYS
