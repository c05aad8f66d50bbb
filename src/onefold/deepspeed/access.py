"""Read and write a parameter's gradient, master weights and optimizer states, wherever they are
stored.

| function | works on                                                                      | called by            |
|----------|-------------------------------------------------------------------------------|----------------------|
| `full`   | a copy of the whole, in the parameter's shape                                 | every rank, together |
| `local`  | this rank's elements, one-dimensional; it may have none                       | any rank             |

`get` returns fp32, and None for what does not exist: a gradient before `backward`, an optimizer state
before the first step, and the master weights of a frozen parameter. `set` raises ValueError there,
and for a value of another size. What a full function writes must be the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onefold.optim.states import OptimizerParts, met
from onefold.runtime.parameters.interval import (
    disable_torch_function,
    owner_of,
    spec_of,
)
from onefold.runtime.parameters.values import Elsewhere, Unreduced, refined, unreduced_error
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
#: What is asked for, besides the keys of optimizer states; and how messages call it.
_GRADIENT, _MASTERS, VALUES = ".grad", "", ".data"
_SAID = {_GRADIENT: "the gradient", _MASTERS: "the master weights", VALUES: "the values"}


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradients of a step are there until the next pass. Where the gradient is not reduced yet
    (before the boundary, under `no_sync`), this is the rank's own.
    """
    entry, engine = owner_of(param)
    if entry is not None and (own := engine.reduce.whole_waiting(entry)) is not None:
        found: Tensor = own.float()
        return found
    return _whole(param, _GRADIENT, _held(param, _GRADIENT))


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    return _whole(param, _MASTERS, _held(param, _MASTERS))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """`optim_state_key` is the state's name, such as "exp_avg" or "exp_avg_sq"."""
    held, spec = _held(param, optim_state_key), spec_of(param)
    if spec is not None:
        # A rank that owns no element of the parameter may have no state, so the ranks must agree
        # on whether any of them has one.
        mine = torch.tensor([float(held is not None)], device="cpu")
        with disable_torch_function():
            if bool((spec.exchange(mine, "optimizer states") > 0).any()) and held is None:
                held = torch.empty(0, device="cpu")
    return _whole(param, optim_state_key, held)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A rank that has no element of the parameter gets an empty tensor once the optimizer has such
    states of other parameters.
    """
    found = _local(param, optim_state_key)
    if found is None and _is_elsewhere(param) and param.requires_grad:
        others = (s for o in _optimizers_of(param) for s in o.state.values())
        if any(optim_state_key in state for state in others):
            return torch.empty(0, device=param.device)
    return found


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    overwrite(param, optim_state_key, piece(param, value))


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


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    overwrite(param, optim_state_key, value)


#: Called with the same arguments as the functions of optimizer states, without the key.
safe_get_local_grad = partial(safe_get_local_optimizer_state, optim_state_key=_GRADIENT)
safe_get_local_fp32_param = partial(safe_get_local_optimizer_state, optim_state_key=_MASTERS)
safe_set_local_grad = partial(safe_set_local_optimizer_state, optim_state_key=_GRADIENT)
safe_set_local_fp32_param = partial(safe_set_local_optimizer_state, optim_state_key=_MASTERS)
safe_set_full_grad = partial(safe_set_full_optimizer_state, optim_state_key=_GRADIENT)
safe_set_full_fp32_param = partial(safe_set_full_optimizer_state, optim_state_key=_MASTERS)


# -- this rank's elements --------------------------------------------------------------------------


def _held(param: nn.Parameter, what: str) -> Tensor | None:
    """Return this rank's elements, in a shape of their own; None if there are none.

    Raises:
        StoragelessError: the gradient has no elements here.
    """
    entry, _ = owner_of(param)
    held: Any = param.grad if what == _GRADIENT else param
    if what == _MASTERS and not param.requires_grad:
        return None
    if isinstance(held, Unreduced):
        return held.own
    if isinstance(held, Elsewhere):
        if entry is None or not entry.flat.storage.gradients_on_disk:
            held.float()  # raises
        there: Tensor = entry.flat.storage.read_gradient(entry)
        return there
    with disable_torch_function():
        if what in (_MASTERS, VALUES) and entry is not None:
            return MasterParts().values(entry, "", *entry.owned())
        if what in _SAID:
            return None if held is None else held.detach().as_subclass(Tensor)
        divided = entry is not None and not entry.flat.whole_master
        if divided and any(OptimizerParts(o).owned(entry) for o in _optimizers_of(param)):
            raise NotImplementedError(
                f"the state {what!r} of {entry.name!r} is whole on the rank that steps this matrix,"
                " and is not read or written by parts: call optimizer.state_dict() on every rank,"
                " which returns whole states on the first."
            )
        optimizer = _with_state(param, what)
        if optimizer is None:
            return None
        if entry is None:  # whole, as on one process in fp32
            return optimizer.state[param][what].detach()
        return OptimizerParts(optimizer).stored(entry, what, *entry.owned())


def _is_elsewhere(param: nn.Parameter) -> bool:
    """Whether only other ranks have elements of the parameter."""
    spec = spec_of(param)
    return spec is not None and spec.start == spec.stop


def _optimizers_of(param: nn.Parameter) -> list[Any]:
    """Return the optimizers that step a parameter, the newest first."""
    return [
        optimizer
        for optimizer in reversed([*met])
        if any(p is param for group in optimizer.param_groups for p in group["params"])
    ]


def _with_state(param: nn.Parameter, key: str) -> Any:
    """Return the optimizer that has a state of that name for the parameter, or None."""
    every = _optimizers_of(param)
    return next((o for o in every if isinstance(o.state.get(param, {}).get(key), Tensor)), None)


def _local(param: nn.Parameter, what: str) -> Tensor | None:
    held = _held(param, what)
    with disable_torch_function():
        return None if held is None else held.float().reshape(-1)


def _whole(param: nn.Parameter, what: str, held: Tensor | None) -> Tensor | None:
    """Return all elements, of which this rank has `held`. None if it has none."""
    spec = spec_of(param)
    if held is None:
        return None
    with disable_torch_function():
        if spec is None:
            return held.to(torch.float32, copy=True).view(param.shape)
        local = held.reshape(-1).to(param.device)
        return spec.gather(local, _SAID.get(what, f"the state {what!r}")).float()


def piece(param: nn.Parameter, value: Tensor) -> Tensor:
    """Return this rank's elements of a whole tensor."""
    if value.shape != param.shape:
        raise ValueError(
            f"a value of shape {tuple(value.shape)} was given, expected the whole parameter's,"
            f" {tuple(param.shape)}."
        )
    spec = spec_of(param)
    return value.reshape(-1) if spec is None else spec.piece(value)


