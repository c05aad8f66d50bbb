"""What functions of torch do on intervals, and on sharded parameters outside a forward pass without
gradients.

| function                                             | result                                                            | traffic       |
|------------------------------------------------------|-------------------------------------------------------------------|---------------|
| shape, numel, dtype and the like                     | the whole's                                                       | none          |
| element-wise, in place or not: add_, clamp, copy_    | on this rank's elements; other tensors are sliced to match        | none          |
| the same on lists: _foreach_lerp_                    | the same                                                          | none          |
| zeros_like; normal_, nn.init                         | this rank's slice of a whole tensor made or drawn locally         | none          |
| randn_like                                           | a whole tensor, drawn locally                                     | none          |
| view(-1), flatten, [i], [a:b] on the first dimension | an interval: the elements keep their order                        | none          |
| w[i] = 0, of such a view and a number                | on this rank's elements                                           | none          |
| norm, sum, mean, max, any without a dimension        | the whole's, from one number of every rank                        | 8 bytes       |
| other reads: matmul, sum(dim), [mask], tolist        | on the gathered whole; the result is an ordinary tensor           | the parameter |
| other writes in place: w[:, 3] = 0, tril_            | on the gathered whole, of which this rank keeps its slice         | the parameter |
| views in another order: t(), [:, 3], chunk(2, 1)     | `ShardedParameterError`: writes to a copy would be lost           |               |
| changes of its memory: set_, resize_, DLPack         | `ShardedParameterError`                                           |               |

A function with traffic is a collective: every rank must run it.

Which of them runs a function is decided from what torch declares of its operators:

| torch declares                                         | on an interval                                    |
|--------------------------------------------------------|---------------------------------------------------|
| `Tag.pointwise`                                        | `on_parts`: computed on this rank's elements      |
| `_foreach_`, and the function of one tensor has it     | `on_lists`: the same, item by item                |
| no tensor in the result, and the meta device answers   | `of_shape`, `of_itself`: a question that needs no |
|                                                        | elements                                          |
| none of these, or overloads that differ                | `on_whole`: as a view, if it makes one on the meta|
|                                                        | device; else on the gathered whole                |
| no schema, but it is torch's                           | `on_whole`; refused if it writes                  |
| not torch's, and not `Tag.pointwise`                   | `refuse`                                          |

`EXCEPTIONS` names the functions of which torch declares too little, and those that make tensors. What
a function does is decided once, and is one lookup from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import torch

from onefold.memory import storage_of
from onefold.runtime.differentiate import here, is_written, mapped, tensors_in
from onefold.runtime.parameters.interval import (
    IntervalSpec,
    ShardedParameterError,
    dress,
    local_part,
    shape_of,
    spec_of,
)

_T: Any = torch.Tensor


class Operator:
    """What is known of a function of torch.

    Attributes:
        name: for messages: "add_", "sum", "shape", "data__set__" of a setter.
        run: what runs it on an interval.
        writes: whether it changes its first argument.
        about_itself: whether it needs no elements.
        asks: whether it may be given a tensor that has a shape and no memory.
    """

    __slots__ = ("about_itself", "asks", "name", "run", "writes")

    def __init__(self, name: str, run: Run, writes: bool = False) -> None:
        self.name, self.run, self.writes = name, run, writes
        questions = (of_shape, of_itself)
        self.about_itself = run in questions or name == "detach" or name.endswith("_like")
        # Tensors may be made of the elements of others. What autograd knows by a node needs none
        asks = run in questions and name not in ("data_ptr", "new", "new_tensor")
        self.asks = asks or name in OF_AUTOGRAD

    def writes_with(self, kwargs: dict[str, Any]) -> bool:
        """Whether a call with these keywords changes its first argument, or `out`."""
        return self.writes or kwargs.get("out") is not None or kwargs.get("inplace") is True


#: Runs a function on an interval: (what is known of it, the function, arguments, keyword arguments).
Run = Callable[[Operator, Any, Any, Any], Any]


# -- refusals --------------------------------------------------------------------------------------


def refusal(op: Operator, given: Any) -> ShardedParameterError:
    spec = next(s for t in tensors_in(given) if (s := spec_of(t)) is not None)
    return ShardedParameterError(
        f"{op.name} of {spec.name!r} (this rank holds elements {spec.start} to {spec.stop} of shape"
        f" {tuple(spec.shape)}) cannot be done on a part. Every rank: read a whole copy with"
        " `parameter.onefold.gather()`, or read and write inside"
        " `with onefold.full_params(model, write=True):`. To average gradients, or to start from rank"
        " 0's weights, leave the call out: Onefold does it. To change the model itself"
        " (resize_token_embeddings, a new head) call onefold.unshard(model) first, and shard() again."
    )


def refuse(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    raise refusal(op, (args, kwargs))


# -- questions and new tensors ---------------------------------------------------------------------


def of_shape(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    return func(_without_memory(args[0]), *args[1:], **kwargs)


def of_itself(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    if op.name == "requires_grad_" and (*args[1:], *kwargs.values(), True)[0]:
        raise refusal(op, args)  # gradients of a part would be lost
    rest, kwargs = whole_of((args[1:], kwargs), op.name)
    return func(args[0], *rest, **kwargs)


def formatted(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """A number is read; anything larger says what it is, for which no other rank is needed."""
    return repr(args[0]) if shape_of(args[0]) else on_whole(op, func, args, kwargs)


def call_python(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Torch's function in Python calls others."""
    return func.__wrapped__(*args, **kwargs)


