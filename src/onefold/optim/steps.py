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
| `zero_grad`, also of modules    | none where it reads `.grad` only to drop it                  | parameters are bare              |

A wrapper on an optimizer would make a reference cycle with it, and would be lost in its copies. torch
itself wraps the `step` of a class when the class gets its first object (`Optimizer.profile_hook_step`).
Ours is put into torch's wrapper, in the place of the `step` that it calls. So it is also there where
somebody holds the wrapper already: a learning-rate scheduler that was made before the first
`shard()` has put it into `optimizer.step`.
"""  # fmt: skip

from __future__ import annotations

import functools
import threading
import weakref
import zlib
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from onefold.optim import faced_states, states
from onefold.optim.verdict import verdict_of
from onefold.optim.whole import epoch
from onefold.recipe.optimizers import ELEMENTWISE, WHOLE
from onefold.runtime.agree import of_step
from onefold.runtime.differentiate import here, in_autograd, keep_from_compiler
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.parameters.parameter import (
    ShardedParameter,
    bare,
    disable_torch_function,
    face,
)
from onefold.runtime.parameters.values import count_step, drop_waiting
from onefold.runtime.stepper import (
    Choice,
    Stepper,
    TouchesReal,
    choose_implementation,
    groups_now,
    groups_of,
    held_inside,
    is_cut,
    note,
    raw,
    refuse_unless,
    undo,
)

_changes = threading.RLock()  # several threads may shard models, and free them
_engines: set[Engine] = set()
_active: list[bool] = []  # not empty while a model is sharded: what compiled code asks


def install_step_hooks(engine: Engine) -> None:
    """Be part of the steps of optimizers over this engine's parameters, until the engine closes."""
    with _changes:
        _engines.add(engine)
        states.unmarked.update({id(e.param): e for e in engine.entries if e.flat.unsharded})
        epoch[0] += 1
        _put_around_torchs()
        _active[:] = [True]


def remove_step_hooks(engine: Engine) -> None:
    with _changes:
        _engines.discard(engine)
        epoch[0] += 1
        if not _engines:
            _active.clear()


# -- around torch's methods ------------------------------------------------------------------------


@functools.cache
def _put_around_torchs() -> None:
    kind: Any = Optimizer
    module: Any = nn.Module
    torchs = kind.profile_hook_step
    kind.profile_hook_step = staticmethod(lambda step: _put_inside(torchs(step)))
    for each in _kinds(Optimizer):  # classes that had an object already
        if getattr(own := each.__dict__.get("step"), "hooked", False):
            _put_inside(own)
    kind.state_dict = _met_before(kind.state_dict)
    kind.load_state_dict = _met_before(kind.load_state_dict, casts=True)
    kind.zero_grad, module.zero_grad = _drops(kind.zero_grad), _drops(module.zero_grad)


def _kinds(kind: type) -> Iterable[type]:
    """Return `kind` and all its subclasses."""
    return {kind}.union(*map(_kinds, kind.__subclasses__()))


#: The code of the functions that `Optimizer.profile_hook_step` returns.
_TORCHS_WRAPPER = Optimizer.profile_hook_step(print).__code__


