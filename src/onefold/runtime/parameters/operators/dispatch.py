"""Choose the implementation of an operation on intervals, by the table of this package."""

from __future__ import annotations

from typing import Any

import torch

from onefold.runtime.parameters.interval import (
    ShardedParameterError,
    disable_torch_function,
    dress,
    spec_of,
)
from onefold.runtime.parameters.operators.names import (
    DRAWN,
    DRAWN_LIKE,
    DUNDERS,
    ELEMENTWISE,
    FRESH,
    LIKE,
    LOCAL,
    META,
    NUMBERS,
    READ_VIEWS,
    REDUCED,
    REFUSED,
    VIEWS,
    WRITTEN,
    metadata_of,
    refusal,
    subject_of,
    tensors_among,
)
from onefold.runtime.parameters.operators.rules import (
    as_number,
    draw,
    draw_like,
    elementwise,
    expanded,
    get_item,
    give_to,
    given_out,
    like_another,
    on_lists,
    on_locals,
    only_reads,
    read_whole,
    reduce_to_number,
    set_item,
    unscale,
    view_of,
    whole_of,
    write_whole,
)

_names: dict[Any, str] = {}


def name_of(func: Any) -> str:
    """Return the name of `func` in the tables: "add_", "sum", "shape"; "init" for functions of
    torch.nn.init.
    """
    known = _names.get(func)
    if known is None:
        known = getattr(func, "__name__", str(func))
        if known in ("__get__", "__set__", "__delete__"):
            known = func.__self__.__name__ + ("" if known == "__get__" else known)
        elif getattr(func, "__module__", "") == "torch.nn.init":
            known = "init"
        elif isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            known = known.partition(".")[0]
        _names[func] = known = DUNDERS.get(known, known)
    return known


def writes_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `func` changes its first argument, or `out`."""
    name = name_of(func)
    written = name.endswith("_") and not name.endswith("__")
    return (
        written
        or name in ("init", "__setitem__")
        or kwargs.get("out") is not None
        or kwargs.get("inplace") is True
    )


def is_about_itself(func: Any) -> bool:
    """Whether `func` needs no elements: it asks for metadata (a shape, a dtype), or makes a tensor
    like another.
    """
    name = name_of(func)
    return (
        name in META
        or name in LOCAL
        or name in LIKE
        or name in DRAWN_LIKE
        or name in FRESH
        or name in REFUSED
        or name == "detach"
    )


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `func` by the table of this package. `args` hold at least one interval, or a sharded
    parameter that is treated as one.

    Raises:
        ShardedParameterError: it cannot be done on a part; the message says what to write instead.
    """
    name = name_of(func)
    with disable_torch_function():
        meta = META.get(name)
        if meta is not None and (spec := spec_of(args[0])) is not None:
            return meta(spec, *args, **kwargs)
        if name == "data":
            return given_out(dress(func(args[0]), spec_of(args[0])), args[0])  # type: ignore[arg-type]
        if name in LOCAL:
            return metadata_of(func, name, args, kwargs)
        tensors = tensors_among((args, kwargs))
        kept = next(
            (spec for t in tensors if (spec := spec_of(t)) is not None and spec.unreduced), None
        )
        if kept is not None and name not in ("zero_", "_foreach_zero_"):
            raise ShardedParameterError(
                f"{name} was given the gradient of {kept.name!r} under onefold.no_sync, where"
                " `.grad` shows this rank's unreduced part only. Look at gradients, and change"
                " them, after the last micro-batch. Dropping them is fine: optimizer.zero_grad(),"
                " or `.grad = None`."
            )
        if name == "data__set__" and spec_of(args[0]) is not None:
            return give_to(*args)
        if name in REFUSED:
            raise refusal(func, name, args, kwargs)
        if name.startswith(("_foreach_", "_fused_")):
            return on_lists(func, name, args, kwargs)
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return unscale(func, *args)
        if (
            kwargs.get("requires_grad")
            and (name in LIKE or name in DRAWN_LIKE)
            and any(map(spec_of, tensors))
        ):
            raise ShardedParameterError(
                f"{name}({subject_of(args, kwargs)}, requires_grad=True) would be one rank's part,"
                " and gradients of it would be lost. Make a whole: torch.zeros(p.shape,"
                " device=p.device, requires_grad=True)."
            )
        if name in LIKE:
            return on_locals(func, args, kwargs)
        if name in DRAWN_LIKE:
            return draw_like(func, args, kwargs)
        if name in FRESH:
            if any(map(spec_of, tensors_among((args[1:], kwargs)))):  # new_tensor(p): a copy of it
                return func(args[0], *whole_of(args[1:], name), **whole_of(kwargs, name))
            return func(*args, **kwargs)
        if name == "init" or (
            name in DRAWN and spec_of(args[0]) and not any(map(spec_of, tensors[1:]))
        ):
            return draw(func, args, kwargs)
        if (kwargs.get("out") is not None or kwargs.get("inplace") is True) and name in ELEMENTWISE:
            return write_whole(func, name, args, kwargs)
        if name in ("to", "type_as") and isinstance(
            like := args[1] if len(args) > 1 else kwargs.get("other"), torch.Tensor
        ):
            return like_another(like, args, kwargs)
        if name == "where" and len(args) + len(kwargs) == 1:  # indices, as nonzero() has them
            return read_whole(func, name, args, kwargs)
        if (
            name in ELEMENTWISE
            or name in WRITTEN
            or (name in ("max", "min") and len(args) == 2 and isinstance(args[1], torch.Tensor))
        ):
            return elementwise(func, name, args, kwargs)
        if name == "__getitem__":
            return get_item(func, args, kwargs)
        if name == "__setitem__":
            return set_item(func, *args)
        if name == "__iter__":
            return iter(view_of(torch.Tensor.unbind, "unbind", args, kwargs))
        if name in VIEWS:
            return view_of(func, name, args, kwargs)
        if name in READ_VIEWS:
            return expanded(func, name, args, kwargs)
        if name in REDUCED and (answer := reduce_to_number(name, args, kwargs)) is not None:
            return answer
        if name in NUMBERS:
            return as_number(func, name, args, kwargs)
        if name == "__format__":
            return (
                as_number(func, name, args, kwargs) if not spec_of(args[0]).shape else repr(args[0])  # type: ignore[union-attr]
            )
        if writes_in_place(func, kwargs):
            return write_whole(func, name, args, kwargs)
        if only_reads(func, name):
            return read_whole(func, name, args, kwargs)
        raise refusal(func, name, args, kwargs)
