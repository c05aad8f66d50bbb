"""A sharded parameter as code outside passes sees it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from onefold.runtime.differentiate import in_autograd, mapped, tensors_in
from onefold.runtime.open_passes import here, in_forward
from onefold.runtime.parameters.access import call_autograd, compute_outside, wholes
from onefold.runtime.parameters.gradient_hooks import register
from onefold.runtime.parameters.interval import (
    Interval,
    ShardedParameterError,
    disable_torch_function,
    dress,
    get_grad,
    get_shape,
    owner_of,
    set_grad,
    spec_of,
)
from onefold.runtime.parameters.operators import Operator, call_python, compute, convert
from onefold.runtime.parameters.schema import operator_of, words
from onefold.runtime.parameters.values import (
    CALLS,
    arriving,
    elsewhere,
    give_data,
    give_grad,
    given_out,
    seen_data,
    seen_grad,
    storageless_error,
    wait_before_write,
)

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry


# -- the parameter ---------------------------------------------------------------------------------
#
# `ShardedParameter`: the object that `model.parameters()` returns, and optimizers step, for each
# sharded parameter.
#
# It is an `nn.Parameter` over plain memory: this rank's interval of the parameter, one-dimensional,
# in master precision. It reports the shape and the number of elements of the whole parameter, and
# keeps every attribute that the user has set on the original.
#
# | who reads it                                      | sees                                                                              |
# |---------------------------------------------------|-----------------------------------------------------------------------------------|
# | the optimizer inside `step()`                     | a plain `nn.Parameter` over the local interval (see `bare`)                       |
# | the forward pass of the unit that owns it         | the whole parameter (another object, swapped in)                                  |
# | code in a pass that reads `module.weight`         | the whole parameter, gathered by the read (access.py)                             |
# | code in a pass that has it from `parameters()`    | the whole parameter, gathered on first use (shape and dtype need no gather)       |
# | code inside a backward pass of the model          | the same, but the interval for `.data`, `detach()` and in-place operations        |
# | other code, with gradients enabled                | the whole parameter, gathered for the operation (`outside`)                       |
# | other code without; `.data`, `.grad`, `detach()`  | an interval that shows the shape of the whole (`interval`, `operators`)           |
#
# `parameter.onefold` holds the name, the logical shape, this rank's interval and `gather()`.


__all__ = [
    "ShardInfo",
    "ShardedParameter",
    "ShardedParameterError",
    "disable_torch_function",
]


class ShardInfo:
    """Facts about one sharded parameter, as `parameter.onefold`.

    Attributes:
        name: its name in the model.
        shape: its logical shape; that of the global tensor for a DTensor.
        interval: `(start, stop)`, the elements of the flattened parameter (of this rank's part of
            a DTensor) that this rank holds.
        dtype: the dtype in which the model computes with it (the parameter itself is kept in master
            precision).
        sharded: False where every rank holds the whole parameter (stage 0, where the forward pass
            uses another object too).
        in_place: False where the elements are stored on NVMe or encoded. The parameter then has a
            shape and no memory.
        declared: the dtype in which the model was declared, which `.dtype` shows.
        entry: weak: parameters may outlive their model.
    """

    def __init__(self, entry: Entry, faced: Any, plain: Any) -> None:
        self.entry, self._box = weakref.ref(entry), entry.box
        self.name, self.interval = entry.slot.name, entry.owned()
        self.shape = torch.Size(entry.shape)
        self.dtype = entry.compute.dtype
        self.declared: torch.dtype = entry.declared
        self.sharded = entry.flat.divided
        self.in_place = entry.flat.storage.in_place
        # Its class between steps, and inside one
        self.faced, self.plain = faced, plain
        # For `.data`, see parameters/values.py
        self.alias: torch.Tensor | None = None
        self.written, self.given = 0, list[weakref.ref[torch.Tensor]]()

    def __deepcopy__(self, memo: object) -> ShardInfo:
        return self

    def __reduce__(self) -> Any:
        return (str, (repr(self),))

    def gather(self) -> torch.Tensor:
        """Return the whole parameter in master precision, shape `self.shape`. Collective: every
        rank must call it.
        """
        entry = self.entry()
        engine = entry.engine() if entry is not None else None
        if entry is None or engine is None:
            raise RuntimeError(f"the model of parameter {self.name!r} is gone.")
        return engine.whole(entry) if self._box is None else self._box.gather(engine.whole(entry))

    def __repr__(self) -> str:
        return (
            f"{self.name!r}: elements {self.interval[0]} to {self.interval[1]} of shape"
            f" {tuple(self.shape)}"
        )


_enabled = torch._C._is_torch_function_enabled
_get_dtype: Any = torch._C.TensorBase.dtype.__get__  # type: ignore[attr-defined]


class ShardedParameter(nn.Parameter):
    """See the table of this module."""

    _onefold_faced = True

    # Attributes that loops over parameters read most often are properties: a property costs a tenth
    # of a __torch_function__ call.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        if _enabled():
            return self.__dict__["onefold"].shape
        return get_shape(self)

    # The dtype in which the model was declared, so that `x.to(next(model.parameters()).dtype)` fits
    # what the model computes with. `.data` and `.grad` report their own dtype, master precision.

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        if not _enabled() or here.casts_states:
            return _get_dtype(self)
        if in_forward() or in_autograd():
            # Recomputed code must take the same path as in the forward pass, where its module had
            # the whole parameter: adapters cast their input to this dtype
            entry, engine = owner_of(self)
            if engine is not None and engine.in_pass:
                return entry.compute.dtype
        return self.__dict__["onefold"].declared

    @property
    def itemsize(self) -> int:  # type: ignore[override]
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.numel() * self.dtype.itemsize

    def element_size(self) -> int:
        return self.dtype.itemsize

    @property
    def grad(self) -> torch.Tensor | None:
        if not _enabled():
            return get_grad(self)
        with disable_torch_function():
            return seen_grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        give = give_grad if _enabled() else set_grad
        with disable_torch_function():
            give(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> Any:
        raise ShardedParameterError(
            f"deepcopy of a sharded model (parameter {self.__dict__['onefold'].name!r}): a copy"
            " would not be divided or reduced. Copy the model before shard(), or build a fresh one"
            " and give it onefold.full_state_dict(model). For averages of the weights"
            " (AveragedModel, EMA) there is onefold.ema.EMA(model, decay)."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_pickling(self.__dict__["onefold"].name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        info: ShardInfo | None = self.__dict__.get("onefold")
        if info is not None and not info.in_place:
            return f"ShardedParameter({info!r}, on NVMe or encoded)"
        with disable_torch_function():
            return f"ShardedParameter({info!r}, local={self.data!r})"


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `func`, which has a sharded parameter or an interval among its arguments."""
    # Outside disable_torch_function: a recomputation inside `func` needs the dispatch on parameters
    if func in CALLS:
        return call_autograd(func, args, kwargs)
    op = operator_of(func)
    if op.run is call_python:
        return call_python(op, func, args, kwargs)
    first = args[0] if args else None
    param = first if isinstance(first, ShardedParameter) else None
    with disable_torch_function():
        if param is not None and op.name in _OWN:
            return (_OWN[op.name] or func)(*args, **kwargs)
        if op.name == "device" and sys._getframe(2).f_globals.get("__name__") == _DDP:
            raise ShardedParameterError(WRAPPED)
        if param is not None and op.name in ("data", "detach"):
            return _handed_out(op, func, param)
        args, kwargs = wholes(op, args, kwargs)
        among = tensors_in((args, kwargs))
        # Parameters are left over whose model computes nothing now
        params = [t for t in among if isinstance(t, ShardedParameter)]
        if op.run is convert and param is None and spec_of(first) is None:
            args, kwargs = mapped((args, kwargs), _as_declared)
            return func(*args, **kwargs)  # in the dtype and on the device of a parameter
        writes = op.writes_with(kwargs)
        for t in among if writes else ():
            if getattr(type(t), "_onefold_faced", False):
                wait_before_write(t)
        for t in () if op.asks else params:
            if not t.__dict__["onefold"].in_place:
                raise storageless_error(func, f"parameter {t.__dict__['onefold'].name!r}")
        reads = not op.about_itself and not writes
        if reads and torch.is_grad_enabled():
            entries = {e: None for t in params if (e := owner_of(t)[0]) is not None}
            if any(entry.compute.requires_grad for entry in entries):
                return compute_outside(func, args, kwargs, entries)
        if any(spec_of(t) is not None for t in among):
            return compute(op, func, args, kwargs, among)
        if reads:
            args, kwargs = mapped((args, kwargs), _as_declared)
        return func(*args, **kwargs)


