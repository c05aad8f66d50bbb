"""What `module.weight` is while a pass of a sharded model runs: the whole parameter, in real memory.

Code may hand a weight to consumers that never ask a tensor's class how to compute: an autograd
Function, TorchScript, a compiled function, a custom operator, a checkpoint's arguments. Such code
sees the memory of a tensor. So the weight must be whole when a module's attribute is read.

| who reads `module.weight`                                  | gets                                                          |
|------------------------------------------------------------|---------------------------------------------------------------|
| the forward pass of the unit that owns it                  | the whole parameter, which the pass has put there (`swap_in`) |
| other code in a pass of its model, or in the recomputation | the whole parameter, gathered now, until the pass ends        |
| the backward of an autograd Function of its model          | the same                                                      |
| a pass of another sharded model                            | the same, until the outermost pass ends: it is lent           |
| a hook of a backward pass                                  | the sharded parameter: what a hook writes goes to the masters |
| code outside passes                                        | the sharded parameter (parameter.py)                          |

`module.parameters()` and its like always give sharded parameters, so that counting elements in a
forward pass gathers nothing.

A tensor saved for backward in gathered memory becomes a handle, whoever saves it: see
runtime/saved.py. What code keeps without saving it is gathered again before its backward pass:
see [Note: kept by hand] in runtime/passes.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onefold.runtime.differentiate import in_autograd, keep_from_compiler
from onefold.runtime.open_passes import here, in_forward
from onefold.runtime.parameters.interval import disable_torch_function

if TYPE_CHECKING:
    from onefold.runtime.parameters.parameter import OwningEngine


class ModuleParameters(dict[str, Any]):
    """The `_parameters` of a module whose parameters are sharded.

    `Module.__getattr__` reads an attribute by `[name]`, and gets the whole parameter in a pass.
    Other ways to read it (`get`, `items`, `values`) show what is stored.
    """

    def __getitem__(self, name: str) -> Any:
        # Compiled code is traced through this function. It finds what `swap_in` has put here, and
        # must meet no condition that changes from call to call
        value = dict.__getitem__(self, name)
        return seen(value) if getattr(value, "_onefold_faced", False) else value

    def __setitem__(self, name: str, value: Any) -> None:
        """Store `value`. `functional_call` puts back what it has read: for the whole of the
        parameter that belongs here, the parameter itself is stored.
        """
        found = getattr(value, "__dict__", {}).get("_onefold_entry")
        entry = found() if found is not None else None
        if (
            entry is not None
            and value is entry.compute
            and not entry.flat.swapped_in
            and any(place[0] is self and place[1] == name for place in entry.places)
        ):
            value = entry.param
        dict.__setitem__(self, name, value)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


#: (parameters of a module, name, value): for the engine itself.
put: Any = dict.__setitem__


def follow_reads(module: nn.Module) -> ModuleParameters:
    """Let reads of `module`'s parameters be seen. Returns its `_parameters` from now on."""
    there = module._parameters
    if not isinstance(there, ModuleParameters):
        there = module.__dict__["_parameters"] = ModuleParameters(there)
    return there


def seen(param: Any) -> Any:
    """Return what code that reads a module's attribute sees of a sharded parameter. See the table
    of this module. Collective at stage 3 if it gathers.
    """
    recomputing_or_backward = in_autograd()
    if not here.passes and not recomputing_or_backward:
        return param
    entry = param.__dict__["_onefold_entry"]()
    engine: OwningEngine | None = entry.engine() if entry is not None else None
    if engine is None:
        return param
    if recomputing_or_backward and not torch.is_grad_enabled() and not _in_function_of(engine):
        return param
    with disable_torch_function():
        if engine.computing:
            return engine.use(entry, keeps=True)
        return _lend(engine, entry) if in_forward() else param


def _in_function_of(engine: OwningEngine) -> bool:
    """Whether the backward of a Python Function runs, in a pass of `engine`."""
    node: Any = torch._C._current_autograd_node()
    return engine.in_pass and isinstance(node, torch.autograd.function.BackwardCFunction)


# -- read in a pass of another model ---------------------------------------------------------------


def _lend(engine: OwningEngine, entry: Any) -> torch.Tensor:
    unit = engine.begin_outside(entry)
    if all(u is not unit for _, u in here.lent):
        here.lent.append((engine, unit))
        unit.lent = True
    engine.gather.gather_alone(unit)
    whole: torch.Tensor = entry.compute
    return whole


def take_back() -> None:
    """Release the units that are lent. Called when this thread's outermost forward pass ends."""
    while here.lent:
        engine, unit = here.lent.pop()
        unit.lent = False
        if not engine.progress.closed and not unit.resident and not unit.ungathered:
            engine.gather.release(unit)


keep_from_compiler(seen)