def _put_inside(hooked: Any) -> Any:
    """Let torch's wrapper of a `step`, which calls the hooks, call ours in the place of the `step`."""
    torchs = hooked
    while (
        getattr(torchs, "__code__", None) is not _TORCHS_WRAPPER
    ):  # somebody has wrapped it in turn
        torchs = torchs.__wrapped__
    cell = torchs.__closure__[_TORCHS_WRAPPER.co_freevars.index("func")]
    step = cell.cell_contents

    @functools.wraps(step)
    def ours(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not _active:
            return step(self, *args, **kwargs)
        return _run(self, step, args, kwargs)

    cell.cell_contents = ours
    return hooked


def _met_before(method: Any, casts: bool = False) -> Any:
    """`casts`: it casts states to the dtype that parameters show."""

    @functools.wraps(method)
    def ours(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _active:
            states.meet(self)
        before, here.casts_states = here.casts_states, casts and bool(_active)
        try:
            return method(self, *args, **kwargs)
        finally:
            here.casts_states = before

    return ours


def _drops(method: Any) -> Any:
    """A loop over thousands of parameters that reads each `.grad` only to drop it: over bare ones."""

    @functools.wraps(method)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if not _active or here.passes or in_autograd():
            return method(self, set_to_none)
        groups = (
            self.param_groups if isinstance(self, Optimizer) else [{"params": self.parameters()}]
        )
        every = [p for group in groups for p in group["params"]]
        params = [p for p in every if isinstance(p, ShardedParameter)]
        try:
            bare(params)
            method(self, set_to_none)
        finally:
            face(params)
        drop_waiting(params, set_to_none)

    return zero_grad


# -- one step --------------------------------------------------------------------------------------


_inside: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _run(optimizer: Optimizer, step: Any, args: Any, kwargs: Any) -> Any:
    """Make a step of which `step` is the optimizer's own."""
    if _is_part(optimizer):
        return step(optimizer, *args, **kwargs)
    noted, elsewhere = len(raw.notes), list[nn.Parameter]()
    try:
        try:
            args, kwargs = _begin(optimizer, elsewhere, args, kwargs)
            out = step(optimizer, *args, **kwargs)
        finally:
            _end(noted)
        with disable_torch_function():
            faced_states.stepped_elsewhere(optimizer, elsewhere)
        return out
    finally:
        _end(noted)  # an interrupt may have left something


def _end(noted: int) -> None:
    """Undo what a step has changed for its time. `noted`: see `undo`."""
    with disable_torch_function():
        undo(noted)


def _is_part(optimizer: Optimizer) -> bool:
    """Return whether this call is a part of a step under way, or of a trial: a `super().step()` in the
    optimizer's own step, or the step of a part of its parameters.

    Raises:
        TouchesReal: another optimizer is tried, or steps a part of its parameters, and this one would
            step parameters of a model: several times where the user's code steps them once.
    """
    if optimizer in _inside or any(each is optimizer for each in (raw.optimizer, *raw.tried)):
        return True
    if raw.optimizer is not None and states.Outline(optimizer).engines:
        name, inner = type(raw.optimizer).__name__, type(optimizer).__name__
        raise TouchesReal(
            f"the step() of {name} also calls that of {inner}, which would step the model's"
            f" parameters several times for each step of {name}. Hold {inner} as an attribute of"
            f" {name}, alone or in a list, tuple or dict, and leave all parameters to the"
            " optimizers that are held."
        )
    return False


def _begin(
    optimizer: Optimizer, elsewhere: list[nn.Parameter], args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Do all that comes before the optimizer's own step. Return its arguments.

    `elsewhere`: gets the parameters of which other ranks alone have elements, once they are stepped.
    """
    note(_inside.discard, optimizer)
    _inside.add(optimizer)
    with disable_torch_function():
        states.meet(optimizer)
        note(states.show_states, optimizer)
        faced_states.hide(optimizer)
        found = _entries_of(optimizer)
        chosen = _choose(optimizer, found)
    apart = [each for choice in chosen.values() for each in choice.apart.items()]
    if any(entries for _, entries in apart):
        _refuse_arguments(optimizer, args, kwargs)
    params = [e.param for entries in found.values() for e in entries]
    args, kwargs = _with_closure(params, args, kwargs, first=bool(apart))
    with disable_torch_function():
        for engine, choice in chosen.items():
            engine.optimizer_is_stepping()
            said = of_step(optimizer, choice.members)
            engine.note_update(f"{type(optimizer).__name__}.step()", said)
        note(_written, found, elsewhere)
        with torch.no_grad():
            for stepper, entries in apart:
                stepper.step(optimizer, entries)
        _leave_out(optimizer, [e.param for _, entries in apart for e in entries])
        if sharded := [engine for engine in found if not engine.unsharded]:
            choose_implementation(optimizer, sharded[0].device)
            note(face, params)
            note(setattr, here, "stepping", here.stepping)
            here.stepping += 1
            bare(params)
    return args, kwargs


def _written(found: dict[Engine, list[Entry]], elsewhere: list[nn.Parameter]) -> None:
    for engine, entries in found.items():
        engine.optimizer_seen = True
        elsewhere += [entry.param for entry in count_step(engine, entries)]


def _entries_of(optimizer: Optimizer) -> dict[Engine, list[Entry]]:
    """Return the parameters of sharded models that `optimizer` steps, by engine."""
    found: dict[Engine, list[Entry]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            entry, engine = states.engine_of_param(param)
            if entry is not None:
                found.setdefault(engine, []).append(entry)
    return found


def _choose(optimizer: Optimizer, found: dict[Engine, list[Entry]]) -> dict[Engine, Choice]:
    """Return who steps the parameters, by engine. See [Note: which stepper].

    Raises:
        ValueError: the stepper of some of the shards cannot take the optimizer, or a group.
    """
    inside, group_of = held_inside(optimizer), groups_of(optimizer)
    groups, out = groups_now(optimizer), dict[Engine, Choice]()
    for engine, entries in found.items():
        verdict = partial(verdict_of, engine.recipe, optimizer)
        # Their own steps come here too
        held = (e for e in entries if id(e.param) in inside and is_cut(e.flat))
        for group in {group_of[id(e.param)] for e in held}:
            refuse_unless(optimizer, verdict(group), ELEMENTWISE, WHOLE)
        asked = groups, [entry for entry in entries if id(entry.param) not in inside]
        last = engine.choices.get(optimizer)
        if last is None or last.asked != asked:
            last = engine.choices[optimizer] = _asked(optimizer, engine, asked, verdict, group_of)
        out[engine] = last
    return out


def _asked(
    optimizer: Optimizer, engine: Engine, asked: Any, verdict: Any, group_of: dict[int, int]
) -> Choice:
    """Ask who steps the shards."""
    together: dict[tuple[int, Flat], list[Entry]] = {}
    for entry in asked[1]:
        together.setdefault((group_of[id(entry.param)], entry.flat), []).append(entry)
    apart: dict[Stepper, list[Entry]] = {stepper: [] for stepper in engine.steppers}
    members: dict[int, list[int]] = {}
    for (group, flat), some in together.items():
        of_group = partial(verdict, group)
        stepper = next((s for s in apart if s.accepts(optimizer, flat, of_group)), None)
        if is_cut(flat) and not (stepper is not None and stepper.whole):
            refuse_unless(optimizer, of_group(), ELEMENTWISE)
        if stepper is not None:
            apart[stepper] += some
        members.setdefault(group, []).extend(entry.number for entry in some)
    said = {  # in any order: code may make a group of a set of names
        group: f"{len(some)} parameters (checksum {zlib.crc32(repr(sorted(some)).encode()):08x})"
        for group, some in sorted(members.items())
    }
    return Choice(asked, {s: some for s, some in apart.items() if some or s.collective}, said)


def _refuse_arguments(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise ValueError if a step that is made in parts was given more than a closure."""
    closure, *more = args or (kwargs.get("closure"),)
    more += [value for name, value in kwargs.items() if name != "closure"]
    if any(each is not None for each in more) or not (closure is None or callable(closure)):
        raise ValueError(
            f"{type(optimizer).__name__}.step() was called with {(*args, *kwargs.items())}, on"
            " parameters that are stepped in parts (whole matrices, or states off the device). Each part"
            " is stepped without arguments: keep such a value in the parameter groups."
        )


def _with_closure(
    params: list[nn.Parameter], args: Any, kwargs: Any, first: bool
) -> tuple[Any, Any]:
    """Return the arguments with a closure that sees `params`, which are bare in the step, as code
    outside of it does. `first`: it is called now, and later returns the loss: what is stepped before
    needs its gradients.
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


keep_from_compiler(_run)  # a compiled step calls it as it is
