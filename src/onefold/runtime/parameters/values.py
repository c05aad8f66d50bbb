"""Reads and writes of `.grad` and `.data` of a sharded parameter by code outside the engine."""

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
    """Return `.grad` as code outside an optimizer's step sees it: an interval with the whole's
    shape.

    A rank that owns no element of a parameter has no gradient of it. If other ranks have one, this
    rank sees an empty interval: code such as gradient clipping then runs the same collectives on
    all ranks.
    """
    grad, spec = get_grad(param), spec_of(param)
    entry = param.__dict__["_onefold_entry"]()
    storage = getattr(entry.flat, "storage", None) if entry is not None else None
    if storage is not None:
        storage.gradient_seen(entry)
    if spec is None:
        return grad
    if grad is None:
        if entry is None or not entry.graded_elsewhere:
            return None
        if entry.flat.storage.gradients_on_disk:
            return storageless(param, f"the gradient of {spec.name!r}")
        return dress(torch.empty(0, dtype=param.dtype, device=param.device), spec.of("grad"))
    if isinstance(grad, Storageless):
        return grad
    if entry is not None and entry.pending_grad is grad:
        spec = IntervalSpec(spec.owners, spec.name, spec.first, spec.shape, True, "grad")
        return dress(grad.detach(), spec)
    return dress(grad.detach(), spec.of("grad"))


_nothing = torch.empty(0, device="cpu")


def dropped_grad(param: Any) -> torch.Tensor | None:
    """Return `.grad` for code that only drops it: the plain tensor, without an interval around it.

    If other ranks have a gradient and this one owns no element, that is an arbitrary empty tensor:
    the code must see that there is something to drop.
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
    # Every rank checks, also one that has no element of the parameter
    if spec is not None and shown is not None and shown.shape != spec.shape:
        raise ShardedParameterError(
            f"`.grad` of parameter {spec.name!r} was given shape {tuple(shown.shape)}, expected"
            f" {tuple(spec.shape)} (the whole's)."
        )
    if entry is not None and spec is not None:
        entry.graded_elsewhere = value is not None and spec.start == spec.stop
    if value is None or isinstance(value, Storageless):
        set_grad(param, value)
    elif spec is None:
        # What was made like the parameter has the dtype that it shows
        declared = param.__dict__["_onefold_declared"]
        set_grad(param, value.to(param.dtype) if value.dtype == declared else value)
    elif spec.start == spec.stop:
        set_grad(param, None)
    else:
        set_grad(param, _local_of(value, spec, "`.grad`").detach().to(param.dtype))


def give_data(param: Any, value: torch.Tensor) -> None:
    """Run `param.data = value`: copy the values. The parameter keeps its memory, which the engine
    refers to. See [Note: old data].

    Raises:
        ShardedParameterError: `value` has another shape, dtype or device.
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
        # The master may have more bits than `value`, which is in the declared dtype. Where `value`
        # equals the rounded master, the master stays: assigning back what was read changes nothing
        if local.dtype != param.dtype:
            local = torch.where(local == param.to(local.dtype), param, local.to(param.dtype))
        given_out = param.__dict__.get("_onefold_given_out")
        # A rank without elements of the parameter decides as the others do: the write counters must
        # agree on all ranks.
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
    """Run `param.data = value` in a forward pass, by code outside the unit that owns the parameter.

    The value goes to the whole parameter; runtime/stale.py copies it to the masters.

    Raises:
        ShardedParameterError: `value` has another shape, dtype or device.
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
    """Return this rank's elements of `value`, an interval or a plain tensor of the whole's shape.
    An interval of another cut is gathered, which is collective.

    Raises:
        ShardedParameterError: `value` has another shape.
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
    """Return `.data`. Writes through it do not raise the parameter's own version counter, so all
    tensors that are given out share another one, which `written` reads.
    """
    now, known = param.data, param.__dict__.get("_onefold_data")
    if (
        known is None
        or known.dtype != now.dtype
        or (known.data_ptr(), known.shape) != (now.data_ptr(), now.shape)
    ):
        # Keep the count of the previous view
        param.__dict__["_onefold_written"] = written(param) - param._version
        param.__dict__["_onefold_data"] = known = now
    return known.detach()


def written(param: torch.Tensor) -> int:
    """Return how often the memory of an optimizer's parameter was written to, by torch's version
    counters. Writes through `.data` count too.
    """
    known = param.__dict__.get("_onefold_data")
    through = 0 if known is None else known._version + param.__dict__["_onefold_written"]
    return param._version + through
