"""Read and write a parameter's gradient, master weights and optimizer states.

The `full` functions work on whole tensors. They are collective: every rank must call them.
The `local` functions work on this rank's elements only, as a one-dimensional tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from onefold.optim.whole import optimizers_over
from onefold.runtime.parameters.interval import disable_torch_function, dress, spec_of
from onefold.runtime.parameters.operators.local import slice_of
from onefold.runtime.parameters.parameter import ShardedParameter


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the whole gradient in fp32, in the parameter's shape; None if there is none.

    Call it between `backward` and `step`, because `step` clears the gradients.
    """
    grad = param.grad
    if grad is None:
        return None
    spec = spec_of(grad)
    if spec is None:
        return grad.detach().float()
    with disable_torch_function():
        local = grad.detach().as_subclass(Tensor)
    return spec.gather(local, "safe_get_full_grad()").float()


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the whole parameter in fp32, gathered from its master weights; None if it is frozen,
    which has none.
    """
    if not param.requires_grad:
        return None
    if isinstance(param, ShardedParameter):
        whole: Tensor = param.onefold.gather()  # type: ignore[attr-defined]
        return whole.float()
    return param.detach().float()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a whole optimizer state in fp32; None before the first step.

    `optim_state_key` is the state's name, such as "exp_avg" or "exp_avg_sq".
    """
    held, spec = _state_of(param, optim_state_key), spec_of(param)
    if spec is None:
        return None if held is None else held.detach().float()
    with disable_torch_function():
        # A rank that owns no element of the parameter may have no state, so the ranks must agree
        # on whether any of them has one.
        known = spec.exchange(
            torch.tensor([float(held is not None)], device="cpu"), "optimizer states"
        )
        if not bool((known > 0).any()):
            return None
        local = torch.empty(0, device=param.device) if held is None else held.detach().float()
    return spec.gather(local.reshape(-1), f"the state {optim_state_key!r}")


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's elements of the gradient, in fp32."""
    grad = param.grad
    if grad is None:
        return None
    with disable_torch_function():
        return grad.detach().as_subclass(Tensor).reshape(-1).float()


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's elements of the master weights, in fp32; None if the parameter is frozen."""
    return local_fp32(param) if param.requires_grad else None


def local_fp32(param: nn.Parameter) -> Tensor:
    """Return this rank's elements of a parameter, in fp32; shape [their number]."""
    with disable_torch_function():
        return param.detach().as_subclass(Tensor).reshape(-1).float()


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's elements of an optimizer state, in fp32; None if there is none yet."""
    held = _state_of(param, optim_state_key)
    return None if held is None else held.detach().reshape(-1).float()


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the gradient from a whole tensor, which must be the same on every rank."""
    spec = spec_of(param)
    with disable_torch_function():
        held = param.dtype
    _check("safe_set_full_grad", param, value)
    param.grad = value.to(held) if spec is not None else value.to(param.dtype)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write the master weights from a whole tensor, which must be the same on every rank."""
    with disable_torch_function():
        held, device = param.dtype, param.device
    _check("safe_set_full_fp32_param", param, value)
    with torch.no_grad():
        param.data = value.to(device, held)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write an optimizer state from a whole tensor, which must be the same on every rank.

    Raises:
        ValueError: this rank owns elements of the parameter, but the optimizer has no such state
            yet.
    """
    _check("safe_set_full_optimizer_state", param, value)
    held, spec = _state_of(param, optim_state_key), spec_of(param)
    if spec is not None and spec.start == spec.stop:
        return
    if held is None:
        raise _no_state("safe_set_full_optimizer_state", optim_state_key)
    with torch.no_grad():
        mine = value if spec is None else slice_of(value, spec)
        held.copy_(mine.reshape(held.shape))


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
    if param.grad is None:
        raise ValueError(
            "safe_set_local_grad: the parameter has no gradient: call it between backward and step."
        )
    _write_local("safe_set_local_grad", param.grad, value)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's elements of the master weights."""
    _write_local("safe_set_local_fp32_param", param, value)


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Write this rank's elements of an optimizer state.

    Raises:
        ValueError: this rank owns elements of the parameter, but the optimizer has no such state
            yet.
    """
    held, spec = _state_of(param, optim_state_key), spec_of(param)
    if held is None and spec is not None and spec.start == spec.stop:
        return
    if held is None:
        raise _no_state("safe_set_local_optimizer_state", optim_state_key)
    _write_local("safe_set_local_optimizer_state", held, value)


def _write_local(call: str, held: Tensor, value: Tensor) -> None:
    spec = spec_of(held)
    with disable_torch_function():
        own, plain = held.detach().as_subclass(Tensor), value.detach().as_subclass(Tensor)
        if plain.numel() != own.numel():
            raise ValueError(
                f"{call} was given {plain.numel()} elements, expected the {own.numel()} that this"
                " rank has."
            )
        plain = plain.to(own.device, own.dtype)
        plain = plain.reshape(own.shape) if spec is None else plain.reshape(-1)
    with torch.no_grad():
        held.copy_(plain if spec is None else dress(plain, spec))


def _no_state(call: str, key: str) -> ValueError:
    return ValueError(
        f"{call}: there is no state {key!r} of this parameter; states come into being with the"
        " first step."
    )


def _check(call: str, param: nn.Parameter, value: Tensor) -> None:
    if value.shape != param.shape:
        raise ValueError(
            f"{call} was given shape {tuple(value.shape)}, expected {tuple(param.shape)}, the"
            " whole parameter's."
        )


def _state_of(param: nn.Parameter, key: str) -> Any:
    """Return the optimizer's state tensor of that name; None if there is none."""
    entry: Any = param.__dict__.get("_onefold_entry")
    known = entry() if entry is not None else None
    engine = known.engine() if known is not None else None
    for optimizer in optimizers_over(engine) if engine is not None else ():
        state = optimizer.state.get(param)
        if state is not None and isinstance(state.get(key), Tensor):
            return state[key]
    return None
