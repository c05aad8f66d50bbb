"""Hooks before and after each optimizer step over sharded parameters.

Before the step:
1. Refuse an optimizer whose update of an element depends on other elements (at the end of this file).
2. Step offloaded shards, and shards with moments in a format of their own (runtime/stepper.py). Put
   their gradients aside, so that the optimizer's own step does only the rest.

After the step: mark resident copies of the parameters as stale.

[Note: bare parameters] During the step sharded parameters are plain `nn.Parameter`s over this
rank's elements. Only their class changes; the objects stay. Optimizers see plain intervals, can
choose their fast implementations, and have no overhead. Everywhere else the parameters show the
whole shape, also in the user's own step hooks and inside a closure. If a step raises, the hook
after it never runs. Then the step's arguments (`_Arguments`) are freed with its frame, and that
restores the class.

The hooks are torch's global step hooks. They are registered with the first engine and removed with
the last one.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import onefold.optim.faced_states as faced_states
import onefold.optim.state_dicts as state_dicts
from onefold.optim import whole
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.hooks import engine_of_entry
from onefold.runtime.parameters.interval import spec_of
from onefold.runtime.parameters.operators import Stepping
from onefold.runtime.parameters.parameter import bare, disable_torch_function, face
from onefold.runtime.stepper import Chosen

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_handles: list[Any] = []
_aside: weakref.WeakKeyDictionary[Optimizer, list[tuple[torch.Tensor, torch.Tensor | None]]] = (
    weakref.WeakKeyDictionary()
)
_bare: weakref.WeakKeyDictionary[Optimizer, weakref.ref[_Bare]] = weakref.WeakKeyDictionary()


def install_step_hooks(engine: Engine, held: bool = True) -> None:
    """Hook the steps of optimizers over this engine's parameters, until the engine closes.

    `held`: whether such optimizers may already exist.
    """
    _engines.add(engine)
    state_dicts.follow(engine, held)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_first))
        _handles.append(register_optimizer_step_post_hook(_after))


def remove_step_hooks(engine: Engine) -> None:
    _engines.discard(engine)
    if not _engines:
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
    """Return `found` plus the unsharded parameters (one rank) of engines with moments in a format
    of their own or stochastic rounding.
    """
    out = {engine: list(entries) for engine, entries in found.items()}
    asking = [
        e
        for e in _engines
        if e.recipe.moments is not None
        or e.recipe.stochastic_rounding
        or e.stepper.keeps_own_format(optimizer)
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
    """The global hook before a step. It has `_before` run after the user's own pre-hooks.

    torch calls global hooks before an optimizer's own ones. So if the user has registered hooks,
    this registers `_before` as the last of them.
    """
    if _nested(optimizer):
        return None
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


#: torch's code around the `step` of each class.
_AROUND = next(
    c
    for c in Optimizer.profile_hook_step.__code__.co_consts
    if getattr(c, "co_name", "") == "wrapper"
)


def _nested(optimizer: Optimizer) -> bool:
    """Return whether the hooks are called for a `super().step()` inside the optimizer's own step.

    torch wraps the `step` of every class that ever had an instance, so the hooks run for both. Only
    the outer step counts.
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
        state_dicts.meet_at_step(optimizer)
        # Unsharded parameters carry no mark of their engine, so they are searched for here
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
        _show_again(optimizer)  # if the last step raised, its end never ran
        found = _entries_of(optimizer)
        whole.seen.add(optimizer)
        apart = {
            engine: engine.stepper.apart(optimizer, entries)
            for engine, entries in _with_unsharded(optimizer, found).items()
        }
        offloaded = any(engine.offloaded_flats or apart[engine] for engine in apart)
    changed = _after_closure(args, kwargs) if offloaded else _faced_closure(optimizer, args, kwargs)
    with disable_torch_function():
        for engine in found:
            engine.optimizer_is_stepping()
            # torchao's low-bit optimizers are checked elsewhere, and a trial would compile them
            own_format = engine.stepper.keeps_own_format(optimizer)
            if (
                engine.recipe.elementwise_optimizer is not True
                and _is_cut(engine)
                and not own_format
            ):
                refuse_unless_elementwise(optimizer)
        for engine, entries in apart.items():
            if engine.offloaded_flats or entries:
                with torch.no_grad():
                    engine.stepper.step(optimizer, entries)
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
    """Parameters that are plain until `end`, or until this object is freed. See [Note: bare
    parameters].
    """

    chosen: Chosen | None = None  # the implementation of torch's to use until then

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
    """The arguments of a step. They live as long as the step's frame."""

    state: _Bare

    @classmethod
    def of(cls, args: tuple[Any, ...], state: _Bare) -> _Arguments:
        out = cls(args)
        out.state = state
        _bare[args[0]] = weakref.ref(state)
        return out


