"""Element-wise operations and random draws, on this rank's elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onefold.runtime.parameters.interval import IntervalSpec, dress, note_given_out, spec_of
from onefold.runtime.parameters.operators.names import OF_ANOTHERS_KIND, WRITTEN
from onefold.runtime.parameters.operators.refusals import mismatch, tensors_among
from onefold.runtime.parameters.operators.whole import read_whole, whole_of


class Stepping:
    """The number of optimizer steps under way.

    Inside a step, a plain tensor may hold this rank's elements only (an optimizer state) and be
    combined with an interval.
    """

    depth = 0


def elementwise(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "type" and len(args) == 1 and not kwargs:
        return func(*args)  # the name of its type
    if name in OF_ANOTHERS_KIND:
        kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
        out, spec = func(*args, **kwargs), spec_of(args[0])
        return out if spec is None else dressed(out, spec, args)
    # torch expects a scalar as the value, so an interval there is gathered
    if name in ("masked_fill", "masked_fill_") and any(
        spec_of(v) for v in (*args[2:], kwargs.get("value"))
    ):
        args, kwargs = (
            (*args[:2], *whole_of(args[2:], name)),
            {k: whole_of(v, name) if k == "value" else v for k, v in kwargs.items()},
        )
    # the local elements are one-dimensional: a memory format does not apply
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    tensors = tensors_among((args, kwargs))
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors if spec_of(t) is None)
    if graded and not (name in WRITTEN and spec_of(args[0])):
        return read_whole(func, name, args, kwargs)  # autograd needs the whole result
    if name in WRITTEN:
        base = spec_of(args[0])
        if base is None:
            return (
                func(*args, **kwargs)
                if _all_local(args[0], tensors[1:])
                else read_whole(func, name, args, kwargs)
            )
        shape = broadcast_shape(tensors[1:])
        fits = shape is not None and _broadcast(base.shape, shape) == base.shape
        if not fits and not any(_is_local(t, base) for t in tensors[1:]):
            raise mismatch(name, base, tensors[1:])
    else:
        found = broadcast_shape(tensors)
        base = next(
            (s for t in tensors if (s := spec_of(t)) is not None and s.shape == found), None
        )
        if base is None:
            base = next(
                (
                    s
                    for t in tensors
                    if (s := spec_of(t)) is not None and any(_is_local(u, s) for u in tensors)
                ),
                None,
            )
            if base is None:
                return read_whole(func, name, args, kwargs)
    out = dressed(func(*_replaced(args, base, name), **_replaced(kwargs, base, name)), base, args)
    return given_out(out, args[0]) if name in ("detach", "alias") else out


def like_another(like: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """Run `x.to(like)`. Only the dtype and the device of `like` matter, not its shape."""
    kwargs = {k: v for k, v in kwargs.items() if k != "other"}
    changed = (args[0], like.device, like.dtype, *args[2:])
    if spec_of(args[0]) is None:
        return torch.Tensor.to(*changed, **kwargs)
    return elementwise(torch.Tensor.to, "to", changed, kwargs)


def given_out(view: Any, source: torch.Tensor) -> Any:
    note_given_out(view, source)
    return view


def give_to(target: torch.Tensor, value: torch.Tensor) -> None:
    """Run `interval.data = value`: copy the values; the interval keeps its memory."""
    spec, theirs = spec_of(target), spec_of(value)
    assert spec is not None
    if (
        value.dtype != target.dtype
        or (theirs.shape if theirs is not None else value.shape) != spec.shape
    ):
        raise mismatch(".data =", spec, [value])
    with torch.no_grad():
        target.copy_(part_of(value, spec, ".data ="))


def on_locals(func: Any, args: Any, kwargs: Any) -> Any:
    spec = spec_of(args[0] if args else kwargs["input"])
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    return dressed(func(*args, **kwargs), spec, args)  # type: ignore[arg-type]


def _replaced(value: Any, base: IntervalSpec, what: str) -> Any:
    """Return `value` with each tensor in it replaced by its elements that belong to this rank's
    part of `base`.
    """
    if isinstance(value, torch.Tensor):
        return part_of(value, base, what)
    if isinstance(value, (list, tuple)):
        parts = [_replaced(v, base, what) for v in value]
        return parts if isinstance(value, list) else tuple(parts)
    return (
        {k: _replaced(v, base, what) for k, v in value.items()}
        if isinstance(value, dict)
        else value
    )


def part_of(t: torch.Tensor, base: IntervalSpec, what: str) -> torch.Tensor:
    spec = spec_of(t)
    if spec is not None:
        if spec.same_cut(base) and spec.shape == base.shape:
            return t
        t = spec.gather(t, what)
    elif t.dim() == 0 or _is_local(t, base):
        return t
    if t.requires_grad:
        t = t.detach()
    return slice_of(t, base)


def slice_of(t: torch.Tensor, spec: IntervalSpec) -> torch.Tensor:
    """Return this rank's elements, [stop - start], of the plain tensor `t`, which broadcasts to
    `spec.shape`.
    """
    if t.numel() == 1:
        return t.reshape(1) if t.dim() else t
    t = t.expand(spec.shape)
    if t.is_contiguous():
        return t.reshape(-1)[spec.start : spec.stop]
    if spec.start == spec.stop:
        return t.new_empty(0)
    row = spec.numel // spec.shape[0]  # copy only the rows that this rank has elements of
    first, last = spec.start // row, -(-spec.stop // row)
    return t[first:last].reshape(-1)[spec.start - first * row : spec.stop - first * row]


def _is_local(t: torch.Tensor, base: IntervalSpec) -> bool:
    """Whether a plain tensor holds only this rank's elements of `base`. True only inside an
    optimizer's step, for its parameters, gradients and states.
    """
    return (
        Stepping.depth > 0
        and spec_of(t) is None
        and tuple(t.shape) == (base.stop - base.start,)
        and t.shape != base.shape
    )


def _all_local(target: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    specs = [s for t in others if (s := spec_of(t)) is not None]
    return bool(specs) and all(_is_local(target, s) for s in specs)


def dressed(out: Any, spec: IntervalSpec, args: Any = ()) -> Any:
    if isinstance(out, torch.Tensor):
        return out if spec_of(out) is not None else dress(out, spec)
    if isinstance(out, (list, tuple)):
        return (
            type(out)(*(dressed(o, spec) for o in out))
            if hasattr(out, "_fields")
            else type(out)(dressed(o, spec) for o in out)
        )
    return out


def broadcast_shape(tensors: Sequence[torch.Tensor]) -> torch.Size | None:
    """Return the shape that all of them broadcast to; None if they do not broadcast."""
    try:
        return torch.broadcast_shapes(
            *((s.shape if (s := spec_of(t)) is not None else t.shape) for t in tensors)
        )
    except RuntimeError:
        return None


def _broadcast(a: Any, b: Any) -> torch.Size | None:
    try:
        return torch.broadcast_shapes(a, b)
    except RuntimeError:
        return None


def draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Fill an interval by `func`, which uses no elements (normal_, nn.init): fill a temporary
    tensor of the whole's shape, and take this rank's slice of it.

    If ranks have equal seeds, their slices are of one draw; else each rank's slice is of its own.
    """
    target = args[0] if args else kwargs["tensor"]
    spec = spec_of(target)
    assert spec is not None
    with torch.no_grad():
        whole = torch.empty(spec.shape, dtype=target.dtype, device=target.device)
        func(*(whole, *args[1:]), **kwargs) if args else func(**{**kwargs, "tensor": whole})
        target.copy_(whole.reshape(-1)[spec.start : spec.stop])
    return target


def draw_like(func: Any, args: Any, kwargs: Any) -> Any:
    spec = spec_of(args[0])
    if spec is None:
        return func(*args, **kwargs)
    whole = func(
        torch.empty(spec.shape, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs
    )
    return dress(whole.reshape(-1)[spec.start : spec.stop].clone(), spec)
