"""What stands between an optimizer and sharded parameters: nothing, but for two looks around each
step.

Before: what rests off the device or in another format is stepped (runtime/steps.py), and its
gradients are put aside, so that the step itself does the rest.
Before that: an optimizer whose update of one element depends on others is refused
(optim/elementwise.py). After: resident copies of the parameters are stale.

[Note: bare parameters] For the time of the step sharded parameters are plain `nn.Parameter`s over
this rank's elements (their class is changed, the objects stay): optimizers see plain intervals,
choose their fast implementations, and pay nothing for attributes. Outside they keep the face of the
whole, for hooks of the user's own around the step and inside a closure too. A step that raises
never comes to its end: what holds the step's arguments (`_Arguments`) goes with it, and gives the
faces back.

torch's own step hooks are used; they are registered while an engine lives and removed with the last
one.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import onefold.optim.whole_state as whole_state
from onefold.optim import whole
from onefold.optim.elementwise import refuse_unless_elementwise
from onefold.runtime.engine import Engine
from onefold.runtime.entry import Entry
from onefold.runtime.parameters.operators import Stepping
from onefold.runtime.parameters.parameter import bare, disable_torch_function, face
from onefold.runtime.registry import engine_of_entry
from onefold.runtime.steps import Chosen

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_handles: list[Any] = []
_aside: weakref.WeakKeyDictionary[Optimizer, list[tuple[torch.Tensor, torch.Tensor | None]]] = (
    weakref.WeakKeyDictionary()
)
_bare: weakref.WeakKeyDictionary[Optimizer, weakref.ref[_Bare]] = weakref.WeakKeyDictionary()


def watch(engine: Engine, held: bool = True) -> None:
    """Look around the steps of optimizers over this engine's parameters, until it closes. `held`:
    there may be some already.
    """
    _engines.add(engine)
    whole_state.follow(engine, held)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_first))
        _handles.append(register_optimizer_step_post_hook(_after))


def unwatch(engine: Engine) -> None:
    _engines.discard(engine)
    if not _engines:
        while _handles:
            _handles.pop().remove()


def _entries_of(optimizer: Optimizer) -> dict[Engine, list[Entry]]:
    """The sharded parameters that `optimizer` steps, by engine."""
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
    """`found` with the parameters that stay as they are on one rank, which are sharded in name
    only; another format is theirs too.
    """
    out = {engine: list(entries) for engine, entries in found.items()}
    asking = [
        e
        for e in _engines
        if e.recipe.moments is not None
        or e.recipe.stochastic_rounding
        or e.steps.keeps_own_format(optimizer)
    ]
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
    """What may be stepped here has to wait for what the user has hung before the optimizer's steps:
    torch calls that after us.
    """
    if _nested(optimizer):
        return None
    after: Any = optimizer._optimizer_step_post_hooks
    # The user's own see what code outside a step sees
    if after and not any(hook is _faced for hook in after.values()):
        after.move_to_end(optimizer.register_step_post_hook(_faced).id, last=False)
    own = optimizer._optimizer_step_pre_hooks
    for key in [key for key, hook in own.items() if hook is _before]:
        del own[key]
    if not own:
        return _before(optimizer, args, kwargs)
    optimizer.register_step_pre_hook(_before)
    return None


#: torch's code around the `step` of each class.
_AROUND = next(
    c
    for c in Optimizer.profile_hook_step.__code__.co_consts
    if getattr(c, "co_name", "") == "wrapper"
)


def _nested(optimizer: Optimizer) -> bool:
    """Whether the step that hooks are called for is `super().step()` inside the optimizer's own:
    torch puts hooks around the step of each class that ever had an instance. The outer step is the
    one to look around.
    """
    frame, around = sys._getframe(1), 0
    while frame is not None and around < 2:
        if frame.f_code is _AROUND and frame.f_locals.get("self") is optimizer:
            around += 1
        frame = frame.f_back  # type: ignore[assignment]
    return around > 1


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    if _nested(optimizer):
        return None
    with disable_torch_function():
        whole_state.meet_at_step(optimizer)
        # It leaves no marks
        for engine in [
            e
            for e in _engines
            if e.unsharded and (e.progress.failure is not None or e.masters.copying is not None)
        ]:
            mine = {id(entry.param) for entry in engine.entries}
            if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
                engine.masters.about_to_write()
                if engine.progress.failure is not None:
                    engine.tell_failure()
        _show_again(optimizer)  # a step that raised never came to its end
        found = _entries_of(optimizer)
        whole.seen.add(optimizer)
        apart = {
            engine: engine.steps.apart(optimizer, entries)
            for engine, entries in _with_unsharded(optimizer, found).items()
        }
        offloaded = any(engine.offloaded_flats or apart[engine] for engine in apart)
    changed = _after_closure(args, kwargs) if offloaded else _faced_closure(optimizer, args, kwargs)
    with disable_torch_function():
        for engine in found:
            engine.optimizer_is_stepping()
            # Its blocks are seen to; a trial would compile it
            own_format = engine.steps.keeps_own_format(optimizer)
            if (
                engine.recipe.elementwise_optimizer is not True
                and _is_cut(engine)
                and not own_format
            ):
                refuse_unless_elementwise(optimizer)
        for engine, entries in apart.items():
            if engine.offloaded_flats or entries:
                with torch.no_grad():
                    engine.steps.step(optimizer, entries)
                gone = [e.param for e in entries]
                _aside.setdefault(optimizer, []).extend((p, p.grad) for p in gone)
                for param in gone:
                    param.grad = None
        if not found:
            return changed
        args, kwargs = changed if changed is not None else (args, kwargs)
        bare_ones = _Bare([e.param for entries in found.values() for e in entries])
        bare_ones.chosen = Chosen(optimizer, optimizer.param_groups, next(iter(found)).device)
        return _Arguments.of(args, bare_ones), kwargs


class _Bare:
    """Parameters that are plain ones until `end`, or until nobody holds this any more. See [Note:
    bare parameters].
    """

    chosen: Chosen | None = None  # of torch's implementations, for as long

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        Stepping.depth += 1
        bare(params)

    def end(self) -> None:
        params, self.params = self.params, []
        if self.chosen is not None:
            self.chosen.end()
        if params:
            Stepping.depth -= 1
            face(params)

    __del__ = end


class _Arguments(tuple[Any, ...]):
    """The arguments of a step. They live as long as its frame does."""

    state: _Bare

    @classmethod
    def of(cls, args: tuple[Any, ...], state: _Bare) -> _Arguments:
        out = cls(args)
        out.state = state
        _bare[args[0]] = weakref.ref(state)
        return out


def _is_cut(engine: Engine) -> bool:
    """Whether the optimizer is given parts of parameters, or steps a part of them at a time."""
    return any(
        not f.whole_master or f.tiled or f.storage.offloaded for u in engine.units for f in u.flats
    )


def _after_closure(args: Any, kwargs: Any) -> Any:
    """A step with a closure is given its loss: the gradients of what rests off the device have to
    be there before the step begins.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return (args[0],), {**kwargs, "closure": lambda: loss}


def _faced_closure(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """A closure that computes with parameters as code outside the step sees them."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None

    def faced() -> Any:
        state = _bare.get(optimizer, lambda: None)()
        params = list(state.params) if state is not None else []
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
    """The step has ended: the first of the hooks behind it."""
    if _nested(optimizer):
        return
    state = _bare.pop(optimizer, lambda: None)()
    if state is not None:
        state.end()


def _show_again(optimizer: Optimizer) -> None:
    """The gradients that were put aside are `.grad` again."""
    for param, grad in _aside.pop(optimizer, ()):
        if param.grad is None:
            param.grad = grad


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _nested(optimizer):
        return
    _faced(optimizer)
    with disable_torch_function():
        _show_again(optimizer)
        for engine, entries in _entries_of(optimizer).items():
            engine.optimizer_has_stepped(entries)
        whole_state.show_states(optimizer)