def _is_cut(engine: Engine) -> bool:
    """Return whether the optimizer sees parts of parameters, or steps a few of them at a time."""
    return any(
        not f.whole_master or f.tiled or f.storage.offloaded for u in engine.units for f in u.flats
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
    """The first post-hook of a step: sharded parameters show the whole shape again."""
    if _nested(optimizer):
        return
    state = _bare.pop(optimizer, lambda: None)()
    if state is not None:
        state.end()


def _show_again(optimizer: Optimizer) -> None:
    """Restore the gradients that were put aside."""
    for param, grad in _aside.pop(optimizer, ()):
        if param.grad is None:
            param.grad = grad


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _nested(optimizer):
        return
    _faced(optimizer)
    with disable_torch_function():
        _show_again(optimizer)
        elsewhere: list[Entry] = []
        for engine, entries in _entries_of(optimizer).items():
            elsewhere += engine.optimizer_has_stepped(entries)
        state_dicts.show_states(optimizer)
        faced_states.stepped_elsewhere(optimizer, [entry.param for entry in elsewhere])


# -- does an update look at one element only? ------------------------------------------------------
#
# Find out by trial which optimizers may step intervals of parameters.
#
# An optimizer may, if its update of an element depends on that element alone. The trial steps a small
# matrix, and the same matrix cut into pieces. The results, and every number that the optimizer keeps,
# must be equal bit for bit. Optimizers with a factored second moment, or with a norm of a matrix or a
# layer, fail. With intervals they would silently compute something else.


_verdicts: weakref.WeakKeyDictionary[Optimizer, str | None] = weakref.WeakKeyDictionary()
#: {class: {everything that a trial depends on: its verdict}}. A second optimizer of the same kind
#: in this process needs no trial.
_tried: weakref.WeakKeyDictionary[type, dict[Any, str | None]] = weakref.WeakKeyDictionary()


def refuse_unless_elementwise(optimizer: Optimizer) -> None:
    """Raise if the optimizer's update is not element-wise.

    Raises:
        ValueError: the update is not element-wise, or the trial failed.
    """
    if optimizer not in _verdicts:
        _verdicts[optimizer] = _probe(optimizer)
    verdict = _verdicts[optimizer]
    if verdict is not None:
        raise ValueError(
            f"{type(optimizer).__name__} cannot step sharded parameters: {verdict} Stages 1 to 3"
            " and offloading give the optimizer one part of each parameter at a time, which serves"
            " updates that treat every element alike (SGD, Adam, AdamW, Adagrad, RMSprop, Lion,"
            " ...). Use stage 0 on the device, or one of those; if you know the update to be"
            " element-wise, give the recipe elementwise_optimizer=True."
        )


def _probe(optimizer: Optimizer) -> str | None:
    """Return None if the update is element-wise, else the reason why not. Verdicts are cached."""
    device = next(
        (p.device for g in optimizer.param_groups for p in g["params"]), torch.device("cpu")
    )
    kind = type(optimizer)
    if not _is_plain(arguments := _arguments(optimizer)):
        return _tried_anew(optimizer, device)
    # The class may have been patched since the last trial
    inside = tuple((name, id(value)) for c in kind.__mro__ for name, value in vars(c).items())
    depends = (inside, repr(arguments), repr(_kinds_of(optimizer)), str(device))
    known = _tried.setdefault(kind, {})
    if depends not in known:
        known[depends] = _tried_anew(optimizer, device)
    return known[depends]


def _is_plain(value: Any) -> bool:
    """Return whether `repr(value)` describes `value` completely."""
    if isinstance(value, dict):
        return all(_is_plain(part) for item in value.items() for part in item)
    if isinstance(value, (tuple, list)):
        return all(_is_plain(part) for part in value)
    return value is None or type(value) in (bool, int, float, str)


def _tried_anew(optimizer: Optimizer, device: torch.device) -> str | None:
    apart = (
        {"devices": [device], "device_type": device.type}
        if device.type != "cpu"
        else {"devices": []}
    )
    with torch.random.fork_rng(**apart), torch.enable_grad():
        # Some optimizers treat only large matrices as matrices
        for shape in ((16, 24), (160, 144)):
            if said := _try(optimizer, shape, {}, device):
                return said
        for dims, options in _kinds_of(optimizer):
            # A group's own option, or a third dimension (convolutions), may change the kind of
            # update.
            if said := _try(
                optimizer,
                (16, 24) if dims == 2 else (*(2,) * (dims - 3), 8, 6, 16),
                options,
                device,
            ):
                return said
    return None


def _kinds_of(optimizer: Optimizer) -> list[tuple[int, dict[str, Any]]]:
    """Return each distinct (number of dimensions, options of the group itself) among the
    optimizer's parameters, except plain matrices without such options.
    """
    found: dict[tuple[int, str], tuple[int, dict[str, Any]]] = {}
    for group in optimizer.param_groups:
        own = {
            k: v for k, v in group.items() if k not in ("params", "param_names", "lr", "initial_lr")
        }
        own = {
            k: v
            for k, v in own.items()
            if isinstance(v, (bool, int, float, str, tuple, type(None)))
            and optimizer.defaults.get(k) != v
        }
        # For weight decay only zero or not matters. Its value does not change the kind of update.
        key = repr(sorted((k, v != 0 if k == "weight_decay" else v) for k, v in own.items()))
        for p in group["params"]:
            dims = max(2, len((spec_of(p) or p).shape))
            if own or dims > 2:
                found.setdefault((dims, key), (dims, own))
    return list(found.values())


#: Steps of a trial. An optimizer may begin with steps of a millionth (Prodigy), so the trial also
#: compares the numbers that the optimizer keeps.
_TRIED = 4


@dataclass
class _Trial:
    """The result of a trial: the parameter, and every number that the optimizer keeps for it or for
    its group.
    """

    param: torch.Tensor
    numbers: dict[str, Any]


def _try(
    optimizer: Optimizer, shape: tuple[int, ...], options: dict[str, Any], device: torch.device
) -> str | None:
    """Compare steps of a parameter of this shape with steps of its parts. Return None if they are
    equal, else the reason for a refusal.

    The cuts are at multiples of 128 elements, where SIMD vectors end.
    """
    generator, numel = torch.Generator().manual_seed(0), prod(shape)

    def drawn() -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device)

    start, way = drawn(), drawn()
    # All gradients point roughly one way, as in training. An optimizer that estimates a distance
    # (Prodigy) then finds one.
    grads = [way + 0.3 * drawn() for _ in range(_TRIED)]
    try:
        whole = _run(optimizer, start, grads, options)
    except Exception as error:
        if options:  # a group's options may make sense for its own parameters only
            return None
        return (
            f"its constructor or step could not be tried on a small matrix ({type(error).__name__}:"
            f" {error})."
        )
    try:
        cut = (numel // 3 // 128 * 128, 2 * numel // 3 // 128 * 128)
        # Each piece has an optimizer of its own, as on each rank. What one optimizer sums over all
        # its parameters, the others do not know.
        cuts = zip(_split(start, cut), *(_split(g, cut) for g in grads), strict=True)
        pieces = [_run(optimizer, s, gs, options) for s, *gs in cuts]
    except Exception as error:
        return (
            f"its step does not work on one-dimensional pieces ({type(error).__name__}: {error})."
        )
    what = "matrix" if len(shape) == 2 else f"tensor of {len(shape)} dimensions"
    with_options = (
        f", with a group's {', '.join(f'{k}={v!r}' for k, v in options.items())},"
        if options
        else ""
    )
    if not torch.equal(whole.param.reshape(-1), torch.cat([piece.param for piece in pieces])):
        return (
            "its update of an element depends on other elements (cutting a small"
            f" {what}{with_options} changed the result)."
        )
    learned = next(
        (
            key
            for piece in pieces
            for key, value in whole.numbers.items()
            if not _same(value, piece.numbers.get(key))
        ),
        None,
    )
    if learned is not None:
        return (
            f"its update depends on what it sums over all elements ({learned} came out otherwise"
            f" for parts of a small {what})."
        )
    return None


def _split(t: torch.Tensor, cut: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    return t.reshape(-1).tensor_split(cut)


def _run(
    optimizer: Optimizer,
    start: torch.Tensor,
    grads: Sequence[torch.Tensor],
    options: dict[str, Any],
) -> _Trial:
    param = nn.Parameter(start.clone())
    trial: Any = type(optimizer)(
        [{"params": [param], **options}] if options else [param], **_arguments(optimizer)
    )
    if callable(getattr(trial, "train", None)):  # schedule-free optimizers have two modes
        trial.train()
    for grad in grads:
        param.grad = grad.clone()
        trial.step()
    group = {f"{key!r} of its groups": value for key, value in trial.param_groups[0].items()}
    state = {f"{key!r} of a parameter's state": value for key, value in trial.state[param].items()}
    return _Trial(
        param.detach(), {key: value for key, value in (group | state).items() if _is_number(value)}
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )


def _same(a: Any, b: Any) -> bool:
    same = a == b
    return b is not None and bool(same.all() if isinstance(same, torch.Tensor) else same)


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Return the constructor's arguments, as far as `optimizer.defaults` has them. The learning
    rate is replaced by one far from 0, with which the update shows.
    """
    known = inspect.signature(type(optimizer).__init__).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    arguments = {k: v for k, v in optimizer.defaults.items() if anything or k in known}
    if "lr" in arguments:
        arguments["lr"] = 0.05
    if arguments.get("capturable"):
        arguments["capturable"] = False
    return arguments
