"""What a function of torch does on an interval, decided from what torch declares of its operators.

| torch declares                                             | on an interval                                    |
|------------------------------------------------------------|---------------------------------------------------|
| `Tag.pointwise`, or the form without `_` has it            | POINTWISE: computed on this rank's elements       |
| no tensor in the result, and it answers on the meta device | SHAPE, ITSELF: a question that needs no elements  |
| arguments for dtype, layout and device                     | LIKE, NEW: makes a new tensor                     |
| a random generator, and a write to its only tensor         | DRAW: this rank's slice of a whole draw           |
| `Tag.inplace_view`, or a write to another argument         | REFUSED                                           |
| a result that shares memory with an argument               | VIEW: an interval if elements keep their order    |
| none of these, or overloads that differ                    | WHOLE: on the gathered whole                      |
| no schema, but it is torch's                               | WHOLE: refused if it writes, or returns its memory |
| not torch's, and not `Tag.pointwise`                       | REFUSED                                           |

`EXCEPTIONS` names the functions of which torch declares too little. What a function does is decided
once, and is one lookup from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import FunctionType
from typing import Any

import torch


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


Does = Enum(
    "Does",
    "POINTWISE CONVERT LISTS SHAPE ITSELF LIKE NEW DRAW REFUSED VIEW WHOLE REDUCE"
    " PYTHON SET_ITEM SET_DATA FORMAT UNSCALE",
)

#: {name: what the function does}, where torch declares too little.
EXCEPTIONS: dict[str, Does] = {
    # Element by element, but without the tag, or without a schema of this name
    **dict.fromkeys(words("copy_ fill_ zero_ __invert__ true_divide true_divide_"), Does.POINTWISE),
    "masked_fill_": Does.POINTWISE,
    # The result may be the tensor itself, and a meta tensor cannot show what another device does.
    # Methods named like a dtype or a device count too: `float`, `cuda`
    **dict.fromkeys(("to", "type", "type_as", "pin_memory"), Does.CONVERT),
    # They make tensors, and have no schema
    **dict.fromkeys(("new", "new_tensor"), Does.NEW),
    # Said to write, but not to elements
    **dict.fromkeys(("requires_grad_", "retain_grad", "detach_", "record_stream"), Does.ITSELF),
    # Questions with a second argument
    **dict.fromkeys(("as_subclass", "_has_compatible_shallow_copy_type"), Does.ITSELF),
    # Syntax of Python, not operators
    "__getitem__": Does.VIEW,
    "__setitem__": Does.SET_ITEM,
    "__iter__": Does.VIEW,
    "__format__": Does.FORMAT,
    "data__set__": Does.SET_DATA,
    # It writes to the rows of this rank's batch
    "embedding_renorm_": Does.REFUSED,
    # Its elements could be read without a function of torch
    "storage": Does.REFUSED,
    # The ranks must agree on its flag
    "_amp_foreach_non_finite_check_and_unscale_": Does.UNSCALE,
}

#: Reductions that ranks can make of one number each (operators.py).
REDUCTIONS = words(
    "sum mean norm linalg_vector_norm linalg_norm max min amax amin any all count_nonzero"
)

QUESTIONS = frozenset((Does.SHAPE, Does.ITSELF))
_ABOUT_ITSELF = QUESTIONS | {Does.LIKE, Does.NEW}

#: Modules of torch whose functions in Python compute with their arguments alone.
_MODULES = {
    f"torch.{name}"
    for name in words("_tensor functional nn.functional _jit_internal _linalg_utils _lowrank")
}
_DECLARED = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_ACCESSORS = ("__get__", "__set__", "__delete__")
_SAID = {"__getitem__": "[...]", "__setitem__": "[...] =", "__iter__": "iter"}
_ANSWERS = (
    bool, int, float, str, bytes, tuple, list, type, torch.dtype, torch.device, torch.layout,
    torch.UntypedStorage, torch.TypedStorage,
)  # fmt: skip


class Operator:
    """What is known of a function.

    Attributes:
        name: for messages: "add_", "sum", "shape", "data__set__" of a setter.
        does: what it does on an interval.
        writes: whether it changes its first argument.
        about_itself: whether it needs no elements.
        asks: whether it may be given a tensor that has a shape and no memory.
        random: whether it draws random numbers.
    """

    __slots__ = ("about_itself", "asks", "does", "name", "random", "writes")

    def __init__(self, name: str, does: Does, writes: bool = False, random: bool = False) -> None:
        self.name, self.does, self.writes, self.random = _SAID.get(name, name), does, writes, random
        self.about_itself = does in _ABOUT_ITSELF or name == "detach"
        self.asks = does in QUESTIONS and name != "data_ptr"

    def writes_with(self, kwargs: dict[str, Any]) -> bool:
        """Whether a call with these keywords changes its first argument, or `out`."""
        return self.writes or kwargs.get("out") is not None or kwargs.get("inplace") is True


_known: dict[Any, Operator] = {}


def operator_of(func: Any) -> Operator:
    """Return what is known of `func`, as torch passes it to `__torch_function__`."""
    found = _known.get(func)
    if found is None:
        found = _known[func] = _decided(func)
    return found


def _decided(func: Any) -> Operator:
    name, module = getattr(func, "__name__", str(func)), getattr(func, "__module__", None)
    if name in _ACCESSORS:
        return _of_attribute(func, name)
    if isinstance(func, _DECLARED):
        return _by_overloads(name.partition(".")[0], _overloads(func))
    if module == "torch.nn.init":
        return Operator("init", Does.DRAW, True)
    if not _is_torchs(func, module):
        return Operator(name, Does.REFUSED)
    in_place = name.endswith("_") and not name.endswith("__")
    if module == "torch._tensor" and hasattr(func, "__wrapped__"):
        return Operator(name, Does.PYTHON, in_place)
    if (does := EXCEPTIONS.get(name)) is not None:
        return Operator(name, does, does is not Does.ITSELF and (in_place or name == "__setitem__"))
    if _is_conversion(name):
        return Operator(name, Does.CONVERT)
    overloads = _overloads(getattr(torch.ops.aten, name, None))
    if not any(_has_tensor(o._schema.returns) for o in overloads) and (asks := _asks(func)):
        return Operator(name, asks)
    if overloads:
        return _by_overloads(name, overloads)
    return Operator(name, Does.REFUSED if in_place else Does.WHOLE, in_place)


def _is_torchs(func: Any, module: str | None) -> bool:
    if isinstance(func, FunctionType):
        return module in _MODULES
    return module is None or module.partition(".")[0] == "torch"


def _of_attribute(func: Any, accessor: str) -> Operator:
    attribute = func.__self__
    name = getattr(attribute, "__name__", None) or attribute.fget.__name__
    if accessor == "__get__":
        return Operator(name, _asks(func, absent=True) or Does.VIEW)
    return Operator(name + accessor, EXCEPTIONS.get(name + accessor, Does.REFUSED))


def _asks(func: Any, absent: bool = False) -> Does | None:
    """Return what `func` asks if it answers for tensors without elements, else None.

    A question is about the shape if the answer is the same for two tensors of one shape, and another
    for another shape. `absent`: None is an answer.
    """
    try:
        a, b, other = (func(torch.empty(s, device="meta")) for s in ((2, 3), (2, 3), (5,)))
    except Exception:
        return None
    if not isinstance(a, _ANSWERS) and not (a is None and absent):
        return None
    return Does.SHAPE if a == b != other else Does.ITSELF


def _is_conversion(name: str) -> bool:
    try:
        return isinstance(getattr(torch, name, None), torch.dtype) or bool(torch.device(name))
    except RuntimeError:
        return False


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
    writes = any(_is_written(o._schema.arguments[0]) for o in overloads)
    random = any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads)
    kinds = {_by_schema(o) for o in overloads} or {Does.REFUSED}
    does = kinds.pop() if len(kinds) == 1 else Does.WHOLE
    if rest := kinds & {Does.REFUSED, Does.REDUCE}:
        does = Does.REFUSED if Does.REFUSED in rest else Does.REDUCE
    return Operator(name, does, writes, random)


def _by_schema(op: Any) -> Does:
    arguments, tags = op._schema.arguments, op.tags
    names = [a.name for a in arguments]
    written = [a for a in arguments if _is_written(a)]
    in_place = [a.name for a in written] == names[:1]
    name = op._schema.name.partition("::")[2]
    if _is_pointwise(op) and (in_place or not written):
        return Does.POINTWISE
    if op.namespace != "aten":
        return Does.REFUSED
    if (does := EXCEPTIONS.get(name)) is not None:
        return does
    if name.startswith("_foreach_") and (in_place or not written) and _is_by_item(name[9:]):
        return Does.LISTS
    if written:
        return _by_write(arguments, tags) if in_place else Does.REFUSED
    if any(r.alias_info is not None for r in op._schema.returns):
        return Does.VIEW
    if {"dtype", "layout", "device"} <= set(names) and names[0] == "self":
        alone = not _has_tensor(arguments[1:]) and not {"non_blocking"} & set(names)
        if alone and {"memory_format", "size"} & set(names):
            return Does.LIKE if "memory_format" in names else Does.NEW
    return Does.REDUCE if name in REDUCTIONS else Does.WHOLE


def _by_write(arguments: Sequence[Any], tags: Sequence[Any]) -> Does:
    names = {a.name for a in arguments}
    if torch.Tag.inplace_view in tags:
        return Does.REFUSED
    draws = torch.Tag.nondeterministic_seeded in tags and "generator" in names
    # Layers that draw in training read their elements, too
    if draws and "training" not in names and not _has_tensor(arguments[1:]):
        return Does.DRAW
    return Does.WHOLE


def _is_pointwise(op: Any) -> bool:
    if torch.Tag.pointwise in op.tags:
        random_or_number = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}
        return not random_or_number & set(op.tags)
    space, _, name = op._schema.name.partition("::")
    if space != "aten" or not name.endswith("_") or not _is_written(op._schema.arguments[0]):
        return False
    form = getattr(getattr(torch.ops.aten, name[:-1], None), op._overloadname, None)
    return form is not None and _is_pointwise(form)


def _is_by_item(name: str) -> bool:
    """Whether `_foreach_` + `name` is `name`, element by element, of each tensor of a list; or the
    norm of each, of which an exchange serves all.
    """
    if name.rstrip("_") in REDUCTIONS:
        return name == "norm"
    of_item = _overloads(getattr(torch.ops.aten, name, None))
    return EXCEPTIONS.get(name) is Does.POINTWISE or any(map(_is_pointwise, of_item))
