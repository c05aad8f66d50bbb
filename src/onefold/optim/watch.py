"""What stands between an optimizer and sharded parameters: nothing, but for two looks around each step.

Before: an optimizer whose update of one element depends on others (a factored second moment, a matrix, a layer's norm) would train
on something else when it is given intervals. It is recognised by trying it: the update of a small matrix must equal, bit for bit,
the update of its elements cut into pieces. After: kept copies of the parameters are stale.

torch's own step hooks are used; they are registered while an engine lives and removed with the last one.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.parameter import whole_sight

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_handles: list[Any] = []
_verdicts: weakref.WeakKeyDictionary[Optimizer, str | None] = weakref.WeakKeyDictionary()


def watch(engine: Engine) -> None:
    """Look around the steps of optimizers over this engine's parameters, until it closes."""
    _engines.add(engine)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before))
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
            entry = getattr(param, "_onefold_entry", lambda: None)()
            if entry is not None and (engine := entry.engine()) is not None:
                found.setdefault(engine, []).append(entry)
    return found


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with whole_sight():
        for engine in [e for e in _engines if e.failure is not None and e.passive]:  # its parameters bear no mark
            mine = {id(entry.param) for entry in engine.entries}
            if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
                engine.tell_failure()
        for engine in _entries_of(optimizer):
            engine.optimizer_is_stepping()
            if engine.recipe.elementwise_optimizer is not True and not all(f.whole_master for u in engine.units for f in u.flats):
                refuse_unless_elementwise(optimizer)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with whole_sight():
        for engine, entries in _entries_of(optimizer).items():
            engine.optimizer_has_stepped(entries)


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
            f"{type(optimizer).__name__} cannot step sharded parameters: {verdict} Stages 1 to 3 give the optimizer one interval "
            "of each parameter, which serves updates that treat every element alike (SGD, Adam, AdamW, Adagrad, RMSprop, Lion, ...). "
            "Use stage 0, or one of those; if you know the update to be element-wise, give the recipe elementwise_optimizer=True."
        )


def _probe(optimizer: Optimizer) -> str | None:
    """None if element-wise, else what was seen."""
    device = next((p.device for g in optimizer.param_groups for p in g["params"]), torch.device("cpu"))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(16, 24, generator=generator).to(device)
        grads = [torch.randn(16, 24, generator=generator).to(device) for _ in range(3)]
        try:
            whole = _run(optimizer, [start], [[g] for g in grads])
        except Exception as error:
            return f"its constructor or step could not be tried on a small matrix ({type(error).__name__}: {error})."
        try:
            cut = (128, 256)
            pieces = _run(optimizer, list(_split(start, cut)), [list(_split(g, cut)) for g in grads])
        except Exception as error:
            return f"its step does not work on one-dimensional pieces ({type(error).__name__}: {error})."
    if not torch.equal(torch.cat([p.reshape(-1) for p in whole]), torch.cat(pieces)):
        return "its update of an element depends on other elements of the same parameter (cutting a small matrix changed the result)."
    return None


def _split(t: torch.Tensor, cut: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    return t.reshape(-1).tensor_split(cut)


def _run(optimizer: Optimizer, starts: list[torch.Tensor], grads: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    params = [nn.Parameter(s.clone()) for s in starts]
    trial = type(optimizer)(params, **_arguments(optimizer))
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        trial.step()
    return [p.detach() for p in params]


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Its constructor's arguments as far as its defaults say; a learning rate far from 0 so that the update shows."""
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
