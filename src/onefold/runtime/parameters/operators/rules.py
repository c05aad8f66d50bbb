"""How operators run on intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from onefold.runtime.parameters.interval import IntervalSpec, dress, note_given_out, spec_of
from onefold.runtime.parameters.operators.names import (
    LEAF,
    OF_ANOTHERS_KIND,
    READ,
    READ_VIEWS,
    WRITTEN,
    mismatch,
    refusal,
    tensors_among,
)

# -- lists -----------------------------------------------------------------------------------------
#
# Operations on lists of tensors (torch._foreach_*).


def on_lists(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run a `_foreach_` or `_fused_` function on lists with intervals, item by item."""
    if name == "_foreach_norm":
        return norms_of(args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2))
    lists = [
        a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)
    ]
    writes = name.endswith("_")
    if name in ("_foreach_max",) or any(len(a) != len(lists[0]) for a in lists):
        return read_whole(func, name, args, kwargs)
    bases: list[IntervalSpec | None] = []
    columns = list(zip(*lists, strict=True))
    for column in columns:
        first = spec_of(column[0])
        if writes:
            bases.append(first)
        else:
            shape = broadcast_shape(column)
            bases.append(
                next(
                    (s for t in column if (s := spec_of(t)) is not None and s.shape == shape), None
                )
            )
    given = []
    for a in args:
        if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor):
            a = [
                part_of(t, base, name) if base is not None else whole_of(t, name)
                for t, base in zip(a, bases, strict=True)
            ]
        elif isinstance(a, torch.Tensor):
            a = whole_of(a, name)  # one scalar tensor for all items
        given.append(a)
    out = func(*given, **whole_of(kwargs, name))
    if out is None:
        return None
    return [dressed(o, base) if base is not None else o for o, base in zip(out, bases, strict=True)]


