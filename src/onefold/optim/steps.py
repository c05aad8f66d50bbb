"""Each optimizer step over sharded parameters, and all that Onefold puts around methods of torch's.

Before the optimizer's own step:
1. Choose who steps each shard (runtime/stepper.py), by what the update of each parameter group looks
   at (optim/verdict.py). An optimizer, or a group, that nobody can step is refused.
2. Step what the optimizer's own step cannot. Put these gradients aside and take these parameters
   out of the groups, so that it does only the rest.

After it: mark resident copies of the parameters as stale.

[Note: bare parameters] During the step sharded parameters are plain `nn.Parameter`s over this
rank's elements. Only their class changes; the objects stay. Optimizers see plain intervals, can
choose their fast implementations, and have no overhead. Everywhere else the parameters show the
whole shape, also in the user's own step hooks and inside a closure.

[Note: around torch's methods] From the first `shard()` on these are wrapped (torch 2.13,
torch/optim/optimizer.py). While no model is sharded they do nothing else than torch's.

| method                          | why no hook of torch's serves                                | what is around it                |
|---------------------------------|--------------------------------------------------------------|----------------------------------|
| `step` of each class            | none runs behind a step that raises, or always last or first | `_run`, inside of torch's hooks  |
| `state_dict`, `load_state_dict` | none before the first call on an optimizer that is not known | the optimizer is met before      |
| `load_state_dict`               | none where it casts states to `param.dtype`                  | parameters show the masters' dtype |
| `zero_grad`, also of modules    | none where it reads `.grad` only to drop it                  | `.grad` is shown as it is stored |

A wrapper on an optimizer would make a reference cycle with it, and would be lost in its copies. torch
itself wraps the `step` of a class when the class gets its first object (`Optimizer.profile_hook_step`).
A learning-rate scheduler that was made before the first `shard()` has put the method as it was into
`optimizer.step`. Such a step is made between torch's global hooks (`_begin_late`); if the very first
one raises, the next one ends it.
"""  # fmt: skip

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from onefold.optim import faced_states, states
from onefold.optim.states import engines
from onefold.optim.verdict import verdict_for
from onefold.optim.whole import epoch
from onefold.runtime.differentiate import keep_from_compiler
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.hooks import engine_of_entry
from onefold.runtime.parameters.operators import stepping
from onefold.runtime.parameters.parameter import bare, disable_torch_function, face, reader
from onefold.runtime.stepper import (
    TouchesReal,
    choose_implementation,
    held_inside,
    note,
    raw,
    refuse_cut_inside,
    undo,
)
from onefold.runtime.updates import of_step

_changes = threading.RLock()  # several threads may shard models, and free them
_active: list[bool] = []  # not empty while a model is sharded: what compiled code asks
_OURS, _LATE = "_onefold_steps", "_onefold_late"  # marks of functions


def install_step_hooks(engine: Engine) -> None:
    """Be part of the steps of optimizers over this engine's parameters, until the engine closes."""
    with _changes:
        engines[engine] = None
        epoch[0] += 1
        _put_around_torchs()
        _active[:] = [True]
        states.follow(engine)


def remove_step_hooks(engine: Engine) -> None:
    with _changes:
        engines.pop(engine, None)
        epoch[0] += 1
        if not engines:
            _active.clear()


# -- around torch's methods ------------------------------------------------------------------------


@functools.cache
def _put_around_torchs() -> None:
    kind: Any = Optimizer
    module: Any = nn.Module
    torchs = kind.profile_hook_step
    kind.profile_hook_step = staticmethod(lambda step: torchs(_with_ours(step)))
    for each in _kinds(Optimizer):  # classes that had an object already
        own: Any = each.__dict__.get("step")
        if getattr(own, "hooked", False):
            each.step = kind.profile_hook_step(own.__wrapped__)  # type: ignore[attr-defined]
    kind.state_dict = _met_before(kind.state_dict)
    kind.load_state_dict = _met_before(_reads("casts_states", kind.load_state_dict))
    for zeroing in (kind, module):
        zeroing.zero_grad = _reads("drops_gradients", zeroing.zero_grad)
    register_optimizer_step_pre_hook(_begin_late)
    register_optimizer_step_post_hook(_end_late)


def _kinds(kind: type) -> Iterable[type]:
    """Return `kind` and all its subclasses."""
    return {kind}.union(*map(_kinds, kind.__subclasses__()))


