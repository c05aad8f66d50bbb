"""Operations on the gathered whole. Collective: every rank must run them."""

from __future__ import annotations

from typing import Any

import torch

from onefold.runtime.parameters.interval import spec_of
from onefold.runtime.parameters.operators.names import LEAF, READ, READ_VIEWS
from onefold.runtime.parameters.operators.refusals import refusal


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
