"""How functions of torch run on intervals, and on sharded parameters outside a forward pass without
gradients. schema.py decides what each of them does.

| function                                             | result                                                            | traffic       |
|------------------------------------------------------|-------------------------------------------------------------------|---------------|
| shape, numel, dtype and the like                     | the whole's                                                       | none          |
| element-wise, in place or not: add_, clamp, copy_    | on this rank's elements; other tensors are sliced to match        | none          |
| the same on lists: _foreach_lerp_                    | the same                                                          | none          |
| zeros_like; randn_like, normal_, nn.init             | this rank's slice of a whole tensor made or drawn locally         | none          |
| view(-1), flatten, [i], [a:b] on the first dimension | an interval: the elements keep their order                        | none          |
| norm, sum, mean, max, any without a dimension        | the whole's, from one number of every rank                        | 8 bytes       |
| other reads: matmul, sum(dim), [mask], tolist        | on the gathered whole; the result is an ordinary tensor           | the parameter |
| other writes in place: w[:, 3] = 0, tril_            | on the gathered whole, of which this rank keeps its slice         | the parameter |
| views in another order: t(), [:, 3], chunk(2, 1)     | `ShardedParameterError`: writes to a copy would be lost           |               |
| changes of its memory: set_, resize_, DLPack         | `ShardedParameterError`                                           |               |

A function with traffic is a collective: every rank must run it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from onefold.memory import storage_of
from onefold.runtime.parameters.interval import (
    IntervalSpec,
    ShardedParameterError,
    disable_torch_function,
    dress,
    mapped,
    note_given_out,
    shape_of,
    spec_of,
    tensors_among,
)
from onefold.runtime.parameters.schema import QUESTIONS, Does, Operator, operator_of

LEAF = "a leaf Variable that requires grad is being used in an in-place operation."
_T: Any = torch.Tensor
_FIRST = ("input", "self", "tensor", "x", "A")  # names of first arguments


class _Stepping(threading.local):
    """The number of optimizer steps under way in this thread.

    Inside a step, a plain tensor may hold this rank's elements only (an optimizer state) and be
    combined with an interval.
    """

    depth = 0


stepping = _Stepping()


def compute(op: Operator, func: Any, args: Any, kwargs: Any, among: Sequence[torch.Tensor]) -> Any:
    """Run `func` by the table of this module. `among` are the tensors among its arguments: at least
    one interval, or a sharded parameter that is treated as one.

    Raises:
        ShardedParameterError: it cannot be done on a part; the message says what to write instead.
    """
    with disable_torch_function():
        if not args:  # its first argument was given by name
            first = next((k for k in _FIRST if k in kwargs), next(iter(kwargs)))
            args, kwargs = (kwargs[first],), {k: v for k, v in kwargs.items() if k != first}
        if op.does not in QUESTIONS and op.name != "data":
            _refuse_unreduced(op, among)
        other = op.writes_with(kwargs) and not op.writes  # `out` or `inplace`
        run = on_whole if other and op.does is Does.POINTWISE else _RUN[op.does]
        return run(op, func, args, kwargs)


# -- refusals --------------------------------------------------------------------------------------


def subject_of(given: Any) -> str:
    found = [s for t in tensors_among(given) if (s := spec_of(t)) is not None]
    said = dict.fromkeys(
        f"{s.name!r} (this rank holds elements {s.start} to {s.stop} of shape {tuple(s.shape)})"
        for s in found[:3]
    )
    return " and ".join(said) or "a sharded parameter"


def refusal(op: Operator, given: Any) -> ShardedParameterError:
    said = f"{op.name} of {subject_of(given)} cannot be done on a part. "
    if op.does in (Does.VIEW, Does.SET_ITEM):
        said += "A view in another order would be a copy, and what is written to it would be lost. "
    return ShardedParameterError(
        said + "Every rank: read a whole copy with `parameter.onefold.gather()`, or read and write"
        " inside `with onefold.full_params(model, write=True):`. To change the model itself"
        " (resize_token_embeddings, a new head) call onefold.unshard(model) first, and shard() again."
    )


def mismatch(
    name: str, base: IntervalSpec, others: Sequence[torch.Tensor]
) -> ShardedParameterError:
    shapes = ", ".join(str(tuple(shape_of(t))) for t in others)
    return ShardedParameterError(
        f"{name} on {base.name!r} of shape {tuple(base.shape)} was given {shapes or 'nothing'}:"
        " expected a number, or a tensor that broadcasts to that shape (the whole's; each rank"
        " takes its slice)."
    )


def _refuse(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    raise refusal(op, (args, kwargs))


def _refuse_unreduced(op: Operator, among: Sequence[torch.Tensor]) -> None:
    found = (s for t in among if (s := spec_of(t)) is not None and s.unreduced)
    spec = next(found, None)
    if spec is not None and op.name not in ("zero_", "_foreach_zero_"):
        raise ShardedParameterError(
            f"{op.name} was given the gradient of {spec.name!r} under onefold.no_sync, where"
            " `.grad` shows this rank's unreduced part only. Look at gradients, and change"
            " them, after the last micro-batch. Dropping them is fine: optimizer.zero_grad(),"
            " or `.grad = None`."
        )


# -- questions and new tensors ---------------------------------------------------------------------


def _ask(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    spec = spec_of(args[0])
    if op.name == "requires_grad_" and (args[1:] or (kwargs.get("requires_grad", True),))[0]:
        raise ShardedParameterError(
            f"requires_grad_() on one rank's part of {subject_of(args)}: gradients of it"
            " would be of a part. Use the parameter itself, which is gathered where gradients are"
            " needed, or a whole copy: parameter.onefold.gather() (on every rank)."
        )
    whole = op.does is Does.SHAPE and spec is not None
    return func(spec.stand_in(args[0].dtype) if whole else args[0], *args[1:], **kwargs)  # type: ignore[union-attr]


def _made_like(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Run `zeros_like` on this rank's elements; draw `rand_like` of the whole, and take a slice."""
    spec = spec_of(args[0])
    if spec is None:
        return func(*args, **kwargs)
    if kwargs.get("requires_grad"):
        raise refusal(op, args)  # gradients of a part would be lost
    if op.random:
        like = torch.empty(spec.shape, dtype=args[0].dtype, device=args[0].device)
        return dress(spec.piece(func(like, *args[1:], **kwargs)).clone(), spec)
    return dress(func(*args, **_without_format(kwargs)), spec)


