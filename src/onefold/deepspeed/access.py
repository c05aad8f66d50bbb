"""Read and write a parameter's gradient, master weights and optimizer states, wherever they are
stored.

| function | works on                                                                      | called by            |
|----------|-------------------------------------------------------------------------------|----------------------|
| `full`   | a copy of the whole, in the parameter's shape                                 | every rank, together |
| `local`  | this rank's elements, one-dimensional; it may have none                       | any rank             |

Each returns None for what does not exist: a gradient before `backward`, an optimizer state before
the first step, and the master weights of a frozen parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from onefold.optim.states import OptimizerParts, met
from onefold.runtime.flat import Entry
from onefold.runtime.parameters.interval import (
    disable_torch_function,
    dress,
    entry_of,
    owner_of,
    spec_of,
)
from onefold.runtime.parameters.parameter import ShardedParameter
from onefold.runtime.parameters.values import Elsewhere, Unreduced
from onefold.runtime.parts import MasterParts, master_items

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]
#: The optimizers of an engine: the one that `deepspeed.initialize` has made an engine with, or what
#: a search through all objects of Python has found.
_known: weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()


def note_optimizer(engine: Any, optimizer: Any) -> None:
    """Look for states of the engine's parameters in this optimizer."""
    _known[engine] = [weakref.ref(optimizer)]


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the whole gradient in fp32, in the parameter's shape; None if there is none.

    Call it between `backward` and `step`, because `step` clears the gradients. Where the gradient
    is not reduced yet (before the boundary, under `no_sync`), this is the rank's own.
    """
    grad = param.grad
    if grad is None:
        return None
    entry, engine = owner_of(param)
    if entry is not None and (own := engine.reduce.whole_waiting(entry)) is not None:
        found: Tensor = own.float()
        return found
    spec = spec_of(param)
    if spec is None:
        return grad.detach().to(torch.float32, copy=True)
    return spec.gather(_gradient(param, grad).to(param.device), "safe_get_full_grad()").float()


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the whole parameter in fp32, gathered from its master weights; None if it is frozen,
    because then no optimizer keeps master weights of it.
    """
    if not param.requires_grad:
        return None
    if isinstance(param, ShardedParameter):
        whole: Tensor = param.onefold.gather()  # type: ignore[attr-defined]
        return whole.float()
    return param.detach().to(torch.float32, copy=True)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a whole optimizer state in fp32; None before the first step.

    `optim_state_key` is the state's name, such as "exp_avg" or "exp_avg_sq".
    """
    held, spec = _state_of(param, optim_state_key), spec_of(param)
    if spec is None:
        return None if held is None else held.to(torch.float32, copy=True).view(param.shape)
    with disable_torch_function():
        # A rank that owns no element of the parameter may have no state, so the ranks must agree
        # on whether any of them has one.
        known = spec.exchange(
            torch.tensor([float(held is not None)], device="cpu"), "optimizer states"
        )
        if not bool((known > 0).any()):
            return None
    local = torch.empty(0, device="cpu") if held is None else held.float()
    return spec.gather(local.to(param.device), f"the state {optim_state_key!r}")


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's elements of the gradient, in fp32."""
    grad = param.grad
    return None if grad is None else _gradient(param, grad).float()


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's elements of the master weights, in fp32; None if the parameter is frozen."""
    return _masters(param).float() if param.requires_grad else None


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's elements of an optimizer state, in fp32; None if there is none yet.

    A rank that has no element of the parameter gets an empty tensor once the optimizer has such
    states of other parameters.
    """
    held, spec, (entry, engine) = _state_of(param, optim_state_key), spec_of(param), owner_of(param)
    if held is not None:
        return held.float()
    if entry is None or spec is None or spec.start < spec.stop or not param.requires_grad:
        return None
    with disable_torch_function():
        others = (s for o in _optimizers_of(engine, entry.param) for s in o.state.values())
        stepped = any(optim_state_key in state for state in others)
    return torch.empty(0, device=param.device) if stepped else None


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the gradient from a whole tensor, which must be the same on every rank."""
    mine = _piece("safe_set_full_grad", param, value)
    if isinstance(param.grad, Elsewhere):
        if mine.numel():
            safe_set_local_grad(param, mine)
        return
    with disable_torch_function():
        held = param.dtype
    param.grad = value.to(held, copy=True)  # later changes of `value` must not reach it


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write the master weights from a whole tensor, which must be the same on every rank."""
    safe_set_local_fp32_param(param, _piece("safe_set_full_fp32_param", param, value))


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write an optimizer state from a whole tensor, which must be the same on every rank.

    Raises:
        ValueError: this rank owns elements of the parameter, but the optimizer has no such state
            yet.
    """
    mine = _piece("safe_set_full_optimizer_state", param, value)
    safe_set_local_optimizer_state(param, mine, optim_state_key)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace each whole gradient by `update_func(gradient, parameter)`.

    Parameters without a gradient are skipped. `update_func` must return the same on every rank.
    """
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's elements of the gradient.

    Raises:
        ValueError: there is no gradient, or `value` has another number of elements.
    """
    grad = param.grad
    if grad is None:
        raise ValueError(
            "safe_set_local_grad: the parameter has no gradient: call it between backward and step."
        )
    if isinstance(grad, Elsewhere):
        entry = _on_disk(param, grad)
        start, stop = entry.owned()
        mine = _fitting("safe_set_local_grad", value, stop - start)
        entry.flat.storage.write_gradient(entry, mine)
    else:
        _copy_into("safe_set_local_grad", grad, value)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's elements of the master weights.

    Raises:
        ValueError: `value` has another number of elements.
    """
    entry = entry_of(param)
    if entry is not None and not entry.flat.storage.in_place:
        _write_masters("safe_set_local_fp32_param", entry, value)
        return
    _copy_into("safe_set_local_fp32_param", param, value)


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Write this rank's elements of an optimizer state.

    Raises:
        ValueError: this rank owns elements of the parameter, but the optimizer has no such state
            yet.
    """
    call, (entry, _) = "safe_set_local_optimizer_state", owner_of(param)
    parts, spec = _parts_with(param, optim_state_key), spec_of(param)
    plain = _plain_state(param, optim_state_key) if spec is None else None
    if plain is not None:
        _copy_into(call, plain, value)
    elif parts is not None and entry is not None:
        start, stop = entry.owned()
        with torch.no_grad(), disable_torch_function():
            mine = _fitting(call, value, stop - start)
            parts.store(entry, optim_state_key, start, stop, mine)
    elif spec is None or spec.start < spec.stop:
        raise ValueError(
            f"there is no state {optim_state_key!r} of this parameter; states come into being with"
            " the first step."
        )


