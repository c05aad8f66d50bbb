"""Which optimizers step sharded parameters: they get the hooks that make their state dicts whole.

[Note: how an optimizer is found] torch's hooks on `state_dict` are an optimizer's own, and a script
that resumes calls `load_state_dict` right behind the constructor. `Optimizer.add_param_group` asks
each parameter whether it is a leaf: a sharded one sees who asks (runtime/parameters/parameter.py). Optimizers
made before `shard()` are looked for once among Python's objects, if anything but the model refers
to its parameters; any other is met at its first step.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

import onefold.optim.faced_states as faced_states
from onefold.optim.whole_state.bringing import after_state_dict
from onefold.optim.whole_state.landing import before_load, set_landed
from onefold.optim.whole_state.outline import Outline, engines, in_another_format
from onefold.runtime.engine import Engine
from onefold.runtime.parameters.parameter import disable_torch_function, leaf_asked_by

_hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_passed: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that step nothing sharded
_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
#: (parameter groups, some parameters are divided) when it was last looked at.
_divided: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()


def held_elsewhere(module: nn.Module) -> bool:
    """Whether anything but modules refers to a parameter of `module`: an optimizer may. (To look
    for one takes a second at worst.)
    """
    places = Counter(
        id(p) for m in module.modules() for p in m._parameters.values() if p is not None
    )
    [(_, alone)] = _references({"": object()})
    return any(
        n > alone + places[i] - 1 for m in module.modules() for i, n in _references(m._parameters)
    )


def _references(things: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [(id(thing), sys.getrefcount(thing)) for thing in things.values() if thing is not None]


def follow(engine: Engine, held: bool) -> None:
    """From now on the state dicts of optimizers over the engine's parameters are whole; also of
    those that exist (`held`: some may).
    """
    engines.add(engine)
    _passed.clear()
    if engine.unsharded and not in_another_format(engine):
        return  # its parameters hold what torch's own would
    leaf_asked_by[0] = meet
    if not held:
        return
    mine, kinds = {id(entry.param) for entry in engine.entries}, _kinds(Optimizer)
    # By type(), which runs no code of theirs, unlike isinstance(): there are lazy modules and
    # proxies among them.
    for optimizer in [thing for thing in gc.get_objects() if type(thing) in kinds]:
        groups: list[dict[str, Any]] = optimizer.__dict__.get("param_groups", [])
        if any(id(p) in mine for group in groups for p in group["params"]):
            meet(optimizer)
            with disable_torch_function():  # it may have stepped whole parameters before
                faced_states.make_all_plain(optimizer)
                show_states(optimizer)


def _kinds(kind: type) -> set[type]:
    """`kind` and everything that derives from it."""
    return {kind}.union(*map(_kinds, kind.__subclasses__()))


def meet(optimizer: Any) -> None:
    """`optimizer` has, or is about to get, sharded parameters."""
    if (
        not isinstance(optimizer, Optimizer)
        or optimizer in _hooked
        or "_optimizer_state_dict_post_hooks" not in optimizer.__dict__
    ):
        return
    _hooked.add(optimizer)
    optimizer.register_state_dict_post_hook(after_state_dict, prepend=True)
    hooks = optimizer._optimizer_load_state_dict_pre_hooks = _OursLast(
        optimizer._optimizer_load_state_dict_pre_hooks
    )
    hooks.ours = before_load
    optimizer.register_load_state_dict_post_hook(_after_load, prepend=True)


def meet_at_step(optimizer: Optimizer) -> None:
    """As `meet`, before a step: of an optimizer that nobody has heard of yet, or whose states are
    about to be packed.
    """
    if optimizer not in _hooked and optimizer not in _passed:
        (meet if Outline.of(optimizer).engines else _passed.add)(optimizer)
    # States that a constructor made of sharded parameters (Adagrad's sums)
    if optimizer not in _stepped:
        _stepped.add(optimizer)
        faced_states.make_all_plain(optimizer)
    faced_states.hide(optimizer)


def show_states(optimizer: Optimizer) -> None:
    """Behind a step, or a load: code outside sees states of divided parameters with the face of the
    whole.
    """
    if optimizer not in _hooked:
        return
    groups = len(optimizer.param_groups)
    if _divided.get(optimizer, (0, False))[0] != groups:
        _divided[optimizer] = groups, Outline.of(optimizer).divided
    if _divided[optimizer][1]:
        faced_states.show(optimizer)


def _after_load(optimizer: Optimizer) -> None:
    set_landed(optimizer)
    with disable_torch_function():
        show_states(optimizer)


class _OursLast(OrderedDict[int, Any]):
    """Hooks of the user's, who registers them when ours is there, and wants to see what was given:
    ours comes after them.
    """

    ours: Callable[..., Any] | None = None

    def values(self) -> Any:
        return [*super().values(), *([self.ours] if self.ours is not None else [])]