def _with_ours(step: Any) -> Any:
    @functools.wraps(step)
    def ours(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not _active:
            return step(self, *args, **kwargs)
        return _run(self, step, args, kwargs)

    # torch marks what it wraps by `hooked`; whoever wraps this in turn takes both marks with it
    ours.__dict__ |= {_OURS: True, "hooked": True}
    return ours


def _met_before(method: Any) -> Any:
    @functools.wraps(method)
    def ours(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _active:
            states.meet(self)
        return method(self, *args, **kwargs)

    return ours


def _reads(flag: str, method: Any) -> Any:
    """Set a flag of `reader` during the call."""

    @functools.wraps(method)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _active:
            return method(self, *args, **kwargs)
        before = getattr(reader, flag)
        setattr(reader, flag, True)
        try:
            return method(self, *args, **kwargs)
        finally:
            setattr(reader, flag, before)

    return read


# -- one step --------------------------------------------------------------------------------------


@dataclass
class _Step:
    """A step under way.

    Attributes:
        noted: how many changes were noted when it began (runtime/stepper.py).
        bare: the parameters that are plain until it ends. See [Note: bare parameters].
        found: the sharded parameters that may be written to, by engine.
        elsewhere: those of which other ranks alone have elements.
        inner: calls of `super().step()` under way, of a step that torch's hooks alone tell of.
    """

    optimizer: Optimizer
    noted: int
    bare: list[nn.Parameter] = field(default_factory=list)
    found: dict[Engine, list[Entry]] = field(default_factory=dict)
    elsewhere: list[Any] = field(default_factory=list)
    inner: int = 0

    def written(self) -> None:
        of_engines = (engine.optimizer_has_stepped(e) for engine, e in self.found.items())
        self.elsewhere = [entry.param for entries in of_engines for entry in entries]

    def end(self) -> None:
        """Undo what the step has changed for its time."""
        with disable_torch_function():
            undo(self.noted)

    def succeed(self) -> None:
        with disable_torch_function():
            faced_states.stepped_elsewhere(self.optimizer, self.elsewhere)


_inside: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_late: weakref.WeakKeyDictionary[Optimizer, _Step] = weakref.WeakKeyDictionary()


def _run(optimizer: Optimizer, step: Any, args: Any, kwargs: Any) -> Any:
    """Make a step of which `step` is the optimizer's own."""
    if _is_part(optimizer):
        return step(optimizer, *args, **kwargs)
    ours = _Step(optimizer, len(raw.notes))
    try:
        try:
            args, kwargs = _begin(ours, args, kwargs)
            out = step(optimizer, *args, **kwargs)
        finally:
            ours.end()
        ours.succeed()
        return out
    finally:
        ours.end()  # an interrupt may have left something


def _begin_late(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """The global hook before a step: begin one that torch makes without `_run`."""
    own = optimizer.__dict__.get("step")
    if not _active or not isinstance(own, FunctionType):
        return None
    if optimizer in _late:
        _late[optimizer].inner += 1
        return None
    if (hasattr(own, _OURS) and not hasattr(own, _LATE)) or _is_part(optimizer):
        return None
    if not hasattr(own, _LATE):
        optimizer.step = _ended(own, weakref.ref(optimizer))  # type: ignore[method-assign]
    ours = _late[optimizer] = _Step(optimizer, len(raw.notes))
    args, kwargs = _begin(ours, args[1:], kwargs)
    return (optimizer, *args), kwargs


def _end_late(optimizer: Optimizer, *_: Any) -> None:
    ours = _late.get(optimizer)
    if ours is not None and ours.inner:
        ours.inner -= 1
    elif ours is not None:
        ours.end()
        ours.succeed()
        _late.pop(optimizer, None)


def _ended(step: Any, of: weakref.ref[Optimizer]) -> Any:
    """Put the end of a late step around `step`, which somebody put into an optimizer."""

    @functools.wraps(step)
    def ours(*args: Any, **kwargs: Any) -> Any:
        _end_raised(of())
        try:
            return step(*args, **kwargs)
        finally:
            _end_raised(of())

    ours.__dict__ |= {_OURS: True, _LATE: True}
    return ours


def _end_raised(optimizer: Optimizer | None) -> None:
    if optimizer is not None and optimizer in _late:
        _late.pop(optimizer).end()


def _is_part(optimizer: Optimizer) -> bool:
    """Return whether this call is a part of a step under way, or of a trial: a `super().step()` in the
    optimizer's own step, or the step of a part of its parameters.

    Raises:
        TouchesReal: another optimizer is tried, or steps a part of its parameters, and this one would
            step parameters of a model: several times where the user's code steps them once.
    """
    if optimizer in _inside or any(each is optimizer for each in (raw.optimizer, *raw.tried)):
        return True
    if raw.optimizer is not None:
        sharded = {id(entry.param) for engine in list(engines) for entry in engine.entries}
        if any(id(p) in sharded for group in optimizer.param_groups for p in group["params"]):
            name, inner = type(raw.optimizer).__name__, type(optimizer).__name__
            raise TouchesReal(
                f"the step() of {name} also calls that of {inner}, which would step the model's"
                f" parameters several times for each step of {name}. Hold {inner} as an attribute of"
                f" {name}, alone or in a list, tuple or dict, and leave all parameters to the"
                " optimizers that are held."
            )
    return False


def _begin(ours: _Step, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Do all that comes before the optimizer's own step. Return its arguments."""
    optimizer = ours.optimizer
    note(_inside.discard, optimizer)
    _inside.add(optimizer)
    with disable_torch_function():
        states.meet(optimizer)
        note(states.show_states, optimizer)
        faced_states.hide(optimizer)
        found = _entries_of(optimizer)
        apart = _choose(optimizer, found)
    if any(entries for by_stepper in apart.values() for entries in by_stepper.values()):
        _refuse_arguments(optimizer, args, kwargs)
    args, kwargs = _with_closure(ours, args, kwargs, first=any(apart.values()))
    with disable_torch_function():
        for engine in found:
            engine.optimizer_is_stepping()
            members = engine.stepper.members(optimizer)
            engine.note_update(f"{type(optimizer).__name__}.step()", of_step(optimizer, members))
        note(ours.written)
        ours.found = found
        for engine, by_stepper in apart.items():
            with torch.no_grad():
                engine.stepper.step(optimizer, by_stepper)
            _leave_out(optimizer, [e.param for some in by_stepper.values() for e in some])
        if found:
            choose_implementation(optimizer, optimizer.param_groups, next(iter(found)).device)
            params = [e.param for entries in found.values() for e in entries]
            note(face, params)
            note(setattr, stepping, "depth", stepping.depth)
            stepping.depth += 1
            bare(params)
            ours.bare = params
    return args, kwargs


def _entries_of(optimizer: Optimizer) -> dict[Engine, list[Entry]]:
    """Return the sharded parameters that `optimizer` steps, by engine."""
    found: dict[Engine, list[Entry]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            known = param.__dict__.get("_onefold_entry")
            entry = known() if known is not None else None
            if entry is not None and (engine := engine_of_entry(entry)) is not None:
                found.setdefault(engine, []).append(entry)
    return found


def _choose(optimizer: Optimizer, found: dict[Engine, list[Entry]]) -> dict[Engine, Any]:
    """Return what is stepped before the optimizer's own step, by engine and stepper."""
    every = {engine: list(entries) for engine, entries in found.items()}
    # Unsharded parameters (one rank) carry no mark of their engine, so they are searched for here
    for engine in list(engines):
        asks = engine.stepper.wants_unsharded(optimizer)
        waits = engine.progress.failure is not None or engine.masters.copying is not None
        if not asks and not (engine.unsharded and waits):
            continue
        params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = [e for e in engine.entries if id(e.param) in params]
        if mine and engine.unsharded and waits:
            engine.masters.about_to_write()
            if engine.progress.failure is not None:
                engine.tell_failure()
        unsharded = [e for e in mine if e.flat.unsharded] if asks else []
        if unsharded:
            every.setdefault(engine, []).extend(unsharded)
    inside = held_inside(optimizer)  # their own steps come here too
    apart = {}
    for engine, entries in every.items():
        verdict = verdict_for(engine.recipe)
        held = [entry for entry in entries if id(entry.param) in inside]
        refuse_cut_inside(optimizer, held, partial(verdict, optimizer))
        own = [entry for entry in entries if id(entry.param) not in inside]
        apart[engine] = engine.stepper.choose(optimizer, own, verdict)
    return apart


def _refuse_arguments(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise ValueError if a step that is made in parts was given more than a closure."""
    closure, *more = args or (kwargs.get("closure"),)
    given = [repr(each) for each in more if each is not None]
    given += [f"{k}={v!r}" for k, v in kwargs.items() if k != "closure" and v is not None]
    if closure is not None and not callable(closure):
        given.insert(0, repr(closure))
    if given:
        raise ValueError(
            f"{type(optimizer).__name__}.step() was called with {', '.join(given)}, on parameters that are"
            " stepped in parts (whole matrices, or states off the device). Each part is stepped without"
            " arguments: keep such a value in the parameter groups."
        )


def _with_closure(ours: _Step, args: Any, kwargs: Any, first: bool) -> tuple[Any, Any]:
    """Return the arguments with a closure that sees parameters as code outside the step does. `first`:
    it is called now, and later returns the loss: what is stepped before needs its gradients.
    """
    closure = kwargs.get("closure", args[0] if args else None)
    if closure is None:
        return args, kwargs
    if first:
        with torch.enable_grad():
            loss = closure()

    def faced() -> Any:
        if first:
            return loss
        params = list(ours.bare)
        face(params)
        try:
            return closure()
        finally:
            bare(params)

    if "closure" in kwargs:
        return args, {**kwargs, "closure": faced}
    return (faced, *args[1:]), kwargs


def _leave_out(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    """Until the step ends, the optimizer's groups are without `params`, and these without gradients:
    some optimizers step also parameters that have none.
    """
    for param in params:
        note(_give_back, param, param.grad)
        param.grad = None
    gone = set(map(id, params))
    for group in optimizer.param_groups if gone else ():
        rest = [p for p in group["params"] if id(p) not in gone]
        if len(rest) < len(group["params"]):
            note(group.__setitem__, "params", group["params"])
            group["params"] = rest


def _give_back(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    if param.grad is None:
        param.grad = grad


for _function in (_run, _begin_late, _end_late):  # a compiled step calls them as they are
    keep_from_compiler(_function)
