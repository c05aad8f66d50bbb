"""What stands between an optimizer and sharded parameters: nothing, but for two looks around each
step.

Before: what rests off the device or in another format is stepped (runtime/steps.py), and its
gradients are put aside, so that the step itself does the rest.
Before that: an optimizer whose update of one element depends on others (a factored second moment, a
matrix, a layer's norm) would train on something else when it is given intervals. It is recognised
by trying it: the update of a small matrix must equal, bit for bit, the update of its elements cut
into pieces, and so must every number that it keeps. After: resident copies of the parameters are stale.

[Note: bare parameters] For the time of the step sharded parameters are plain `nn.Parameter`s over
this rank's elements (their class is changed, the objects stay): optimizers see plain intervals,
choose their fast implementations, and pay nothing for attributes. Outside they keep the face of the
whole, for hooks of the user's own around the step and inside a closure too. A step that raises
never comes to
its end: what holds the step's arguments (`_Arguments`) goes with it, and gives the faces back.

torch's own step hooks are used; they are registered while an engine lives and removed with the last
one.
"""

from __future__ import annotations

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

import onefold.optim.whole_state as whole_state
from onefold.optim import whole
from onefold.runtime.engine import Engine
from onefold.runtime.entry import Entry
from onefold.runtime.implementations import Chosen
from onefold.runtime.interval import spec_of
from onefold.runtime.operators import Stepping
from onefold.runtime.parameter import bare, disable_torch_function, face

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_handles: list[Any] = []
_aside: weakref.WeakKeyDictionary[Optimizer, list[tuple[torch.Tensor, torch.Tensor | None]]] = (
    weakref.WeakKeyDictionary()
)
_bare: weakref.WeakKeyDictionary[Optimizer, weakref.ref[_Bare]] = weakref.WeakKeyDictionary()
_verdicts: weakref.WeakKeyDictionary[Optimizer, str | None] = weakref.WeakKeyDictionary()


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
                and (engine := entry.engine()) is not None
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
            if e.unsharded and (e.progress.failure is not None or e.copying is not None)
        ]:
            mine = {id(entry.param) for entry in engine.entries}
            if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
                engine.about_to_write()
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


def refuse_unless_elementwise(optimizer: Optimizer) -> None:
    """Raise if the optimizer's update is not element-wise.

    Raises:
        ValueError: it is not, or that could not be found out.
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
    """None if element-wise, else what was seen."""
    device = next(
        (p.device for g in optimizer.param_groups for p in g["params"]), torch.device("cpu")
    )
    apart = (
        {"devices": [device], "device_type": device.type}
        if device.type != "cpu"
        else {"devices": []}
    )
    with torch.random.fork_rng(**apart), torch.enable_grad():
        # Some look at whole matrices only where these are large
        for shape in ((16, 24), (160, 144)):
            if said := _try(optimizer, shape, {}, device):
                return said
        for dims, options in _kinds_of(optimizer):
            # A group's own option, or what convolutions have more of than matrices, may be what
            # makes an update look at its neighbours.
            if said := _try(
                optimizer,
                (16, 24) if dims == 2 else (*(2,) * (dims - 3), 8, 6, 16),
                options,
                device,
            ):
                return said
    return None


def _kinds_of(optimizer: Optimizer) -> list[tuple[int, dict[str, Any]]]:
    """(number of dimensions, the group's own options) of what the optimizer steps, each kind once,
    but for plain matrices.
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
        # How strong a decay is, and for how many groups, makes no difference of kind.
        key = repr(sorted((k, v != 0 if k == "weight_decay" else v) for k, v in own.items()))
        for p in group["params"]:
            dims = max(2, len((spec_of(p) or p).shape))
            if own or dims > 2:
                found.setdefault((dims, key), (dims, own))
    return list(found.values())


#: Steps of a trial. An optimizer may begin with steps of a millionth (Prodigy), so its numbers are
#: compared besides.
_TRIED = 4


@dataclass
class _Trial:
    """What a trial came to: the parameter, and every number that the optimizer keeps of it or of
    its group.
    """

    param: torch.Tensor
    numbers: dict[str, Any]


def _try(
    optimizer: Optimizer, shape: tuple[int, ...], options: dict[str, Any], device: torch.device
) -> str | None:
    """Whether the steps of a parameter of this shape are those of its parts, which are cut where
    vectors of a processor end.
    """
    generator, numel = torch.Generator().manual_seed(0), prod(shape)
    start, way = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    # They point one way more or less, as in training: what looks for a distance to go finds one.
    grads = [way + 0.3 * torch.randn(shape, generator=generator).to(device) for _ in range(_TRIED)]
    try:
        whole = _run(optimizer, start, grads, options)
    except Exception as error:
        if options:  # a group may have what only its own parameters know what to do with
            return None
        return (
            f"its constructor or step could not be tried on a small matrix ({type(error).__name__}:"
            f" {error})."
        )
    try:
        cut = (numel // 3 // 128 * 128, 2 * numel // 3 // 128 * 128)
        # Each by an optimizer of its own, as each rank has one: what it learns of all its
        # parameters, the others do not know.
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
    if callable(getattr(trial, "train", None)):  # schedule-free ones are in one of two modes
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
    return b is not None and bool(torch.as_tensor(a == b).all())


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Its constructor's arguments as far as its defaults say; a learning rate far from 0 so that
    the update shows.
    """
    import inspect

    known = inspect.signature(type(optimizer).__init__).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    arguments = {k: v for k, v in optimizer.defaults.items() if anything or k in known}
    for name in ("lr",):
        if name in arguments:
            arguments[name] = 0.05
    if arguments.get("capturable"):
        arguments["capturable"] = False
    return arguments
