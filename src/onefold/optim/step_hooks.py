"""Hooks before and after each optimizer step over sharded parameters.

Before the step:
1. Choose who steps each shard (runtime/stepper.py), by what the update of each parameter group looks
   at (optim/verdict.py). An optimizer, or a group, that nobody can step is refused.
2. Step what the optimizer's own step cannot. Put these gradients aside and take these parameters
   out of the groups, so that it does only the rest.

After the step: mark resident copies of the parameters as stale.

[Note: bare parameters] During the step sharded parameters are plain `nn.Parameter`s over this
rank's elements. Only their class changes; the objects stay. Optimizers see plain intervals, can
choose their fast implementations, and have no overhead. Everywhere else the parameters show the
whole shape, also in the user's own step hooks and inside a closure. If a step raises, the hooks
after it never run. Then the counter of calls (optim/torch_methods.py) ends it (`_has_returned`).

The hooks are torch's global step hooks. They are registered with the first engine and removed with
the last one.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import onefold.optim.faced_states as faced_states
import onefold.optim.states as states
from onefold.optim import torch_methods
from onefold.optim.states import engines
from onefold.optim.verdict import verdict_for
from onefold.optim.whole import epoch
from onefold.runtime.differentiate import keep_from_compiler
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.hooks import engine_of_entry
from onefold.runtime.parameters.operators import stepping
from onefold.runtime.parameters.parameter import bare, disable_torch_function, face
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
_handles: list[Any] = []


@dataclass
class _Step:
    """A step whose hooks have begun.

    Attributes:
        calls: how many calls of the optimizer's `step` were counted when it began.
        noted: how many changes were noted then (runtime/stepper.py).
        bare: the parameters that are plain until it ends. See [Note: bare parameters].
        aside: (parameter, gradient) of those that are stepped elsewhere.
        writes: from now on parameters may have been written to.
    """

    calls: int
    noted: int
    bare: list[nn.Parameter] = field(default_factory=list)
    aside: list[tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=list)
    writes: bool = False

    def make_bare(self, params: list[nn.Parameter]) -> None:
        self.bare = params
        note(face, params)
        note(setattr, stepping, "depth", stepping.depth)
        stepping.depth += 1
        bare(params)

    def leave_out(self, optimizer: Optimizer, params: list[nn.Parameter]) -> None:
        """Until `show`, the optimizer's groups are without `params`: some optimizers step also
        parameters without a gradient.
        """
        gone = set(map(id, params))
        for group in optimizer.param_groups:
            rest = [p for p in group["params"] if id(p) not in gone]
            if len(rest) < len(group["params"]):
                note(group.__setitem__, "params", group["params"])
                group["params"] = rest

    def show(self) -> None:
        """Let the parameters show the whole shape again, and the groups have all of theirs."""
        undo(self.noted)
        self.bare = []

    def restore_gradients(self) -> None:
        while self.aside:
            param, grad = self.aside[-1]
            if param.grad is None:
                param.grad = grad
            self.aside.pop()


_steps: weakref.WeakKeyDictionary[Optimizer, _Step] = weakref.WeakKeyDictionary()


def install_step_hooks(engine: Engine) -> None:
    """Hook the steps of optimizers over this engine's parameters, until the engine closes."""
    with _changes:
        engines[engine] = None
        epoch[0] += 1
        states.follow(engine)
        if not _handles:
            _handles.append(register_optimizer_step_pre_hook(_first))
            _handles.append(register_optimizer_step_post_hook(_after))
            torch_methods.follow(
                torch_methods.Follower(
                    has_parameters=lambda _: None,
                    is_asked=states.meet,
                    step_is_over=_has_returned,
                )
            )


def remove_step_hooks(engine: Engine) -> None:
    with _changes:
        engines.pop(engine, None)
        epoch[0] += 1
        if not engines:
            torch_methods.unfollow()
            while _handles:
                _handles.pop().remove()


