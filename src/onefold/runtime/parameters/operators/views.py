"""Views and indexing of intervals."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from onefold.runtime.parameters.interval import IntervalSpec, dress, spec_of
from onefold.runtime.parameters.operators.local import broadcast_shape, elementwise, given_out
from onefold.runtime.parameters.operators.names import LEAF
from onefold.runtime.parameters.operators.refusals import refusal
from onefold.runtime.parameters.operators.whole import read_whole, whole_of, write_whole


def view_of(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return a view of an interval as an interval. Its elements must keep their order.

    The view is first made of a meta tensor of the whole's shape, which tells where its elements
    are.
    """
    spec = spec_of(args[0])
    meta = [_meta(a) for a in args]
    if spec is None:
        if name not in ("view_as", "reshape_as"):  # sizes or indices given as an interval
            return func(*whole_of(args, name), **whole_of(kwargs, name))
        return func(args[0], *meta[1:], **{k: _meta(v) for k, v in kwargs.items()})
    if any(map(spec_of, (*args[1:], *kwargs.values()))) and name not in ("view_as", "reshape_as"):
        args, kwargs = (args[0], *whole_of(args[1:], name)), whole_of(kwargs, name)
        meta = [meta[0], *args[1:]]
    return _cut_as(
        func(*meta, **{k: _meta(v) for k, v in kwargs.items()}),
        args[0],
        spec,
        func,
        name,
        args,
        kwargs,
    )


def expanded(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "broadcast_tensors":
        tensors = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        shape = broadcast_shape(tensors)
        if shape is not None:
            return tuple(expanded(torch.Tensor.expand, "expand", (t, shape), {}) for t in tensors)
    spec = spec_of(args[0]) if args else None
    if spec is not None and name != "meshgrid":
        seen = func(*map(_meta, args), **{k: _meta(v) for k, v in kwargs.items()})
        if seen.numel() == spec.numel:  # no element repeats, so writes must reach the parameter
            return _cut_as(seen, args[0], spec, func, name, args, kwargs)
    return read_whole(func, name, args, kwargs)


def _meta(value: Any) -> Any:
    spec = spec_of(value)
    return value if spec is None else torch.empty(spec.shape, dtype=value.dtype, device="meta")


def _cut_as(
    seen: Any, local: torch.Tensor, spec: IntervalSpec, func: Any, name: str, args: Any, kwargs: Any
) -> Any:
    if isinstance(seen, (list, tuple)):
        return type(seen)(_cut_as(s, local, spec, func, name, args, kwargs) for s in seen)
    if not seen.is_contiguous() or seen.dtype != local.dtype:
        raise refusal(func, name, args, kwargs)
    into = (
        spec.within(seen.storage_offset(), seen.shape)
        if seen.numel()
        else spec.within(0, seen.shape)
    )
    first = into.first - spec.first + into.start - spec.start if into.stop > into.start else 0
    return given_out(dress(local.detach()[first : first + into.stop - into.start], into), local)


def _plain_index(index: Any) -> Any:
    """Return an index with NumPy integers and 0-dim tensors as ints: like ints, they make views."""
    if isinstance(index, tuple):
        return tuple(map(_plain_index, index))
    if isinstance(index, torch.Tensor):
        number = index.dim() == 0 and spec_of(index) is None and index.dtype in _INTEGERS
        return int(index) if number else index
    return int(index) if isinstance(index, Integral) and not isinstance(index, bool) else index


_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


def _is_basic(index: Any) -> bool:
    """Whether an index makes a view: it has only integers, slices, None and Ellipsis."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        i is None
        or i is Ellipsis
        or isinstance(i, slice)
        or (isinstance(i, int) and not isinstance(i, bool))
        for i in parts
    )


def get_item(func: Any, args: Any, kwargs: Any) -> Any:
    args = (args[0], _plain_index(args[1]))
    if spec_of(args[0]) is None or not _is_basic(args[1]):
        return read_whole(func, "[...]", args, kwargs)
    return view_of(func, "[...]", args, kwargs)


def set_item(func: Any, target: torch.Tensor, index: Any, value: Any) -> None:
    spec = spec_of(target)
    if spec is None:
        read_whole(func, "[...] =", (target, index, value), {})
        return
    if target.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(LEAF)
    index = _plain_index(index)
    if _is_basic(index):
        seen = torch.empty(spec.shape, dtype=target.dtype, device="meta")[index]
        if seen.is_contiguous():
            into = _cut_as(seen, target, spec, func, "[...] =", (target,), {})
            given = (
                value
                if isinstance(value, torch.Tensor)
                else torch.as_tensor(value, dtype=target.dtype, device=target.device)
            )
            # Like torch, drop leading dimensions of size 1
            while spec_of(given) is None and given.dim() > seen.dim() and given.shape[0] == 1:
                given = given[0]
            with torch.no_grad():
                elementwise(torch.Tensor.copy_, "copy_", (into, given), {})
            return
    mask = spec_of(index)
    number = isinstance(value, (int, float)) or (
        isinstance(value, torch.Tensor) and value.dim() == 0 and spec_of(value) is None
    )
    if (
        mask is not None
        and index.dtype == torch.bool
        and mask.same_cut(spec)
        and mask.shape == spec.shape
        and number
    ):
        target.masked_fill_(index, value)
        return
    write_whole(func, "[...] =", (target, index, value), {})