# -- this rank's elements --------------------------------------------------------------------------


def _masters(param: nn.Parameter) -> Tensor:
    """Return this rank's elements of the master weights."""
    entry = entry_of(param)
    with disable_torch_function():
        if entry is None or spec_of(param) is None:
            return param.detach().as_subclass(Tensor).reshape(-1)
        return MasterParts().values(entry, "", *entry.owned())


def _state_of(param: nn.Parameter, key: str) -> Tensor | None:
    """Return this rank's elements of the optimizer's state of that name; None if there is none."""
    entry, _ = owner_of(param)
    if entry is None:
        plain = _plain_state(param, key)
        return None if plain is None else plain.detach().reshape(-1)
    parts = _parts_with(param, key)
    with disable_torch_function():
        return None if parts is None else parts.stored(entry, key, *entry.owned())


def _parts_with(param: nn.Parameter, key: str) -> OptimizerParts | None:
    """Return the parts of the optimizer that has a state of that name for a sharded parameter."""
    entry, engine = owner_of(param)
    with disable_torch_function():
        for optimizer in () if entry is None else _optimizers_of(engine, entry.param):
            state = optimizer.state.get(entry.param)
            if state is not None and isinstance(state.get(key), Tensor):
                return OptimizerParts(optimizer)
    return None