def _as_declared(t: torch.Tensor) -> torch.Tensor:
    """Return a sharded parameter in the dtype in which the model was declared, where its masters have
    another.
    """
    declared = t.__dict__["onefold"].declared if isinstance(t, ShardedParameter) else t.dtype
    return t if declared == t.dtype else t.detach().to(declared)


def _handed_out(op: Operator, func: Any, param: ShardedParameter) -> Any:
    """Return `.data` or `detach()` of a parameter: of the whole where its model computes."""
    ((whole,), _), info, spec = wholes(op, (param,), {}), param.__dict__["onefold"], spec_of(param)
    if whole is not param:  # all whose writes are followed share its counter, or that of `.data`
        return whole.detach() if op.name == "detach" or arriving(param) else whole.data
    wait_before_write(param, seen=True)
    if not info.in_place:
        return elsewhere(func(param), f"parameter {info.name!r}", spec)
    out = seen_data(param) if op.name == "data" else func(param)
    out = out if spec is None else dress(out, spec)
    info.given = [*map(weakref.ref, given_out(param)), weakref.ref(out)]
    return out


Interval.__torch_function__ = ShardedParameter.__torch_function__  # type: ignore[method-assign]


def bare(params: Iterable[nn.Parameter], faced: bool = False) -> None:
    """Make sharded parameters plain `nn.Parameter`s over this rank's elements, for the duration of
    an optimizer's step: without dispatch a step is as fast as on any tensor. `faced` undoes it.
    """
    for param in params:
        if (info := param.__dict__.get("onefold")) is not None:
            param.__class__ = info.faced if faced else info.plain


