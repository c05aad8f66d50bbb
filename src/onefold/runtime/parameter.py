"""The sharded parameter: what the optimizer, and any code outside a gather, sees of a parameter that is divided.

It is an ordinary `nn.Parameter` over plain memory: this rank's interval of the parameter, one-dimensional, in master precision.

| who looks                                            | sees                                                               |
|------------------------------------------------------|--------------------------------------------------------------------|
| the optimizer, element-wise code                     | the local interval                                                 |
| the forward pass of the unit that owns it            | the whole parameter (another object, swapped in)                   |
| any other code inside a forward pass of the model    | the whole parameter, gathered on first use (shape, dtype: no gather)|
| code outside that needs the shape (linear, indexing) | `ShardedParameterError` with name, shape and the way to gather it  |

`parameter.onefold` holds name, logical shape, this rank's interval and `gather()`.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from onefold.runtime.hollow import explain, seen_hollow

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry

whole_sight = torch._C.DisableTorchFunctionSubclass  # inside it a ShardedParameter is a plain tensor


class ShardedParameterError(RuntimeError):
    """A sharded parameter was used as if it were whole."""


class ShardInfo:
    """What `parameter.onefold` says about a sharded parameter.

    Attributes:
        name: its name in the model.
        shape: its logical shape.
        interval: `(start, stop)`, the elements of the flattened parameter that this rank holds.
        dtype: the dtype it is computed in (the parameter itself is held in master precision).
        sharded: whether this rank holds only a part (stage 0 holds the whole, and still computes with another object).
        on_disk: whether its elements rest on NVMe, or encoded: the parameter has a shape, and no memory.
    """

    def __init__(self, entry: Entry, interval: tuple[int, int]) -> None:
        self._entry = weakref.ref(entry)
        self.name, self.shape, self.interval = entry.slot.name, torch.Size(entry.slot.shape), interval
        self.dtype = entry.compute.dtype
        self.sharded = not entry.flat.whole_master
        self.on_disk = (entry.flat.home is not None and entry.flat.home.on_disk) or entry.flat.route.stored

    def __deepcopy__(self, memo: object) -> ShardInfo:
        return self

    def __reduce__(self) -> Any:
        return (str, (repr(self),))

    def gather(self) -> torch.Tensor:
        """The whole parameter in master precision, shape `self.shape`. A collective: every rank must call it."""
        entry = self._entry()
        engine = entry.engine() if entry is not None else None
        if entry is None or engine is None:
            raise RuntimeError(f"the model of parameter {self.name!r} is gone.")
        return engine.whole(entry)

    def __repr__(self) -> str:
        return f"{self.name!r}: elements {self.interval[0]} to {self.interval[1]} of shape {tuple(self.shape)}"


class ShardedParameter(nn.Parameter):
    """See the table of this module."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with whole_sight():
            if func in _HOOKS:
                raise ShardedParameterError(
                    f"{func.__name__} on parameter {args[0].__dict__['onefold'].name!r} would never fire: gradients arrive on the whole "
                    "parameter, which exists only while it is computed with. Look at `.grad` after backward(), or put the hook "
                    "on a module's output."
                )
            # In a forward pass, or in a recomputation of one (which autograd runs with gradients on), code wants the whole.
            if (ForwardDepth.value or (torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1)) and func not in _OWN:
                args, kwargs = _substitute(func, args, kwargs)
                return func(*args, **kwargs)
            if func not in _OF_HOLLOW and (gone := next((i for i in infos(args, kwargs) if i.on_disk), None)) is not None:
                raise explain(func, f"parameter {gone.name!r}")
            if func in _READS and args[0].__dict__["onefold"].on_disk:
                return seen_hollow(func(*args, **kwargs), f"parameter {args[0].__dict__['onefold'].name!r}")
            if func in _NEEDS_SHAPE and any(info.sharded for info in infos(args, kwargs)):
                raise _error(args, kwargs, func)
            if func == _DATA:
                return _seen(args[0])
            if func == _GRAD and _asked_by_clip_grad_norm() and args[0].__dict__["onefold"].sharded:
                raise ShardedParameterError(
                    "torch.nn.utils.clip_grad_norm_ would see only this rank's interval of each gradient, and clip differently on "
                    "every rank. Use onefold.clip_grad_norm_(model, max_norm)."
                )
            if func == _DEVICE and _asked_by(_DDP):
                raise ShardedParameterError(WRAPPED)
            try:
                return func(*args, **kwargs)
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                if not any(info.sharded for info in infos(args, kwargs)):
                    raise
                raise _error(args, kwargs, func) from error

    def __deepcopy__(self, memo: Any) -> Any:
        raise ShardedParameterError(
            f"deepcopy of a sharded model (parameter {self.__dict__['onefold'].name!r}): a copy would not be divided "
            "or reduced. Copy the model before shard(), or build a fresh one and give it onefold.full_state_dict(model)."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_pickling(self.__dict__["onefold"].name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        info: ShardInfo | None = self.__dict__.get("onefold")
        if info is not None and info.on_disk:
            return f"ShardedParameter({info!r}, on NVMe or encoded)"
        with whole_sight():
            return f"ShardedParameter({info!r}, local={self.data!r})"


def _seen(param: Any) -> torch.Tensor:
    """`.data`: writes to it leave the parameter's own version counter alone, so all that are given out share one that `written` reads."""
    now, known = param.data, param.__dict__.get("_onefold_data")
    if known is None or known.dtype != now.dtype or (known.data_ptr(), known.shape) != (now.data_ptr(), now.shape):
        param.__dict__["_onefold_written"] = written(param) - param._version  # what the view before counted
        param.__dict__["_onefold_data"] = known = now
    return known.detach()


def written(param: torch.Tensor) -> int:
    """How often the memory of an optimizer's parameter was written to, as far as counters tell: also through `.data`."""
    known = param.__dict__.get("_onefold_data")
    through = 0 if known is None else known._version + param.__dict__["_onefold_written"]
    return param._version + through


def refuse_pickling(name: str | None) -> NoReturn:
    """Raise ShardedParameterError: `name` is a parameter's, or None."""
    raise ShardedParameterError(
        f"pickling a sharded model{f' (parameter {name!r})' if name else ''}, as torch.save(model) does, would save one rank's interval. "
        "Save torch.save(onefold.full_state_dict(model), path): every rank calls full_state_dict, rank 0 has the whole and writes it."
    )


WRAPPED = (
    "this sharded model is wrapped in DistributedDataParallel, which would reduce gradients that it cannot see: onefold.shard() "
    "does the reductions. Call the model that shard() returned; what else the wrapper holds should be sharded with it."
)
_DDP = ("nn/parallel/distributed.py", "nn\\parallel\\distributed.py")


def _asked_by(files: str | tuple[str, ...]) -> bool:
    """Whether the code that uses the parameter (two frames up) lies in one of `files`."""
    return sys._getframe(2).f_code.co_filename.endswith(files)


def _asked_by_clip_grad_norm() -> bool:
    frame = sys._getframe(2)
    if not frame.f_code.co_filename.endswith("clip_grad.py"):
        return False
    return not any(f is not None and f.f_code.co_name == "clip_grad_value_" for f in (frame, frame.f_back))


class ForwardDepth:
    """How many forward passes of sharded models are open: a quick way out for the common case of none."""

    value = 0


def infos(args: Any, kwargs: Any) -> list[ShardInfo]:
    return [info for t in _flatten((args, kwargs)) if isinstance(t, ShardedParameter) and (info := t.__dict__.get("onefold"))]


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _flatten(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _flatten(v)]
    return [value]


def _substitute(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with each sharded parameter of a model in forward replaced by its whole parameter, gathered if need be."""

    def swap(value: Any) -> Any:
        if isinstance(value, ShardedParameter):
            info = value.__dict__.get("onefold")
            entry = info._entry() if info is not None else None
            if entry is None or not entry.engine().computing:
                return value
            return entry.compute if func in _METADATA else entry.engine().use(entry)
        if isinstance(value, (list, tuple)):
            return type(value)(swap(v) for v in value) if not hasattr(value, "_fields") else value
        return value

    return tuple(swap(a) for a in args), {k: swap(v) for k, v in kwargs.items()}


def _error(args: Any, kwargs: Any, func: Any) -> ShardedParameterError:
    found = infos(args, kwargs)
    what = "; ".join(map(repr, found[:3])) or "a sharded parameter"
    name = getattr(func, "__name__", str(func))
    return ShardedParameterError(
        f"{name} was given a sharded parameter outside the forward pass of its model. This rank holds only {what}. "
        "To use it whole, call the model (not a part of it), or gather it: `with onefold.full_params(model):` for all of them, "
        "`parameter.onefold.gather()` for this one (both on every rank)."
    )


_T: Any = torch.Tensor
_GRAD, _DEVICE, _DATA = _T.grad.__get__, _T.device.__get__, _T.data.__get__


def _getters(*names: str) -> set[Any]:
    return {getattr(_T, name).__get__ for name in names}


# Answered from the whole parameter without gathering it.
_METADATA = _getters(
    "shape", "dtype", "device", "ndim", "is_leaf", "requires_grad", "layout", "is_cuda", "is_cpu", "is_meta", "itemsize", "nbytes"
)
_METADATA |= {_T.size, _T.dim, _T.numel, _T.nelement, _T.is_floating_point, _T.is_complex, _T.element_size, _T.stride, _T.__len__}
_METADATA |= {_T.is_contiguous, torch.is_floating_point, torch.is_complex, torch.numel}
_HOOKS = {_T.register_hook, _T.register_post_accumulate_grad_hook}
# Answered by the local interval itself, also inside a forward pass: what belongs to the optimizer's object.
_OWN = _getters("grad", "_version") | {_T.grad.__set__, _T.requires_grad.__set__, _T.requires_grad_, _T.__hash__, _T.data.__set__}
# Those that give out a tensor over the same memory, and what may be done to a parameter that has none.
_READS = {_T.data.__get__, _T.detach}
_OF_HOLLOW = _METADATA | _HOOKS | _OWN | _READS | _getters("grad_fn", "is_sparse", "is_quantized", "is_nested")
_OF_HOLLOW |= {_T.untyped_storage, _T.storage_offset, _T.get_device, _T.as_subclass, _T.retain_grad}
# Meaningless on an interval even where the one-dimensional shape happens to fit.
_F = torch.nn.functional
_NEEDS_SHAPE = {
    _F.linear, _F.bilinear, _F.embedding, _F.embedding_bag, _F.conv1d, _F.conv2d, _F.conv3d, _F.layer_norm, _F.batch_norm,
    _F.group_norm, _F.rms_norm, _F.multi_head_attention_forward, torch.matmul, torch.mm, torch.bmm, torch.einsum, torch.addmm,
    torch.transpose, torch.t, torch.permute, _T.matmul, _T.__matmul__, _T.__rmatmul__, _T.mm, _T.t, _T.transpose, _T.permute,
    _T.view, _T.reshape, _T.__getitem__, _T.__setitem__, torch.reshape, _T.T.__get__, _T.mT.__get__, _T.H.__get__, torch.autograd.grad,
}  # fmt: skip