def _plain_state(param: nn.Parameter, key: str) -> Tensor | None:
    """Return the state of a parameter that is whole, as on one process in fp32, in its shape."""
    known = [o for refs in list(_known.values()) for ref in refs if (o := ref()) is not None]
    states = [optimizer.state[param] for optimizer in known if param in optimizer.state]
    return next((s[key] for s in states if isinstance(s.get(key), Tensor)), None)


def _optimizers_of(engine: Any, param: nn.Parameter) -> list[Any]:
    known = [o for ref in _known.get(engine, ()) if (o := ref()) is not None]
    if not any(p is param for o in known for group in o.param_groups for p in group["params"]):
        mine = {id(entry.param) for entry in engine.entries}
        known = [o for o in met if any(id(p) in mine for g in o.param_groups for p in g["params"])]
        _known[engine] = [weakref.ref(o) for o in known]
    return known


def _gradient(param: nn.Parameter, grad: Tensor) -> Tensor:
    """Return this rank's elements of a gradient that `param.grad` shows."""
    if isinstance(grad, Unreduced):
        return grad.own
    if not isinstance(grad, Elsewhere):
        with disable_torch_function():
            return grad.detach().as_subclass(Tensor).reshape(-1)
    return _on_disk(param, grad).flat.storage.read_gradient(_on_disk(param, grad))


def _on_disk(param: nn.Parameter, grad: Tensor) -> Entry:
    """Return the entry of a parameter whose gradient is on NVMe.

    Raises:
        StoragelessError: the gradient has no elements here for another reason.
    """
    entry = entry_of(param)
    if entry is None or not entry.flat.storage.gradients_on_disk:
        grad.float()  # raises
    assert entry is not None
    return entry


def _write_masters(call: str, entry: Entry, value: Tensor) -> None:
    """Write this rank's elements of master weights that are on NVMe."""
    engine: Any = entry.engine()
    if not entry.flat.storage.on_disk:
        raise NotImplementedError(
            f"{call}: parameter {entry.slot.name!r} is stored encoded, and is not written to."
        )
    start, stop = entry.owned()
    mine = _fitting(call, value, stop - start)
    engine.wait_before_write(entry.flat)
    parts, (item,) = MasterParts(), master_items([entry])
    with torch.no_grad(), disable_torch_function():
        parts.write(item, start, stop, mine)
    parts.finish()
    engine.make_stale()


def _fitting(call: str, value: Tensor, numel: int) -> Tensor:
    """Return `value` as a plain one-dimensional tensor.

    Raises:
        ValueError: it has not `numel` elements.
    """
    with disable_torch_function():
        plain = value.detach().as_subclass(Tensor).reshape(-1)
    if plain.numel() != numel:
        raise ValueError(
            f"{call} was given {plain.numel()} elements, expected the {numel} that this rank has."
        )
    return plain


def _piece(call: str, param: nn.Parameter, value: Tensor) -> Tensor:
    """Return this rank's elements of a whole tensor."""
    if value.shape != param.shape:
        raise ValueError(
            f"{call} was given shape {tuple(value.shape)}, expected {tuple(param.shape)}, the"
            " whole parameter's."
        )
    spec = spec_of(param)
    return value.reshape(-1) if spec is None else spec.piece(value)


def _copy_into(call: str, held: Tensor, value: Tensor) -> None:
    """Copy this rank's elements into a parameter, a gradient or a state that is in memory."""
    spec = spec_of(held)
    with disable_torch_function():
        own = held.detach().as_subclass(Tensor)
        plain = _fitting(call, value, own.numel()).to(own.device, own.dtype)
        plain = plain.reshape(own.shape) if spec is None else plain
    with torch.no_grad():
        held.copy_(plain if spec is None else dress(plain, spec))
