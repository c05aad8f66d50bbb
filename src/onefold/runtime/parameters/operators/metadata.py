"""Questions that need no elements: shape, strides and the like, answered for the whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onefold.runtime.parameters.interval import IntervalSpec, ShardedParameterError, dress, spec_of
from onefold.runtime.parameters.operators.names import words
from onefold.runtime.parameters.operators.refusals import subject_of


def _size(spec: IntervalSpec, _: Any, dim: int | None = None) -> Any:
    return spec.shape if dim is None else spec.shape[dim]


def _stride(spec: IntervalSpec, _: Any, dim: int | None = None) -> Any:
    strides, step = [], 1
    for n in reversed(spec.shape):
        strides.append(step)
        step *= max(n, 1)
    strides.reverse()
    return tuple(strides) if dim is None else strides[dim]


def _len(spec: IntervalSpec, _: Any) -> int:
    if not spec.shape:
        raise TypeError("len() of a 0-d tensor")
    return spec.shape[0]


#: {name: the function that answers it, from the interval's spec, the tensor and the arguments}.
META: dict[str, Callable[..., Any]] = {
    "shape": lambda spec, _: spec.shape,
    "size": _size,
    "dim": lambda spec, _: len(spec.shape),
    "ndim": lambda spec, _: len(spec.shape),
    "ndimension": lambda spec, _: len(spec.shape),
    "numel": lambda spec, *_, **__: spec.numel,
    "nelement": lambda spec, _: spec.numel,
    "__len__": _len,
    "stride": _stride,
    "storage_offset": lambda spec, _: 0,
    "is_contiguous": lambda spec, *_, **__: True,
    "is_non_overlapping_and_dense": lambda spec, *_: True,
    "dim_order": lambda spec, *_, **__: tuple(range(len(spec.shape))),
    "nbytes": lambda spec, t: spec.numel * t.element_size(),
    "is_same_size": (
        lambda spec, _, other: (
            spec.shape == (found.shape if (found := spec_of(other)) is not None else other.shape)
        )
    ),
}


#: Names of all metadata, of the whole tensor and of the local one.
METADATA = frozenset(META) | words(
    "dtype device is_leaf requires_grad layout is_cuda is_cpu is_meta itemsize is_floating_point"
    " is_complex element_size"
)


def metadata_of(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "requires_grad_" and (args[1:] or (kwargs.get("requires_grad", True),))[0]:
        raise ShardedParameterError(
            f"requires_grad_() on one rank's part of {subject_of(args, kwargs)}: gradients of it"
            " would be of a part. Use the parameter itself, which is gathered where gradients are"
            " needed, or a whole copy: parameter.onefold.gather() (on every rank)."
        )
    out = func(*args, **kwargs)
    spec = spec_of(args[0]) if name in ("pin_memory", "detach_") else None
    return (
        out
        if spec is None or not isinstance(out, torch.Tensor) or spec_of(out)
        else dress(out, spec)
    )