def convert(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Change the dtype or the device, or make a tensor of the same shape."""
    if kwargs.get("requires_grad"):
        raise refusal(op, args)  # gradients of a part would be lost
    return dressed(func(*args, **_without_format(kwargs)), spec_of(args[0]))


def _without_format(kwargs: Any) -> Any:
    """This rank's elements are one-dimensional: a memory format does not apply."""
    return {k: v for k, v in kwargs.items() if k != "memory_format"}


# -- element by element ----------------------------------------------------------------------------


def on_parts(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    tensors = tensors_in((args, kwargs))
    base = _base_among(tensors, op.writes)
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors if spec_of(t) is None)
    elsewhere = op.writes_with(kwargs) and not op.writes  # `out` or `inplace`
    if base is None or elsewhere or (graded and not op.writes):  # autograd needs the whole result
        return on_whole(op, func, args, kwargs)
    args, kwargs = mapped((args, kwargs), lambda t: part_of(t, base))
    out = func(*args, **_without_format(kwargs))
    return out if op.writes else dressed(out, base)


def _base_among(tensors: Sequence[torch.Tensor], writes: bool) -> IntervalSpec | None:
    """Return the spec of the result: that of the tensor which is written to, or of an interval of
    the shape that all broadcast to.
    """
    specs = [s for t in tensors if (s := spec_of(t)) is not None]
    if here.stepping:
        for spec in specs:
            if any(_is_local(t, spec) for t in tensors):
                return spec
    if writes:
        return spec_of(tensors[0])
    shape = _broadcast([*map(shape_of, tensors)])
    return next((s for s in specs if s.shape == shape), None)


def on_lists(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a `_foreach_` function on lists with intervals, item by item."""
    bases = [spec_of(t) for t in args[0]]

    def parts(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and tensors_in(value):
            pairs = zip(value, bases, strict=False)  # torch says if a list is shorter
            return [whole_of(t, op.name) if s is None else part_of(t, s) for t, s in pairs]
        return whole_of(value, op.name)  # a number for all

    out = func(*map(parts, args), **whole_of(kwargs, op.name))
    return out and list(map(dressed, out, bases))


def unscale(op: Operator, func: Any, args: Any, kwargs: Any) -> None:
    """Unscale gradients for torch.amp.GradScaler. If one rank finds an infinity, the flag is set on
    all; the host does not wait.
    """
    func(*args, **kwargs)
    specs = filter(None, map(spec_of, args[0]))
    for engine in dict.fromkeys(spec.home()[1] for spec in specs):
        engine.agree_on_overflow(args[1])


def part_of(t: torch.Tensor, base: IntervalSpec) -> torch.Tensor:
    """Return the elements of `t`, which broadcasts to the shape of `base`, that belong to this
    rank's part of it. Collective if `t` is an interval that is cut in another way.
    """
    spec = spec_of(t)
    if spec is not None:
        if spec.cut == base.cut and spec.shape == base.shape:
            return t
        t = spec.gather(t, "a part of another cut")
    elif _is_local(t, base) or not t.dim():
        return t
    return base.piece(t.detach())


def _is_local(t: torch.Tensor, base: IntervalSpec) -> bool:
    """Whether a plain tensor holds only this rank's elements of `base`. True only inside an
    optimizer's step, for its parameters, gradients and states.
    """
    return (
        here.stepping > 0
        and spec_of(t) is None
        and tuple(t.shape) == (base.stop - base.start,)
        and t.shape != base.shape
    )


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


def _seen(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the view that `func` makes of a tensor of the whole's shape without memory, which tells
    where its elements are. None if its first argument is plain; if it makes something else, or a view
    in which elements repeat (torch forbids writes to these); or if it asks for elements of the others.
    """
    if spec_of(args[0]) is None:
        return None
    (first, *rest), kwargs = mapped((args, kwargs), _without_memory)
    try:
        seen = func(first, *rest, **kwargs)
    except Exception:
        return None
    found = tensors_in(seen)
    views = all(storage_of(t) == storage_of(first) and not _repeats(t) for t in found)
    return seen if found and views else None


def _without_memory(t: torch.Tensor) -> torch.Tensor:
    spec = spec_of(t)
    return t if spec is None else spec.stand_in(t.dtype)


def _repeats(t: torch.Tensor) -> bool:
    return any(step == 0 and n > 1 for step, n in zip(t.stride(), t.shape, strict=True))


def _cut(op: Operator, seen: torch.Tensor, source: torch.Tensor) -> Any:
    """Return the part of `source` where `seen`, a view of the whole, has its elements."""
    spec: Any = spec_of(source)
    same = seen.shape == spec.shape and not seen.storage_offset()
    if not seen.is_contiguous() or seen.dtype != source.dtype or (spec.box and not same):
        raise refusal(op, source)
    into = spec if same else spec.within(seen.storage_offset() if seen.numel() else 0, seen.shape)
    first = into.first - spec.first + into.start - spec.start if into.stop > into.start else 0
    part = source[first : first + into.stop - into.start]
    return dress(part.conj() if seen.is_conj() else part, into)


def set_item(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Fill a view whose elements keep their order, such as rows of a gradient, with a number."""
    target, index, value = args
    seen = _seen(_T.__getitem__, (target, index), {})
    if seen is None or not seen.is_contiguous() or isinstance(value, torch.Tensor):
        return on_whole(op, func, args, kwargs)
    _cut(op, seen, target).fill_(value)  # torch refuses a view of a leaf with gradients


def set_data(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Run `interval.data = value`: copy the values; the interval keeps its memory."""
    target, value = args
    spec: Any = spec_of(target)
    if value.dtype != target.dtype or shape_of(value) != spec.shape:
        raise spec.mismatch(value)
    target.copy_(part_of(value, spec).detach())


# -- on the whole ----------------------------------------------------------------------------------
#
# Functions on the gathered whole. Collective: every rank must run them.


def whole_of(value: Any, what: str) -> Any:
    """Return `value` with each interval in it gathered. Collective."""

    def gathered(t: torch.Tensor) -> torch.Tensor:
        spec = spec_of(t)
        # A parameter is read in the dtype that it shows; its masters may be in another.
        shown = getattr(t.__dict__.get("onefold"), "declared", t.dtype)
        return t if spec is None else spec.gather(t.detach(), what).to(shown)

    return mapped(value, gathered)


def draw(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Draw random numbers for the whole on every rank: one draw, where ranks have equal seeds."""
    with torch.no_grad():  # as torch.nn.init
        return on_whole(op, func, args, kwargs, draws=True)


def on_whole(op: Operator, func: Any, args: Any, kwargs: Any, draws: bool = False) -> Any:
    """Return a view as an interval, if its elements keep their order. Run any other function on
    gathered copies, and keep this rank's slice of the one that it writes to. `draws`: it reads no
    elements, so nothing is gathered.

    Raises:
        ShardedParameterError: it wrote to another copy, or returns a view of one in another order.
    """
    target: Any = None
    if op.writes_with(kwargs):
        target = args[0] if kwargs.get("out") is None else kwargs["out"]
    elif not draws and (seen := _seen(func, args, kwargs)) is not None:
        return mapped(seen, lambda t: _cut(op, t, args[0]))
    spec = spec_of(target)
    copies: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def copied(t: torch.Tensor) -> torch.Tensor:
        if (found := spec_of(t)) is None:
            return t
        if id(t) not in copies:
            copy = (
                torch.empty(found.shape, dtype=t.dtype, device=t.device)
                if draws
                else found.gather(t, op.name)
                if t is target
                else whole_of(t, op.name)
            )
            copies[id(t)] = t, copy, _version(copy)
        return copies[id(t)][1]

    def returned(t: torch.Tensor) -> Any:
        """What lies in a copy becomes an interval again: writes to the copy would be lost."""
        for source, copy, _ in copies.values() if t.layout is torch.strided else ():
            if storage_of(t) == storage_of(copy) and not _repeats(t):
                return _cut(op, t, source)
        return t

    with torch.set_grad_enabled(torch.is_grad_enabled() and spec is None):
        given_args, given = mapped((args, kwargs), copied)
        out = func(*given_args, **given)
        for t, copy, before in copies.values():
            if copy.shape != shape_of(t) or (t is not target and _version(copy) != before):
                raise refusal(op, t)
        if isinstance(out, np.ndarray):
            out.setflags(write=False)
        if spec is None:
            return mapped(out, returned)
    return target.copy_(spec.piece(copies[id(target)][1]))  # torch refuses a leaf with gradients


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version


# -- to one number ---------------------------------------------------------------------------------

_NARROW = (torch.float16, torch.bfloat16)
#: {name: (reduces this rank's elements to a number, what it is of no elements)}
_NUMBERS: dict[str, tuple[Any, float]] = {
    **dict.fromkeys(("sum", "mean"), (_T.sum, 0)),
    **dict.fromkeys(("max", "amax"), (_T.amax, -math.inf)),
    **dict.fromkeys(("min", "amin"), (_T.amin, math.inf)),
    "any": (_T.any, 0),
    "all": (_T.all, 1),
    "count_nonzero": (_T.count_nonzero, 0),
}


def reduce(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Reduce the whole to one number, by one exchange of a number of every rank; on the whole where
    that is not enough (a dimension, integers).
    """
    x, spec = args[0], spec_of(args[0])
    here, of_none = _NUMBERS[op.name]
    every = _T.sum if here is _T.count_nonzero else here
    known = x.is_floating_point() or x.dtype == torch.bool
    if spec is None or not spec.numel or not known or _given(args, kwargs):
        return on_whole(op, func, args, kwargs)
    kind = func(spec.stand_in(x.dtype)).dtype  # raises where torch does
    mine = (
        here(x.float() if x.dtype in _NARROW else x)
        if x.numel()
        else torch.tensor(of_none, device=x.device)
    )
    total = every(spec.exchange(mine.double().reshape(1), op.name))
    return (total / spec.numel if op.name == "mean" else total).to(x.device, kind)


def norm(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the norm of all elements, for p > 0; others, and those along a dimension, on the whole.
    Also the norms of a list of tensors.
    """
    given = _given(args, kwargs)
    p = 2 if "fro" in given.values() else next(iter(given.values()), 2)
    known = given.keys() <= {0, "p", "ord"} and isinstance(p, (int, float)) and p > 0
    if not known or (op.name == "linalg_norm" and given):  # the norm of an operator
        return on_whole(op, func, args, kwargs)
    return norms_of([args[0]], p)[0] if op.name != "_foreach_norm" else norms_of(args[0], p)


def _given(args: Any, kwargs: Any) -> dict[int | str, Any]:
    """Return what is given beyond the first argument, by place or name."""
    rest = (*enumerate(args[1:]), *kwargs.items())
    return {k: v for k, v in rest if v is not None and v is not False}


def norms_of(tensors: Sequence[torch.Tensor], p: float) -> list[torch.Tensor]:
    """Return the p-norms of whole tensors, each 0-dim. All that share their ranks, a device and a
    dtype take one call and one exchange of numbers.

    Norms of 16-bit parts are in fp32: the result is rounded once, when all parts are combined.
    """
    out, alike = list(tensors), dict[Any, list[int]]()
    for i, t in enumerate(tensors):
        ranks = (spec := spec_of(t)) and spec.home()[0].owners_group
        alike.setdefault((ranks, t.device, t.dtype), []).append(i)
    for (ranks, device, dtype), indices in alike.items():
        parts, shared = [tensors[i] for i in indices], ranks is not None
        if shared:  # some may be empty here
            parts = [t if t.numel() else t.new_zeros(1) for t in map(local_part, parts)]
        low = torch.float32 if shared and dtype in _NARROW else None
        found: Sequence[torch.Tensor] = torch._foreach_norm(parts, p, dtype=low)
        if shared:
            spec, *others = (s for i in indices if (s := spec_of(tensors[i])) is not None)
            what = "the norm" if p == 2 else f"the {p:g}-norm"
            every = spec.exchange(torch.stack(list(found)).double(), what, others).to(device)
            total = torch.linalg.vector_norm(every, p, dim=0)  # the norm of norms
            found = total.to(dtype.to_real()).unbind()
        for i, one in zip(indices, found, strict=True):
            out[i] = one
    return out


# -- which of them, by torch's schemas --------------------------------------------------------------


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: What runs a function, by its name.
EXCEPTIONS: dict[str, Run] = {
    name: run
    for run, names in {
        # Element by element, but without the tag, or without a schema of this name
        on_parts: "copy_ fill_ zero_ abs_ eq_ ne_ ge_ gt_ le_ lt_ copysign_ gelu_ mish_ relu6_"
        " gcd_ lcm_ heaviside_ xlogy_ threshold_ masked_fill_ __invert__ true_divide true_divide_",
        # The result may be the tensor itself, and a meta tensor cannot show what another device does
        convert: "to type type_as pin_memory float double half bfloat16 cfloat cdouble chalf int long"
        " short char byte bool cpu cuda xpu hpu ipu mtia"
        " empty_like zeros_like ones_like full_like",
        draw: "rand_like randn_like randint_like normal_ uniform_ random_ exponential_ cauchy_ log_normal_ geometric_",
        # Tensors of another shape; what is said to write, but not to elements; questions with a
        # second argument
        of_itself: "new new_tensor new_empty new_empty_strided new_full new_ones new_zeros"
        " requires_grad_ retain_grad detach_ record_stream as_subclass"
        " _has_compatible_shallow_copy_type",
        # Those of one number a rank, and those that share a name with them
        reduce: "sum mean max min amax amin any all count_nonzero",
        norm: "norm linalg_vector_norm linalg_norm _foreach_norm",
        # Syntax of Python, not operators
        set_item: "__setitem__",
        formatted: "__format__",
        set_data: "data__set__",
        # It writes to the rows of this rank's batch; and elements could be read without torch
        refuse: "embedding_renorm_ storage __dlpack__ set_ resize_ resize_as_",
        # The ranks must agree on its flag
        unscale: "_amp_foreach_non_finite_check_and_unscale_",
    }.items()
    for name in words(names)
}

OF_AUTOGRAD = words(
    "grad__set__ requires_grad__set__ register_hook register_post_accumulate_grad_hook"
)
#: Modules of torch whose functions in Python compute with their arguments alone.
_MODULES = {
    f"torch.{name}"
    for name in words("_tensor functional nn.functional _jit_internal _linalg_utils _lowrank")
}
#: Functions of torch.distributed that read the tensor they send, and write to other tensors only.
_SENDS = words("send isend all_gather gather")
_ACCESSORS = ("__get__", "__set__", "__delete__")
_ANSWERS = (
    bool, int, float, str, bytes, tuple, list, type, torch.dtype, torch.device, torch.layout,
    torch.UntypedStorage, torch.TypedStorage,
)  # fmt: skip


@cache
def operator_of(func: Any) -> Operator:
    """Return what is known of `func`, as torch passes it to `__torch_function__`."""
    name, module = getattr(func, "__name__", str(func)), getattr(func, "__module__", None)
    if name in _ACCESSORS:
        return _of_attribute(func, name)
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _by_overloads(name.partition(".")[0], _overloads(func))
    if module == "torch.nn.init":
        return Operator("init", draw, True)
    if module == "torch.distributed.distributed_c10d":
        return Operator(name, refuse, name not in _SENDS)
    if not (
        module in _MODULES
        if isinstance(func, FunctionType)
        else module is None or module.partition(".")[0] == "torch"
    ):
        return Operator(name, refuse)
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if module == "torch._tensor" and hasattr(func, "__wrapped__"):
        return Operator(name, call_python, in_place)
    if (run := EXCEPTIONS.get(name)) is not None:
        return Operator(name, run, in_place and run is not of_itself)
    overloads = _overloads(getattr(torch.ops.aten, name, None))
    if not any(_has_tensor(o._schema.returns) for o in overloads) and (asks := _asks(func)):
        return Operator(name, asks)
    if overloads:
        return _by_overloads(name, overloads)
    return Operator(name, refuse if in_place else on_whole, in_place)


def _of_attribute(func: Any, accessor: str) -> Operator:
    attribute = func.__self__
    name = getattr(attribute, "__name__", None) or attribute.fget.__name__
    if accessor == "__get__":
        return Operator(name, _asks(func, absent=True) or on_whole)
    return Operator(name + accessor, EXCEPTIONS.get(name + accessor, refuse))


def _asks(func: Any, absent: bool = False) -> Run | None:
    """Return what answers `func` if it answers for tensors without elements, else None.

    A question is about the shape if the answer is the same for two tensors of one shape, and another
    for another shape. `absent`: None is an answer.
    """
    try:
        a, b, other = (func(torch.empty(s, device="meta")) for s in ((2, 3), (2, 3), (5,)))
    except Exception:
        return None
    if not isinstance(a, _ANSWERS) and not (a is None and absent):
        return None
    return of_shape if a == b != other else of_itself


# -- schemas ---------------------------------------------------------------------------------------


def _overloads(func: Any) -> list[Any]:
    """Return the overloads of an operator that take tensors, except those that write to `out`.

    TorchScript adds overloads for lists of tensors to some (`sort`): they are left out.
    """
    if isinstance(func, torch._ops.OpOverloadPacket):
        found = [getattr(func, overload) for overload in func.overloads()]
    else:
        found = [func] if isinstance(func, torch._ops.OpOverload) else []
    found = [
        o
        for o in found
        if _has_tensor(o._schema.arguments)
        and not any(a.kwarg_only and is_written(a) for a in o._schema.arguments)
    ]
    return [o for o in found if "List" not in str(o._schema.arguments[0].type)] or found


def _has_tensor(declared: Sequence[Any]) -> bool:
    return any("Tensor" in str(a.type) for a in declared)


def _by_overloads(name: str, overloads: list[Any]) -> Operator:
    """Return what is known of an operator. One whose overloads differ is done on the whole."""
    aten = bool(overloads) and all(o.namespace == "aten" for o in overloads)
    run: Run = on_whole if aten else refuse
    if aten and name in EXCEPTIONS:
        run = EXCEPTIONS[name]
    elif overloads and all(map(_is_pointwise, overloads)):
        run = on_parts
    elif name.startswith("_foreach_"):  # by item, if the function of one tensor is by element
        item = getattr(torch.ops.aten, name[9:].rstrip("_"), None)
        run = on_lists if _by_overloads(name[9:], _overloads(item)).run is on_parts else on_whole
    return Operator(name, run, any(is_written(o._schema.arguments[0]) for o in overloads))


def _is_pointwise(op: Any) -> bool:
    """Whether each element of the result depends on the elements in its place, and on no others."""
    draws_or_counts = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}
    elsewhere = any(map(is_written, op._schema.arguments[1:]))
    return torch.Tag.pointwise in op.tags and not (elsewhere or draws_or_counts & set(op.tags))
