"""Which function of operators.py runs a function of torch on an interval, decided from what torch
declares of its operators.

| torch declares                                         | on an interval                                    |
|--------------------------------------------------------|---------------------------------------------------|
| `Tag.pointwise`                                        | `on_parts`: computed on this rank's elements      |
| `_foreach_`, and the function of one tensor has it     | `on_lists`: the same, item by item                |
| no tensor in the result, and the meta device answers   | `of_shape`, `of_itself`: a question that needs no |
|                                                        | elements                                          |
| `Tag.inplace_view`, or a write to another argument     | `refuse`                                          |
| a result that shares memory with an argument           | `view`: an interval if elements keep their order  |
| none of these, or overloads that differ                | `on_whole`: on the gathered whole                 |
| no schema, but it is torch's                           | `on_whole`; refused if it writes                  |
| not torch's, and not `Tag.pointwise`                   | `refuse`                                          |

`EXCEPTIONS` names the functions of which torch declares too little, and those that make tensors. What
a function does is decided once, and is one lookup from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch

from onefold.runtime.parameters.operators import (
    Operator,
    Run,
    call_python,
    convert,
    draw,
    formatted,
    make_like,
    norm,
    of_itself,
    of_shape,
    on_lists,
    on_parts,
    on_whole,
    reduce,
    refuse,
    set_data,
    set_item,
    unscale,
    view,
)


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
        " short char byte bool cpu cuda xpu hpu ipu mtia",
        make_like: "empty_like zeros_like ones_like full_like rand_like randn_like randint_like",
        draw: "normal_ uniform_ random_ exponential_ cauchy_ log_normal_ geometric_",
        # Tensors of another shape; what is said to write, but not to elements; questions with a
        # second argument
        of_itself: "new new_tensor new_empty new_empty_strided new_full new_ones new_zeros"
        " requires_grad_ retain_grad detach_ record_stream as_subclass"
        " _has_compatible_shallow_copy_type",
        # Those of one number a rank, and those that share a name with them
        reduce: "sum mean max min amax amin any all count_nonzero",
        norm: "norm linalg_vector_norm linalg_norm _foreach_norm",
        # Syntax of Python, not operators
        view: "__getitem__ __iter__",
        set_item: "__setitem__",
        formatted: "__format__",
        set_data: "data__set__",
        # It writes to the rows of this rank's batch; and elements could be read without torch
        refuse: "embedding_renorm_ storage __dlpack__",
        # The ranks must agree on its flag
        unscale: "_amp_foreach_non_finite_check_and_unscale_",
    }.items()
    for name in words(names)
}

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
        return Operator(name, _asks(func, absent=True) or view)
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
        and not any(a.kwarg_only and _is_written(a) for a in o._schema.arguments)
    ]
    return [o for o in found if "List" not in str(o._schema.arguments[0].type)] or found


def _has_tensor(declared: Sequence[Any]) -> bool:
    return any("Tensor" in str(a.type) for a in declared)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _by_overloads(name: str, overloads: list[Any]) -> Operator:
    """Return what is known of an operator. One whose overloads differ is done on the whole."""
    runs = {_by_schema(o) for o in overloads} or {refuse}
    run = refuse if refuse in runs else on_whole if len(runs) > 1 else runs.pop()
    return Operator(name, run, any(_is_written(o._schema.arguments[0]) for o in overloads))


def _by_schema(op: Any) -> Run:
    first, *rest = op._schema.arguments
    space, _, name = op._schema.name.partition("::")
    if space == "aten" and name in EXCEPTIONS:
        return EXCEPTIONS[name]
    in_place, elsewhere = _is_written(first), any(map(_is_written, rest))
    if _is_pointwise(op) and not elsewhere:
        return on_parts
    if space != "aten" or elsewhere or torch.Tag.inplace_view in op.tags:
        return refuse
    if name.startswith("_foreach_"):  # by item, if the function of one tensor is by element
        item = _overloads(getattr(torch.ops.aten, name[9:].rstrip("_"), None))
        named = EXCEPTIONS.get(name[9:]) or _by_overloads(name, item).run
        return on_lists if named is on_parts else on_whole
    aliases = any(r.alias_info is not None for r in op._schema.returns)
    return view if aliases and not in_place else on_whole


def _is_pointwise(op: Any) -> bool:
    """Whether each element of the result depends on the elements in its place, and on no others."""
    draws_or_counts = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}
    return torch.Tag.pointwise in op.tags and not draws_or_counts & set(op.tags)
