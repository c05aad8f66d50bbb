"""Which optimizers may step intervals of parameters, found out by trial.

An optimizer may, if its update of an element depends on that element alone. The trial steps a small
matrix, and the same matrix cut into pieces. The results, and every number that the optimizer keeps,
must be equal bit for bit. Optimizers with a factored second moment, or with a norm of a matrix or a
layer, fail. With intervals they would silently compute something else.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from onefold.runtime.parameters.interval import spec_of

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
