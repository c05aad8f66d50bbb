"""Find the optimizers over sharded parameters, and hook their state dicts.

[Note: how an optimizer is found] torch registers `state_dict` hooks per optimizer, and a script
that resumes calls `load_state_dict` right after the constructor. So Onefold must notice a new
optimizer in its constructor. `Optimizer.add_param_group` reads `is_leaf` of each parameter, and a
sharded parameter looks up its caller there (runtime/parameters/parameter.py). An optimizer made
before `shard()` is searched for once among Python's objects, if anything but the model refers to
the parameters. Any other optimizer is found at its first step.
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
_passed: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those without sharded parameters
_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
#: (number of parameter groups, whether any parameter is divided), at the last look.
_divided: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()


def held_elsewhere(module: nn.Module) -> bool:
    """Return whether anything but modules refers to a parameter of `module`, such as an optimizer.

    This check is cheap. The search for optimizers takes up to a second.
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
    """From now on make the state dicts of optimizers over the engine's parameters whole.

    `held`: whether such optimizers may already exist. Then they are searched for.
    """
    engines.add(engine)
    _passed.clear()
    if engine.unsharded and not in_another_format(engine):
        return  # its parameters are torch's own
    leaf_asked_by[0] = meet
    if not held:
        return
    mine, kinds = {id(entry.param) for entry in engine.entries}, _kinds(Optimizer)
    # type() runs no code of the objects, isinstance() may: some are lazy modules or proxies.
    for optimizer in [thing for thing in gc.get_objects() if type(thing) in kinds]:
        groups: list[dict[str, Any]] = optimizer.__dict__.get("param_groups", [])
        if any(id(p) in mine for group in groups for p in group["params"]):
            meet(optimizer)
            with disable_torch_function():  # it may have stepped before shard()
                faced_states.make_all_plain(optimizer)
                show_states(optimizer)


def _kinds(kind: type) -> set[type]:
    """Return `kind` and all its subclasses."""
    return {kind}.union(*map(_kinds, kind.__subclasses__()))


def meet(optimizer: Any) -> None:
    """Hook the state dict of `optimizer`, which has or is about to get sharded parameters."""
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
    """Prepare an optimizer for a step: call `meet` if it is new, and make its states plain
    tensors.
    """
    if optimizer not in _hooked and optimizer not in _passed:
        (meet if Outline.of(optimizer).engines else _passed.add)(optimizer)
    # The constructor may have made states from sharded parameters (Adagrad's sums)
    if optimizer not in _stepped:
        _stepped.add(optimizer)
        faced_states.make_all_plain(optimizer)
    faced_states.hide(optimizer)


def show_states(optimizer: Optimizer) -> None:
    """After a step or a load: show states of divided parameters in the whole parameter's shape."""
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
    """The load hooks of an optimizer, with ours always last. The user's hooks, registered later,
    then see the dict as it was given.
    """

    ours: Callable[..., Any] | None = None

    def values(self) -> Any:
        return [*super().values(), *([self.ours] if self.ours is not None else [])]