def face(params: Iterable[nn.Parameter]) -> None:
    bare(params, faced=True)


@cache
def faced_class(kind: type) -> type:
    """Return the class of a sharded parameter whose original was of class `kind`.

    It is a subclass of `kind` too, if `kind` is a subclass of `nn.Parameter` without dispatch of
    its own, so that `isinstance` checks on the parameter still hold.
    """
    own = kind.__mro__[: -len(nn.Parameter.__mro__)]
    ways = {"__torch_function__", "__torch_dispatch__"}
    if not issubclass(kind, nn.Parameter) or not own or any(ways & set(vars(k)) for k in own):
        return ShardedParameter
    return type(f"Sharded{kind.__name__}", (ShardedParameter, kind), {})


def refuse_pickling(name: str | None) -> NoReturn:
    """Raise ShardedParameterError: `name` is a parameter's, or None."""
    raise ShardedParameterError(
        f"pickling a sharded model{f' (parameter {name!r})' if name else ''}, as torch.save(model)"
        " does, would save one rank's interval. Save torch.save(onefold.full_state_dict(model),"
        " path): every rank calls full_state_dict, rank 0 has the whole and writes it."
    )


WRAPPED = (
    "this sharded model is wrapped in DistributedDataParallel, which would reduce gradients that it"
    " cannot see: onefold.shard() does the reductions. Call the model that shard() returned; what"
    " else the wrapper holds should be sharded with it."
)
_DDP = "torch.nn.parallel.distributed"
#: Operations on the optimizer's object itself, also inside a forward pass.
_OWN: dict[str, Any] = {
    **dict.fromkeys(words("_version requires_grad__set__ requires_grad_ __hash__ _grad")),
    "grad": seen_grad,
    "grad__set__": give_grad,
    "data__set__": give_data,
    "register_hook": partial(register, post=False),
    "register_post_accumulate_grad_hook": partial(register, post=True),
}