def unscale(func: Any, grads: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Unscale gradients for torch.amp.GradScaler. If one rank finds an infinity, `found_inf` is set
    on all; the host does not wait.
    """
    func(grads, found_inf, inv_scale)
    agreed: set[int] = set()
    for t in grads:
        if (spec := spec_of(t)) is not None:
            engine, _ = spec.owners.meet(spec.name)
            if id(engine) not in agreed:
                agreed.add(id(engine))
                engine.agree_on_overflow(found_inf)


# -- element by element ----------------------------------------------------------------------------
#
# Element-wise operations and random draws, on this rank's elements.


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


# -- reductions ------------------------------------------------------------------------------------
#
# Reductions of a whole tensor to one number, from one number of every rank.


def norms_of(tensors: Sequence[torch.Tensor], p: Any) -> list[torch.Tensor]:
    """Return the p-norms of whole tensors, each 0-dim. Takes one exchange of numbers for each group
    of ranks.
    """
    p = float(p)
    out = _norms_here(tensors, p)
    apart: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        if (spec := spec_of(t)) is not None:
            apart.setdefault(spec.owners.meet(spec.name)[1], []).append(i)
    for indices in apart.values():
        spec, *others = [s for i in indices if (s := spec_of(tensors[i])) is not None]
        device = out[indices[0]].device
        parts = torch.stack([out[i].to(device) for i in indices]).to(torch.float64)
        mine = parts if math.isinf(p) else parts.pow(p) if p else parts
        what = "the norm" if p == 2 else f"the {p:g}-norm"
        every = spec.exchange(mine, what, others).to(device)
        most = every.amax(0) if p > 0 else every.amin(0)
        total = most if math.isinf(p) else every.sum(0).pow(1.0 / p) if p else every.sum(0)
        rounded: dict[torch.dtype, Sequence[torch.Tensor]] = {}
        for at, i in enumerate(indices):
            dtype = _real(tensors[i].dtype)
            if dtype not in rounded:
                rounded[dtype] = total.to(dtype).unbind()
            out[i] = rounded[dtype][at]
    return out


def _norms_here(tensors: Sequence[torch.Tensor], p: float) -> list[torch.Tensor]:
    """Return the norms of plain tensors, and of this rank's parts of intervals: one call for all
    that share a device and a dtype.

    Norms of 16-bit parts are in fp32: the result is rounded once, when all parts are combined.
    """
    out: list[Any] = [None] * len(tensors)
    alike: dict[tuple[torch.device, torch.dtype, bool, bool], list[int]] = {}
    for i, t in enumerate(tensors):
        part = spec_of(t) is not None
        alike.setdefault((t.device, t.dtype, part, part and not t.numel()), []).append(i)
    for (device, dtype, part, empty), indices in alike.items():
        if empty:  # the neutral element when the parts are combined
            nothing = math.inf if p < 0 else 0.0
            norms: Sequence[torch.Tensor] = [
                torch.full((), nothing, dtype=_real(dtype), device=device)
            ] * len(indices)
        else:
            wide = torch.float32 if part and dtype in (torch.float16, torch.bfloat16) else None
            norms = torch._foreach_norm([tensors[i] for i in indices], p, dtype=wide)
        for i, norm in zip(indices, norms, strict=True):
            out[i] = norm
    return out


def reduce_to_number(name: str, args: Any, kwargs: Any) -> torch.Tensor | bool | None:
    """Return the reduction of the whole, from one number of every rank. None where one number a
    rank is not enough (a dimension, a matrix norm).
    """
    x = args[0] if args else kwargs.get("input")
    spec = spec_of(x)
    if spec is None or not spec.numel:
        return None
    if name == "equal":
        return _equal(spec, x, args[1] if len(args) > 1 else kwargs["other"])
    dtype = kwargs.get("dtype")
    if name in ("norm", "linalg_vector_norm", "linalg_norm"):
        return _norm(name, spec, args, kwargs)
    if (
        len(args) > 1
        or set(kwargs) - {"dtype", "input"}
        or (dtype is not None and name not in ("sum", "mean", "prod"))
    ):
        return None
    if name in ("any", "all"):
        seen = x.any() if name == "any" else x.all()
        every = spec.exchange(seen.reshape(1).to(torch.uint8), name)
        return (every.amax() if name == "any" else every.amin()).to(
            x.device, torch.uint8 if x.dtype == torch.uint8 else torch.bool
        )
    if name == "count_nonzero":
        return spec.exchange(x.count_nonzero().reshape(1), name).sum().to(x.device)
    if x.is_complex():
        return None
    if name in ("max", "min", "amax", "amin"):
        return _extreme(name, spec, x)
    inexact = x.is_floating_point()
    if name == "mean" and not inexact and dtype is None:
        return None
    kind = dtype or (x.dtype if inexact else torch.int64)
    wide = torch.float64 if kind.is_floating_point else torch.int64
    low = {"dtype": torch.float32} if x.dtype in (torch.float16, torch.bfloat16) else {}
    mine = (x.prod(**low) if name == "prod" else x.sum(**low)).to(wide).reshape(1)
    every = spec.exchange(mine, name)
    total = every.prod() if name == "prod" else every.sum()
    return (total / spec.numel if name == "mean" else total).to(x.device, kind)


def _extreme(name: str, spec: IntervalSpec, x: torch.Tensor) -> torch.Tensor:
    least = name.endswith("min")
    if x.is_floating_point():
        nothing = math.inf if least else -math.inf
    elif x.dtype == torch.bool:
        nothing = least
    else:
        nothing = torch.iinfo(x.dtype).max if least else torch.iinfo(x.dtype).min
    mine = (
        (x.min() if least else x.max())
        if x.numel()
        else torch.tensor(nothing, dtype=x.dtype, device=x.device)
    )
    wide = torch.float64 if x.is_floating_point() else torch.int64
    every = spec.exchange(mine.to(wide).reshape(1), name)
    return (every.min() if least else every.max()).to(x.device, x.dtype)


def _norm(name: str, spec: IntervalSpec, args: Any, kwargs: Any) -> torch.Tensor | None:
    order = {"norm": "p", "linalg_vector_norm": "ord", "linalg_norm": "ord"}[name]
    p = (
        args[1]
        if len(args) > 1
        else kwargs.get(
            order, "fro" if name == "norm" else 2 if name == "linalg_vector_norm" else None
        )
    )
    known = (order, "input", "keepdim", "x", "A")
    if (
        len(args) > 2
        or kwargs.get("keepdim")
        or any(kwargs.get(k) is not None for k in kwargs if k not in known)
    ):
        return None
    if name == "linalg_norm" and not (p is None or len(spec.shape) == 1):
        return None
    p = 2.0 if p in (None, "fro") else p
    if (
        not isinstance(p, (int, float))
        or not (args[0] if args else kwargs["input"]).is_floating_point()
    ):
        return None
    return norms_of([args[0] if args else kwargs["input"]], p)[0]


def _equal(spec: IntervalSpec, x: torch.Tensor, other: torch.Tensor) -> bool | None:
    theirs = spec_of(other)
    if theirs is None or not spec.same_cut(theirs):
        return None
    if spec.shape != theirs.shape:
        return False
    same = torch.tensor([torch.equal(x, other)], dtype=torch.uint8, device="cpu")
    every = spec.exchange(same, "equal", [theirs])
    return bool(every.all())


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype if not dtype.is_complex else dtype.to_real()


# -- views -----------------------------------------------------------------------------------------
#
# Views and indexing of intervals.


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


# -- on the whole ----------------------------------------------------------------------------------
#
# Operations on the gathered whole. Collective: every rank must run them.


def whole_of(value: Any, what: str) -> Any:
    """Return `value` with each interval in it gathered. Collective."""
    if isinstance(value, torch.Tensor):
        spec = spec_of(value)
        if spec is None:
            return value
        # A parameter is read in the dtype that it shows; its masters may be in another.
        return spec.gather(value.detach(), what).to(
            value.__dict__.get("_onefold_declared", value.dtype)
        )
    if isinstance(value, (list, tuple)):
        parts = [whole_of(v, what) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return {k: whole_of(v, what) for k, v in value.items()} if isinstance(value, dict) else value


def read_whole(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    return func(*whole_of(args, name), **whole_of(kwargs, name))


def write_whole(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run an in-place operation on the gathered whole, and keep this rank's slice of the result."""
    out = kwargs.get("out")
    target = out if out is not None else args[0] if args else kwargs["input"]
    spec = spec_of(target)
    if spec is None:
        return read_whole(func, name, args, kwargs)
    if target.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(LEAF)
    with torch.no_grad():
        whole = spec.gather(target, name)
        if out is not None:
            func(
                *whole_of(args, name),
                **{**whole_of({k: v for k, v in kwargs.items() if k != "out"}, name), "out": whole},
            )
        else:
            rest = (whole, *whole_of(args[1:], name)) if args else ()
            named = whole_of({k: v for k, v in kwargs.items() if args or k != "input"}, name)
            func(*rest, **(named if args else {**named, "input": whole}))
        if whole.shape != spec.shape:
            raise refusal(func, name, args, kwargs)
        target.copy_(whole.reshape(-1)[spec.start : spec.stop])
    return target


def as_number(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    got = read_whole(func, name, args, kwargs)
    if name in ("numpy", "__array__"):
        got.setflags(write=False)  # a copy: writes to it would be lost
    return got


def only_reads(func: Any, name: str) -> bool:
    """Whether `func` writes to nothing and returns no view, by torch's schemas. Functions without a
    schema count if they come from one of torch's functional modules.
    """
    if name in READ or name in READ_VIEWS:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if packet is not None:
        schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
        schemas = [s for s in schemas if not s.is_mutable]
        return bool(schemas) and not any(
            r.alias_info is not None for s in schemas for r in s.returns
        )
    module = getattr(func, "__module__", "") or ""
    return module in (
        "torch.functional",
        "torch.nn.functional",
        "torch._jit_internal",
        "torch._linalg_utils",
    )
