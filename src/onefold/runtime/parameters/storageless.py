"""Storageless tensors: a shape and a dtype without memory. They stand for elements that are stored
on NVMe or encoded.

A kernel that is given a tensor without memory may read address 0. So user code only sees them as a
`Storageless`, which answers questions about its shape and raises an explanation otherwise.
"""

from __future__ import annotations

from typing import Any

import torch

from onefold.runtime.parameters.interval import IntervalSpec, dispatches, over, spec_of
from onefold.runtime.parameters.operators import META, name_of


class StoragelessError(RuntimeError):
    """Elements on NVMe, or encoded ones, were used as if they were in memory."""


def storageless(like: torch.Tensor, what: str) -> torch.Tensor:
    """Return a storageless tensor with the shape, dtype and device of `like`. `what` describes it
    in messages.
    """
    out = torch.empty_like(like.detach())
    out.untyped_storage().resize_(0)
    return seen_storageless(out, what, spec_of(like))


def seen_storageless(t: torch.Tensor, what: str, spec: IntervalSpec | None = None) -> torch.Tensor:
    """Return the storageless tensor `t` as a `Storageless`, which user code may see. With a `spec`
    it shows the shape of the whole.
    """
    if dispatches(type(t)):
        seen: Any = t
        seen.__class__ = over(Storageless, type(t))
    else:
        seen = t.as_subclass(Storageless)
    seen.what, seen.spec = what, spec
    return seen


def is_storageless(t: torch.Tensor) -> bool:
    """Whether `t` should have memory and has none."""
    return t.numel() > 0 and t.device.type != "meta" and t.untyped_storage().nbytes() == 0


def storageless_error(func: Any, what: str) -> StoragelessError:
    """Return the error for code that computes with something storageless."""
    return StoragelessError(
        f"{getattr(func, '__name__', func)} was given {what}, whose elements are stored on NVMe or"
        " encoded. Read a parameter with `parameter.onefold.gather()` (on every rank), write with"
        " `onefold.full_params(model, write=True)`, clip with onefold.clip_grad_norm_, drop"
        " gradients with zero_grad() (set_to_none=True, its default); offload_gradients='cpu'"
        " keeps gradients in memory."
    )


class Storageless(torch.Tensor):
    """See the docstring of this module."""

    what: str = "a tensor"
    spec: IntervalSpec | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if (
            isinstance(first, Storageless)
            and first.spec is not None
            and (meta := META.get(name_of(func))) is not None
        ):
            return meta(first.spec, *args, **(kwargs or {}))
        if func in NEEDS_NO_ELEMENTS or func in _MADE_WITHOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise storageless_error(
            func,
            next(
                (t.what for t in _tensors((args, kwargs)) if isinstance(t, Storageless)), "a tensor"
            ),
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Storageless({self.what}, on NVMe or encoded)"


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    return [value]


_T: Any = torch.Tensor
#: Functions that do not need a tensor's elements, and return none of them.
NEEDS_NO_ELEMENTS = {
    getattr(_T, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "is_leaf", "requires_grad", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse",
                 "itemsize", "nbytes", "grad", "grad_fn", "_version", "is_quantized", "names", "is_nested")
    if hasattr(_T, name)
} | {
    _T.size, _T.dim, _T.numel, _T.nelement, _T.is_floating_point, _T.is_complex, _T.element_size, _T.stride, _T.__len__, _T.is_contiguous,
    _T.requires_grad_, _T.__hash__, _T.untyped_storage, _T.storage_offset, _T.get_device, _T.as_subclass,
    torch.is_floating_point, torch.is_complex, torch.numel, _T.grad.__set__, _T.requires_grad.__set__,
    _T.register_hook, _T.register_post_accumulate_grad_hook,
}  # fmt: skip
#: Functions whose result has the elements of their argument, so that it may be storageless too.
_MADE_WITHOUT = {_T.data.__get__, _T.detach, _T.detach_}


class StatePlace(torch.Tensor):
    """A placeholder in `optimizer.state` for a state on NVMe. Copying or pickling it raises, since
    the copy would not hold the state. With a `spec` it shows the shape of the whole to user code.
    """

    spec: IntervalSpec | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if isinstance(first, StatePlace) and first.spec is not None:
            meta = META.get(name_of(func))
            if meta is not None:
                return meta(first.spec, *args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @staticmethod
    def of(shape: Any, dtype: torch.dtype) -> StatePlace:
        return torch.empty(shape, dtype=dtype, device="meta").as_subclass(StatePlace)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise _elsewhere()

    def __deepcopy__(self, memo: Any) -> Any:
        raise _elsewhere()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _elsewhere()


def _elsewhere() -> StoragelessError:
    return StoragelessError(
        "a state of the optimizer was to be copied or pickled, and it is stored on NVMe:"
        " local_state_dict() holds a place for it only. optimizer.state_dict() brings the whole to"
        " rank 0's host; onefold.save and onefold.load write and read it at any stage and tier."
    )