def overwrite(param: nn.Parameter, what: str, value: Tensor) -> None:
    """Overwrite this rank's elements by `value`, of any shape and dtype.

    Raises:
        ValueError: they do not exist, or `value` has another number of elements.
    """
    held, (entry, engine) = _held(param, what), owner_of(param)
    if what == _GRADIENT and isinstance(param.grad, Unreduced):
        raise unreduced_error("safe_set_full_grad or safe_set_local_grad", entry.slot.name)
    on_disk = what == _GRADIENT and isinstance(param.grad, Elsewhere)
    if held is None and what != _MASTERS and _is_elsewhere(param):
        return
    if held is None:
        raise ValueError(
            f"this parameter has no {what or 'master weights'}: gradients are there between"
            " backward and step, states of the optimizer from the first step on."
        )
    with torch.no_grad(), disable_torch_function():
        mine = value.detach().as_subclass(Tensor).reshape(-1)
        if mine.numel() != held.numel():
            raise ValueError(
                f"{mine.numel()} elements were given, expected the {held.numel()} that this rank has."
            )
        x, y = (0, 0) if entry is None else entry.owned()
        if entry is None or (what == _GRADIENT and not on_disk):
            held.copy_(mine.view(held.shape))
        elif on_disk:
            entry.flat.storage.write_gradient(entry, mine)
        elif what in _SAID:
            engine.wait_before_write(entry.flat)
            parts, (item,) = MasterParts(), master_items([entry])
            if what == VALUES:  # they may have been gathered in the compute dtype
                mine = refined(held, mine)
            parts.write(item, x, y, mine)
            parts.finish()
            engine.make_stale()
        else:
            OptimizerParts(_with_state(param, what)).store(entry, what, x, y, mine)