def _entries_of(optimizer: Optimizer) -> dict[Engine, list[Entry]]:
    """Return the sharded parameters that `optimizer` steps, by engine."""
    found: dict[Engine, list[Entry]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            known = param.__dict__.get("_onefold_entry")
            if (
                known is not None
                and (entry := known()) is not None
                and (engine := engine_of_entry(entry)) is not None
            ):
                found.setdefault(engine, []).append(entry)
    return found


def _with_unsharded(
    optimizer: Optimizer, found: dict[Engine, list[Entry]]
) -> dict[Engine, list[Entry]]:
    """Return `found` plus the unsharded parameters (one rank) of engines whose steppers ask for
    them.
    """
    out = {engine: list(entries) for engine, entries in found.items()}
    asking = [e for e in list(engines) if e.stepper.wants_unsharded(optimizer)]
    unsharded = {
        id(entry.param): (engine, entry)
        for engine in asking
        for entry in engine.entries
        if entry.flat.unsharded
    }
    for group in optimizer.param_groups if unsharded else ():
        for param in group["params"]:
            if id(param) in unsharded:
                engine, entry = unsharded[id(param)]
                out.setdefault(engine, []).append(entry)
    return out


def _first(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """The global hook before a step. It has `_before` run after the user's own pre-hooks.

    torch calls global hooks before an optimizer's own ones. So if the user has registered hooks,
    this registers `_before` as the last of them.
    """
    if _nested(optimizer):
        return None
    if raw.optimizer is not None:
        _refuse_inside_a_part(optimizer, raw.optimizer)
    _end(optimizer)
    calls = torch_methods.calls_of_step(optimizer)
    if not calls:
        torch_methods.count_from_now_on(optimizer)
    _steps[optimizer] = _Step(calls, len(raw.notes))
    after: Any = optimizer._optimizer_step_post_hooks
    # `_faced` comes first: the user's own hooks see parameters as outside the step
    if after and not any(hook is _faced for hook in after.values()):
        after.move_to_end(optimizer.register_step_post_hook(_faced).id, last=False)
    own = optimizer._optimizer_step_pre_hooks
    for key in [key for key, hook in own.items() if hook is _before]:
        del own[key]
    if not own:
        return _before(optimizer, args, kwargs)
    optimizer.register_step_pre_hook(_before)
    return None


def _refuse_inside_a_part(optimizer: Optimizer, outer: Optimizer) -> None:
    """Raise TouchesReal if `optimizer` steps parameters of a model. `outer` is tried, or steps a part
    of its parameters: it makes several steps where the user's code makes one.
    """
    sharded = {id(entry.param) for engine in list(engines) for entry in engine.entries}
    if any(id(p) in sharded for group in optimizer.param_groups for p in group["params"]):
        name, inner = type(outer).__name__, type(optimizer).__name__
        raise TouchesReal(
            f"the step() of {name} also calls that of {inner}, which would step the model's parameters"
            f" several times for each step of {name}. Hold {inner} as an attribute of {name}, alone or"
            " in a list, tuple or dict, and leave all parameters to the optimizers that are held."
        )


def _nested(optimizer: Optimizer) -> bool:
    """Return whether the hooks are called for a `super().step()` inside the optimizer's own step.

    torch wraps the `step` of every class that ever had an instance, so the hooks run for both. Only
    the outer step counts. A step that is open at as many calls as now has raised, and was not
    counted (see [Note: classes, not objects] in optim/torch_methods.py).
    """
    step = _steps.get(optimizer)
    tried = any(each is optimizer for each in raw.tried)
    return (
        tried
        or raw.optimizer is optimizer
        or (step is not None and torch_methods.calls_of_step(optimizer) > step.calls)
    )


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    step = _steps.get(optimizer)
    if step is None or _nested(optimizer):
        return None
    with disable_torch_function():
        states.meet(optimizer)
        faced_states.hide(optimizer)
        # Unsharded parameters carry no mark of their engine, so they are searched for here
        for engine in [
            e
            for e in list(engines)
            if e.unsharded and (e.progress.failure is not None or e.masters.copying is not None)
        ]:
            mine = {id(entry.param) for entry in engine.entries}
            if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
                engine.masters.about_to_write()
                if engine.progress.failure is not None:
                    engine.tell_failure()
        found = _entries_of(optimizer)
        inside = held_inside(optimizer)  # their own steps come here too
        for engine, entries in found.items() if inside else ():
            refuse_cut_inside(
                optimizer,
                [entry for entry in entries if id(entry.param) in inside],
                partial(verdict_for(engine.recipe), optimizer),
            )
        apart = {
            engine: engine.stepper.choose(
                optimizer,
                [entry for entry in entries if id(entry.param) not in inside],
                verdict_for(engine.recipe),
            )
            for engine, entries in _with_unsharded(optimizer, found).items()
        }
    if any(entries for by_stepper in apart.values() for entries in by_stepper.values()):
        _refuse_arguments(optimizer, args, kwargs)
    changed = (
        _after_closure(args, kwargs)
        if any(apart.values())
        else _faced_closure(optimizer, args, kwargs)
    )
    with disable_torch_function():
        for engine in found:
            engine.optimizer_is_stepping()
            members = engine.stepper.members(optimizer)
            engine.note_update(f"{type(optimizer).__name__}.step()", of_step(optimizer, members))
        step.writes = True
        for engine, by_stepper in apart.items():
            if by_stepper:
                with torch.no_grad():
                    engine.stepper.step(optimizer, by_stepper)
                gone = [e.param for entries in by_stepper.values() for e in entries]
                step.aside.extend((p, p.grad) for p in gone)
                for param in gone:
                    param.grad = None
                step.leave_out(optimizer, gone)
        if found:
            choose_implementation(optimizer, optimizer.param_groups, next(iter(found)).device)
            step.make_bare([e.param for entries in found.values() for e in entries])
    return changed


def _refuse_arguments(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise ValueError if a step that is made in parts was given more than a closure."""
    closure, *more = args[1:] or (kwargs.get("closure"),)
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


def _after_closure(args: Any, kwargs: Any) -> Any:
    """Call the closure now, and give the step a closure that returns the loss.

    Offloaded shards are stepped before the optimizer's own step, and need their gradients then.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return (args[0],), {**kwargs, "closure": lambda: loss}


def _faced_closure(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Wrap the closure so that it sees parameters as code outside the step does."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None

    def faced() -> Any:
        step = _steps.get(optimizer)
        params = list(step.bare) if step is not None else []
        face(params)
        try:
            return closure()
        finally:
            bare(params)

    return (
        ((args[0], faced), kwargs)
        if "closure" not in kwargs
        else (args, {**kwargs, "closure": faced})
    )


def _faced(optimizer: Optimizer, *_: Any) -> None:
    """The first post-hook of a step: sharded parameters show the whole shape again."""
    if not _nested(optimizer) and (step := _steps.get(optimizer)) is not None:
        step.show()


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _nested(optimizer):
        return
    step = _steps.get(optimizer)
    with disable_torch_function():
        if step is not None:
            step.show()
            step.restore_gradients()
        elsewhere: list[Entry] = []
        for engine, entries in _entries_of(optimizer).items():
            elsewhere += engine.optimizer_has_stepped(entries)
        states.show_states(optimizer)
        faced_states.stepped_elsewhere(optimizer, [entry.param for entry in elsewhere])
    _steps.pop(optimizer, None)  # last: `_end` undoes a step that was interrupted before


def _has_returned(optimizer: Optimizer) -> None:
    """The outermost counted call of `step` has returned or raised."""
    step = _steps.get(optimizer)
    if step is not None and step.calls:  # else a call around it is not counted
        _end(optimizer)


def _end(optimizer: Optimizer) -> None:
    """Undo what `_before` did, if the step has raised: `_after` never ran."""
    step = _steps.get(optimizer)
    if step is not None:
        with disable_torch_function():
            step.show()
            step.restore_gradients()
            for engine, entries in _entries_of(optimizer).items() if step.writes else ():
                engine.optimizer_has_stepped(entries)  # some of them, before it was interrupted
            states.show_states(optimizer)
        _steps.pop(optimizer, None)


for _hook in (_first, _before, _faced, _after):  # a compiled step calls them as they are
    keep_from_compiler(_hook)