def _new(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0], *whole_of(args[1:], op.name), **whole_of(kwargs, op.name))


def _convert(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Change the dtype or the device. Only these matter of another tensor, as in `x.to(like)`."""
    like = args[1] if len(args) > 1 else kwargs.get("other")
    kwargs = {k: v for k, v in _without_format(kwargs).items() if k != "other"}
    if isinstance(like, torch.Tensor):
        func, args = torch.Tensor.to, (args[0], like.device, like.dtype, *args[2:])
    return dressed(func(*args, **kwargs), spec_of(args[0]))


def _without_format(kwargs: Any) -> Any:
    """This rank's elements are one-dimensional: a memory format does not apply."""
    return {k: v for k, v in kwargs.items() if k != "memory_format"}


# -- element by element ----------------------------------------------------------------------------


def _on_parts(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    kwargs = _without_format(kwargs)
    tensors = tensors_among((args, kwargs))
    base = spec_of(args[0]) if op.writes else _base_among(tensors)
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors if spec_of(t) is None)
    if graded and not (op.writes and base):
        return on_whole(op, func, args, kwargs)  # autograd needs the whole result
    if base is None:
        if op.writes and _is_all_local(args[0], tensors[1:]):
            return func(*args, **kwargs)
        return on_whole(op, func, args, kwargs)
    others = tensors[1:] if op.writes else ()
    fits = not others or _broadcast([base.shape, *map(shape_of, others)]) == base.shape
    if not fits and not any(_is_local(t, base) for t in others):
        raise mismatch(op.name, base, others)
    args, kwargs = mapped((args, kwargs), lambda t: part_of(t, base, op.name))
    return dressed(func(*args, **kwargs), base)


def _base_among(tensors: Sequence[torch.Tensor]) -> IntervalSpec | None:
    """Return the spec of the result: that of an interval of the shape that all broadcast to."""
    shape = _broadcast([*map(shape_of, tensors)])
    specs = [s for t in tensors if (s := spec_of(t)) is not None]
    found = next((s for s in specs if s.shape == shape), None)
    return found or next((s for s in specs if any(_is_local(t, s) for t in tensors)), None)


def _on_lists(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a `_foreach_` function on lists with intervals, item by item."""
    if op.name == "_foreach_norm":
        return norms_of(args[0], float(args[1] if len(args) > 1 else kwargs.get("ord", 2)))
    lists = [a for a in args if _is_list(a)]
    if any(len(a) != len(lists[0]) for a in lists):
        return on_whole(op, func, args, kwargs)
    columns = list(zip(*lists, strict=True))
    bases = [spec_of(c[0]) if op.writes else _base_among(c) for c in columns]

    def of_item(t: torch.Tensor, base: IntervalSpec | None) -> torch.Tensor:
        return part_of(t, base, op.name) if base is not None else whole_of(t, op.name)

    args = [
        list(map(of_item, a, bases)) if _is_list(a) else whole_of(a, op.name)  # a number for all
        for a in args
    ]
    out = func(*args, **whole_of(kwargs, op.name))
    return None if out is None else list(map(dressed, out, bases))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def _unscale(op: Operator, func: Any, args: Any, kwargs: Any) -> None:
    """Unscale gradients for torch.amp.GradScaler. If one rank finds an infinity, the flag is set on
    all; the host does not wait.
    """
    func(*args, **kwargs)
    owners = [spec.owners for t in args[0] if (spec := spec_of(t)) is not None]
    engines = {id(e): e for o in owners if (e := o.engine) is not None}
    for engine in engines.values():
        engine.agree_on_overflow(args[1])


def part_of(t: torch.Tensor, base: IntervalSpec, what: str) -> torch.Tensor:
    """Return the elements of `t` that belong to this rank's part of `base`."""
    spec = spec_of(t)
    if spec is not None:
        if spec.same_cut(base) and spec.shape == base.shape:
            return t
        t = spec.gather(t, what)
    elif t.dim() == 0 or _is_local(t, base):
        return t
    return slice_of(t.detach() if t.requires_grad else t, base)


def slice_of(t: torch.Tensor, spec: IntervalSpec) -> torch.Tensor:
    """Return this rank's elements, [stop - start], of the plain tensor `t`, which broadcasts to
    `spec.shape`.
    """
    if t.numel() == 1:
        return t.reshape(1) if t.dim() else t
    t = t.expand(spec.shape)
    if spec.box is not None or t.is_contiguous():
        return spec.piece(t)
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
        stepping.depth > 0
        and spec_of(t) is None
        and tuple(t.shape) == (base.stop - base.start,)
        and t.shape != base.shape
    )


def _is_all_local(target: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    specs = [s for t in others if (s := spec_of(t)) is not None]
    return bool(specs) and all(_is_local(target, s) for s in specs)


def dressed(out: Any, spec: IntervalSpec | None) -> Any:
    if spec is None:
        return out
    return mapped(out, lambda t: t if spec_of(t) is not None else dress(t, spec))


def _broadcast(shapes: list[torch.Size]) -> torch.Size | None:
    """Return the shape that all of them broadcast to; None if they do not broadcast."""
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0]  # torch takes 40 microseconds to say so
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return None


# -- views -----------------------------------------------------------------------------------------


def _view(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Return a view of an interval as an interval. Its elements must keep their order."""
    if spec_of(args[0]) is None:  # of a plain tensor, by an interval's shape or elements
        return on_whole(op, func, args, kwargs)
    others = bool(tensors_among((args[1:], kwargs)))
    func = _T.unbind if op.name == "iter" else func
    try:
        seen = _seen(func, args, kwargs, others)
    except RuntimeError:
        if not others:
            raise
        seen = None  # by the elements of another tensor
    if seen is None:
        return on_whole(op, func, args, kwargs)
    out = mapped(seen, lambda t: _cut(op, t, args[0]))
    return iter(out) if op.name == "iter" else out


def _seen(func: Any, args: Any, kwargs: Any, others: bool = True) -> Any:
    """Return the view that `func` makes of a tensor of the whole's shape without memory, which tells
    where its elements are; None if it makes a copy, or a view in which elements repeat (torch forbids
    writes to these). `others`: whether there are tensors among the other arguments.
    """
    first = _without_memory(args[0])
    rest, kwargs = mapped((args[1:], kwargs), _without_memory) if others else (args[1:], kwargs)
    seen = func(first, *rest, **kwargs)
    for t in tensors_among(seen):
        if storage_of(t) != storage_of(first) or _repeats(t):
            return None
    return seen


def _without_memory(t: torch.Tensor) -> torch.Tensor:
    spec = spec_of(t)
    return t if spec is None else torch.empty(spec.shape, dtype=t.dtype, device="meta")


def _repeats(t: torch.Tensor) -> bool:
    return any(step == 0 and n > 1 for step, n in zip(t.stride(), t.shape, strict=True))


def _cut(op: Operator, seen: torch.Tensor, source: torch.Tensor) -> Any:
    """Return the part of `source` where `seen`, a view of the whole, has its elements."""
    spec: Any = spec_of(source)
    if not seen.is_contiguous() or seen.dtype != source.dtype:
        raise refusal(op, source)
    if spec.box is not None:
        if seen.shape != spec.shape or seen.storage_offset():
            raise refusal(op, source)
        out = dress(source.detach(), spec)
        note_given_out(out, source)
        return out
    into = spec.within(seen.storage_offset() if seen.numel() else 0, seen.shape)
    first = into.first - spec.first + into.start - spec.start if into.stop > into.start else 0
    part = source.detach()[first : first + into.stop - into.start]
    out = dress(part.conj() if seen.is_conj() else part, into)
    note_given_out(out, source)
    return out


def _set_item(op: Operator, func: Any, args: Any, kwargs: Any) -> None:
    target, index, value = args
    spec = spec_of(target)
    if spec is None:
        return on_whole(op, func, args, kwargs)
    if target.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(LEAF)
    try:
        seen = _seen(_T.__getitem__, (target, index), {})
    except RuntimeError:
        seen = None  # by the elements of the index
    if seen is not None and seen.is_contiguous():
        return _write_into(_cut(op, seen, target), value)
    on_whole(op, func, args, kwargs)


def _write_into(into: torch.Tensor, value: Any) -> None:
    given = value
    if not isinstance(value, torch.Tensor):
        given = torch.as_tensor(value, dtype=into.dtype, device=into.device)
    # Like torch, drop leading dimensions of size 1
    while spec_of(given) is None and given.dim() > len(shape_of(into)) and given.shape[0] == 1:
        given = given[0]
    with torch.no_grad():
        _on_parts(operator_of(_T.copy_), _T.copy_, (into, given), {})


def _set_data(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Run `interval.data = value`: copy the values; the interval keeps its memory."""
    target, value = args
    spec = spec_of(target)
    if spec is None:
        return on_whole(op, func, args, kwargs)
    if value.dtype != target.dtype or shape_of(value) != spec.shape:
        raise mismatch(".data =", spec, [value])
    with torch.no_grad():
        target.copy_(part_of(value, spec, ".data ="))


# -- on the whole ----------------------------------------------------------------------------------
#
# Functions on the gathered whole. Collective: every rank must run them.


def whole_of(value: Any, what: str) -> Any:
    """Return `value` with each interval in it gathered. Collective."""

    def gathered(t: torch.Tensor) -> torch.Tensor:
        spec = spec_of(t)
        # A parameter is read in the dtype that it shows; its masters may be in another.
        shown = t.__dict__.get("_onefold_declared", t.dtype)
        return t if spec is None else spec.gather(t.detach(), what).to(shown)

    return mapped(value, gathered)


def on_whole(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function on gathered copies, and keep this rank's slice of the one that it writes to. A
    random fill (`normal_`, nn.init) reads no elements: nothing is gathered for it, and its slices
    are of one draw where ranks have equal seeds.

    Raises:
        ShardedParameterError: it wrote to another copy, or returns a view of one in another order.
    """
    target: Any = None
    if op.writes_with(kwargs):
        target = args[0] if kwargs.get("out") is None else kwargs["out"]
    spec = None if target is None else spec_of(target)
    draws = op.does is Does.DRAW
    if spec is not None and target.requires_grad and torch.is_grad_enabled() and not draws:
        raise RuntimeError(LEAF)
    copies: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def copied(t: torch.Tensor) -> torch.Tensor:
        found = spec_of(t)
        if found is None:
            return t
        if id(t) not in copies:
            if t is not target:
                copy = whole_of(t, op.name)
            elif draws:
                copy = torch.empty(found.shape, dtype=t.dtype, device=t.device)
            else:
                copy = found.gather(t, op.name)
            copies[id(t)] = t, copy, _version(copy)
        return copies[id(t)][1]

    with torch.set_grad_enabled(torch.is_grad_enabled() and spec is None):
        given_args, given = mapped((args, kwargs), copied)
        out = func(*given_args, **given)
        if any(t is not target and _version(c) != before for t, c, before in copies.values()):
            raise refusal(op, (args, kwargs))
        if spec is None:
            return _returned(op, out, copies.values())
        whole = copies[id(target)][1]
        if whole.shape != spec.shape:
            raise refusal(op, (args, kwargs))
        target.copy_(spec.piece(whole))
    return target


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _returned(op: Operator, out: Any, copies: Any) -> Any:
    """Return what a function made of gathered copies. What lies in a copy becomes an interval again:
    writes to a copy would be lost.
    """
    if isinstance(out, torch.Tensor):
        for source, copy, _ in copies if out.layout is torch.strided else ():
            if storage_of(out) == storage_of(copy) and not _repeats(out):
                return _cut(op, out, source)
        return out
    if isinstance(out, (list, tuple)):
        parts = [_returned(op, o, copies) for o in out]
        return type(out)(*parts) if hasattr(out, "_fields") else type(out)(parts)
    if isinstance(out, np.ndarray):
        out.setflags(write=False)
    elif out is not None and not isinstance(out, _PLAIN):
        raise refusal(op, [source for source, *_ in copies])  # it may keep the copy's memory
    return out


_PLAIN = (bool, int, float, complex, str, bytes, np.generic, torch.dtype, type)


# -- to one number ---------------------------------------------------------------------------------

_NARROW = (torch.float16, torch.bfloat16)
#: Reductions of one number a rank: {name: (of this rank's elements, of the ranks' numbers, of none)}
_NUMBERS: dict[str, tuple[Any, Any, float]] = {
    "sum": (_T.sum, _T.sum, 0),
    "mean": (_T.sum, _T.sum, 0),
    "max": (_T.amax, _T.amax, -math.inf),
    "amax": (_T.amax, _T.amax, -math.inf),
    "min": (_T.amin, _T.amin, math.inf),
    "amin": (_T.amin, _T.amin, math.inf),
    "any": (_T.any, _T.any, 0),
    "all": (_T.all, _T.all, 1),
    "count_nonzero": (_T.count_nonzero, _T.sum, 0),
}


def _reduce(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Reduce the whole to one number, by one exchange of a number of every rank; on the whole where
    that is not enough (a dimension, a matrix norm).
    """
    x = args[0]
    spec = spec_of(x)
    if spec is not None and op.name.endswith("norm"):
        p = _order(op.name, spec, args, kwargs) if x.is_floating_point() else None
        return on_whole(op, func, args, kwargs) if p is None else norms_of([x], p)[0]
    more = len(args) > 1 or kwargs or op.name not in _NUMBERS
    if spec is None or not spec.numel or more or x.is_complex():
        return on_whole(op, func, args, kwargs)
    kind = func(spec.stand_in(x.dtype)).dtype  # raises where torch does
    here, every, nothing = _NUMBERS[op.name]
    wide = torch.float64 if x.is_floating_point() else torch.int64
    if x.numel():
        mine = here(x, dtype=torch.float32) if here is _T.sum and x.dtype in _NARROW else here(x)
    else:
        limit = nothing if wide is torch.float64 else max(min(nothing, 2**63 - 1), -(2**63))
        mine = torch.full((), limit, device=x.device, dtype=wide)
    total = every(spec.exchange(mine.to(wide).reshape(1), op.name))
    return (total / spec.numel if op.name == "mean" else total).to(x.device, kind)


def _order(name: str, spec: IntervalSpec, args: Any, kwargs: Any) -> float | None:
    """Return the p of a norm over all elements; None of another norm."""
    key, usual = {"norm": ("p", "fro"), "linalg_norm": ("ord", None)}.get(name, ("ord", 2))
    p = args[1] if len(args) > 1 else kwargs.get(key, usual)
    more = any(v is not None and v is not False for k, v in kwargs.items() if k != key)
    if len(args) > 2 or more or (name == "linalg_norm" and p is not None and len(spec.shape) != 1):
        return None
    p = 2.0 if p in (None, "fro") else p
    return float(p) if isinstance(p, (int, float)) else None


def norms_of(tensors: Sequence[torch.Tensor], p: float) -> list[torch.Tensor]:
    """Return the p-norms of whole tensors, each 0-dim. Takes one exchange of numbers for each group
    of ranks, and one call for all that share a device and a dtype.

    Norms of 16-bit parts are in fp32: the result is rounded once, when all parts are combined.
    """
    specs, out = [spec_of(t) for t in tensors], list(tensors)
    alike: dict[Any, list[int]] = {}
    apart: dict[Any, list[int]] = {}
    for i, (t, s) in enumerate(zip(tensors, specs, strict=True)):
        alike.setdefault((t.device, t.dtype, s is not None), []).append(i)
        if s is not None:
            apart.setdefault(s.owners.meet(s.name)[0], []).append(i)
    for (device, dtype, part), indices in alike.items():
        # The neutral element when the parts are combined, for those of which none is here
        none = torch.full((1,), math.inf if p < 0 else 0.0, dtype=dtype, device=device)
        some = [tensors[i] if tensors[i].numel() or not part else none for i in indices]
        low = torch.float32 if part and dtype in _NARROW else None
        for i, norm in zip(indices, torch._foreach_norm(some, p, dtype=low), strict=True):
            out[i] = norm
    for indices in apart.values():
        spec, *others = (s for i in indices if (s := specs[i]) is not None)
        device = out[indices[0]].device
        parts = torch.stack([out[i].to(device) for i in indices]).to(torch.float64)
        mine = parts if math.isinf(p) else parts.pow(p) if p else parts
        what = "the norm" if p == 2 else f"the {p:g}-norm"
        every = spec.exchange(mine, what, others).to(device)
        most = every.amax(0) if p > 0 else every.amin(0)
        total = most if math.isinf(p) else every.sum(0).pow(1.0 / p) if p else every.sum(0)
        rounded: dict[torch.dtype, Sequence[torch.Tensor]] = {}
        for at, i in enumerate(indices):
            kind = tensors[i].dtype.to_real()
            if kind not in rounded:
                rounded[kind] = total.to(kind).unbind()
            out[i] = rounded[kind][at]
    return out


# -- what each does ---------------------------------------------------------------------------------


def _format(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """A number is read; anything larger says what it is, for which no other rank is needed."""
    return repr(args[0]) if shape_of(args[0]) else on_whole(op, func, args, kwargs)


_RUN: dict[Does, Callable[[Operator, Any, Any, Any], Any]] = {
    Does.SHAPE: _ask,
    Does.ITSELF: _ask,
    Does.LIKE: _made_like,
    Does.NEW: _new,
    Does.DRAW: on_whole,
    Does.CONVERT: _convert,
    Does.POINTWISE: _on_parts,
    Does.LISTS: _on_lists,
    Does.UNSCALE: _unscale,
    Does.VIEW: _view,
    Does.SET_ITEM: _set_item,
    Does.SET_DATA: _set_data,
    Does.FORMAT: _format,
    Does.REDUCE: _reduce,
    Does.WHOLE: on_whole,
    Does.REFUSED: _refuse,
}
