"""The values of a sharded parameter from outside: `.grad` and `.data`, seen, given and dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onefold.runtime.parameters.interval import (
    IntervalSpec,
    ShardedParameterError,
    dress,
    get_grad,
    set_grad,
    spec_of,
)
from onefold.runtime.parameters.operators import slice_of
from onefold.runtime.parameters.storageless import Storageless, storageless

if TYPE_CHECKING:
    from onefold.runtime.entry import Entry
    from onefold.runtime.parameters.parameter import ShardInfo


def before_write(param: Any, seen: bool) -> None:
    """See `MasterAccess.before_write`."""
    entry = param.__dict__["_onefold_entry"]()
    if entry is not None and (engine := entry.engine()) is not None:
        engine.masters.before_write(entry.flat, seen)


def seen_grad(param: Any) -> torch.Tensor | None:
    """`.grad` as code outside an optimizer's step sees it: an interval with the face of the whole.

    A rank that owns nothing of a parameter has no gradient of it; it sees an empty interval where
    other ranks have one, so that all ranks come to the same reductions.
    """
    grad, spec = get_grad(param), spec_of(param)
    if spec is None:
        return grad
    entry = param.__dict__["_onefold_entry"]()
    if grad is None:
        if entry is None or not entry.graded_elsewhere:
            return None
        if entry.flat.storage.gradients_on_disk:
            return storageless(param, f"the gradient of {spec.name!r}")
        return dress(torch.empty(0, dtype=param.dtype, device=param.device), spec)
    if isinstance(grad, Storageless):
        return grad
    if entry is not None and entry.unreduced is grad:
        spec = IntervalSpec(spec.owners, spec.name, spec.first, spec.shape, unreduced=True)
    return dress(grad.detach(), spec)


_nothing = torch.empty(0)


def dropped_grad(param: Any) -> torch.Tensor | None:
    """`.grad` for who only drops it: any tensor where other ranks have a gradient and this one owns
    nothing.
    """
    own: torch.Tensor | None = get_grad(param)
    if (
        own is None
        and (entry := param.__dict__["_onefold_entry"]()) is not None
        and entry.graded_elsewhere
    ):
        return _nothing
    return own


def give_grad(param: Any, value: torch.Tensor | None) -> None:
    if value is None and (entry := param.__dict__["_onefold_entry"]()) is not None:
        entry.graded_elsewhere = False
        set_grad(param, None)
        return
    spec, entry = spec_of(param), param.__dict__["_onefold_entry"]()
    shown = None if value is None or isinstance(value, Storageless) else spec_of(value) or value
    # On every rank, also where it has no element
    if spec is not None and shown is not None and shown.shape != spec.shape:
        raise ShardedParameterError(
            f"`.grad` of parameter {spec.name!r} was given shape {tuple(shown.shape)}, expected"
            f" {tuple(spec.shape)} (the whole's)."
        )
    if entry is not None and spec is not None:
        entry.graded_elsewhere = value is not None and spec.start == spec.stop
    if spec is None or value is None or isinstance(value, Storageless):
        set_grad(param, value)
    elif spec.start == spec.stop:
        set_grad(param, None)
    else:
        set_grad(param, _local_of(value, spec, "`.grad`").detach().to(param.dtype))


def give_data(param: Any, value: torch.Tensor) -> None:
    """`param.data = value`: the values are taken over; the memory stays where the engine expects
    it. See [Note: old data].

    Raises:
        ShardedParameterError: another dtype or device.
    """
    info: ShardInfo = param.__dict__["onefold"]
    if (
        value.dtype not in (param.dtype, param.__dict__["_onefold_declared"])
        or value.device != param.device
    ):
        raise ShardedParameterError(
            f"parameter {info.name!r}, in {param.dtype} on {param.device}, was given data of"
            f" {value.dtype} on {value.device}: the model was moved or cast after shard() (.to(),"
            " .half(), .cuda(), assigning .data). Do that before shard(), or give shard() a device"
            " and the recipe a precision."
        )
    before_write(param, seen=False)
    spec = spec_of(param)
    with torch.no_grad():
        local = value if spec is None else _local_of(value, spec, "`.data`")
        if spec is None and tuple(value.shape) != tuple(info.shape):
            raise ShardedParameterError(
                f"parameter {info.name!r} of shape {tuple(info.shape)} was given data of shape"
                f" {tuple(value.shape)}, expected the same."
            )
        # Masters that are given back as the model shows them stay what they are
        if local.dtype != param.dtype:
            local = torch.where(local == param.to(local.dtype), param, local.to(param.dtype))
        given_out = param.__dict__.get("_onefold_given_out")
        # A rank that has no element of it writes too: ranks must agree on what has been written.
        same = (
            local.data_ptr() == param.data_ptr()
            if local.numel()
            else given_out is not None and value.__dict__.get("_onefold_given_out") is given_out
        )
        if not same:
            if given_out is not None:
                local = (
                    local.clone()
                    if local.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()
                    else local
                )
                given_out.move_away(param)
            param.copy_(local)


def give_whole(entry: Entry, whole: nn.Parameter, value: torch.Tensor) -> None:
    """`param.data = value` in a forward pass, by code that does not own the parameter:
    runtime/stale.py keeps what is written.

    Raises:
        ShardedParameterError: another shape, dtype or device.
    """
    if (spec := spec_of(value)) is not None:
        value = spec.gather(value.detach(), "`.data =`")
    now, given = ((tuple(t.shape), t.dtype, t.device) for t in (whole, value))
    if now != given:
        raise ShardedParameterError(
            f"parameter {entry.slot.name!r} was given data of shape {given[0]} in {given[1]} on"
            f" {given[2]} in a forward pass, expected shape {now[0]} in {now[1]} on {now[2]}. To"
            " change its shape or dtype assign inside `with onefold.unsharded(model):`."
        )
    whole.data = value.detach()


def _local_of(value: torch.Tensor, spec: IntervalSpec, what: str) -> torch.Tensor:
    """This rank's elements of `value`: an interval of the same cut, or a plain tensor of the
    whole's shape.

    Raises:
        ShardedParameterError: it is neither.
    """
    theirs = spec_of(value)
    if theirs is not None and theirs.shape == spec.shape:
        return (
            value.detach()
            if theirs.same_cut(spec)
            else slice_of(theirs.gather(value.detach(), what), spec)
        )
    if theirs is None and value.shape == spec.shape:
        return slice_of(value, spec).clone()
    shape = tuple(theirs.shape if theirs is not None else value.shape)
    raise ShardedParameterError(
        f"{what} of parameter {spec.name!r} was given shape {shape}, expected {tuple(spec.shape)}"
        " (the whole's)."
    )


def seen_data(param: Any) -> torch.Tensor:
    """`.data`: writes to it leave the parameter's own version counter alone, so all that are given
    out share one that `written` reads.
    """
    now, known = param.data, param.__dict__.get("_onefold_data")
    if (
        known is None
        or known.dtype != now.dtype
        or (known.data_ptr(), known.shape) != (now.data_ptr(), now.shape)
    ):
        # What the view before counted
        param.__dict__["_onefold_written"] = written(param) - param._version
        param.__dict__["_onefold_data"] = known = now
    return known.detach()


def written(param: torch.Tensor) -> int:
    """How often the memory of an optimizer's parameter was written to, as far as counters tell:
    also through `.data`.
    """
    known = param.__dict__.get("_onefold_data")
    through = 0 if known is None else known._version + param.__dict__["_onefold_written"]
    return param._version + through
