"""A sharded parameter as code outside passes sees it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from onefold.runtime import differentiate
from onefold.runtime.open_passes import in_forward
from onefold.runtime.parameters import gradient_hooks
from onefold.runtime.parameters.access import compute_outside, wholes
from onefold.runtime.parameters.interval import (
    ShardedParameterError,
    disable_torch_function,
    dispatched_by,
    dress,
    get_grad,
    mapped,
    owner_of,
    set_grad,
    spec_of,
    tensors_among,
)
from onefold.runtime.parameters.operators import Operator, call_python, compute, convert
from onefold.runtime.parameters.schema import operator_of, words
from onefold.runtime.parameters.values import (
    dropped_grad,
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
    "reader",
]


class _Reader(threading.local):
    """Which method of torch's reads sharded parameters in this thread. Set in
    optim/steps.py.

    Attributes:
        casts_states: `optimizer.load_state_dict`, which casts states to `param.dtype`. It must see
            the master dtype, which is what the optimizer steps.
        drops_gradients: `zero_grad`, which reads `.grad` only to drop it or to fill it with zeros.
            It needs no interval.
    """

    casts_states = False
    drops_gradients = False


reader = _Reader()


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
    """

    def __init__(self, entry: Entry, interval: tuple[int, int]) -> None:
        self._entry = weakref.ref(entry)
        self.name, self.interval = entry.slot.name, interval
        self._box = box = entry.box
        self.shape = torch.Size(entry.slot.shape) if box is None else box.shape
        self.dtype = entry.compute.dtype
        self.sharded = entry.flat.divided
        self.in_place = entry.flat.storage.in_place

    def __deepcopy__(self, memo: object) -> ShardInfo:
        return self

    def __reduce__(self) -> Any:
        return (str, (repr(self),))

    def gather(self) -> torch.Tensor:
        """Return the whole parameter in master precision, shape `self.shape`. Collective: every
        rank must call it.
        """
        entry = self._entry()
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
_T: Any = torch._C.TensorBase
_get_shape, _get_dtype = _T.shape.__get__, _T.dtype.__get__


class ShardedParameter(nn.Parameter):
    """See the table of this module."""

    _onefold_faced = True

    # Attributes that loops over parameters read most often are properties: a property costs a tenth
    # of a __torch_function__ call.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        if _enabled():
            return self.__dict__["onefold"].shape
        return _get_shape(self)

    # The dtype in which the model was declared, so that `x.to(next(model.parameters()).dtype)` fits
    # what the model computes with. `.data` and `.grad` report their own dtype, master precision.

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        if not _enabled() or reader.casts_states:
            return _get_dtype(self)
        if in_forward() or differentiate.in_autograd():
            # Recomputed code must take the same path as in the forward pass, where its module had
            # the whole parameter: adapters cast their input to this dtype
            entry, engine = owner_of(self)
            if engine is not None and engine.in_pass:
                return entry.compute.dtype
        return self.__dict__["_onefold_declared"]

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
        if gradient_hooks.showing and (entry := gradient_hooks.showing.get(id(self))) is not None:
            return get_grad(entry.compute)
        with disable_torch_function():
            if reader.drops_gradients:
                return dropped_grad(self)
            return seen_grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if not _enabled():
            set_grad(self, value)
        elif gradient_hooks.showing and (entry := gradient_hooks.showing.get(id(self))) is not None:
            set_grad(entry.compute, value)
        else:
            with disable_torch_function():
                give_grad(self, value)

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
    if func in differentiate.CALLS:
        return differentiate.call(func, args, kwargs)
    op = operator_of(func)
    if op.run is call_python:
        return call_python(op, func, args, kwargs)
    first = args[0] if args else None
    param = first if isinstance(first, ShardedParameter) else None
    if param is not None and op.name in _HOOKS and (entry := owner_of(param)[0]):
        return gradient_hooks.register(entry, func, args, kwargs)
    with disable_torch_function():
        if gradient_hooks.showing and op.name in ("data", "detach"):
            whole = gradient_hooks.whole(first)
            if whole is not None:
                return whole
        if param is not None and op.name in _OWN:
            return (_OWN[op.name] or func)(*args, **kwargs)
        if op.name == "device" and sys._getframe(2).f_globals.get("__name__") == _DDP:
            raise ShardedParameterError(WRAPPED)
        args, kwargs = wholes(op, args, kwargs)
        if op.name == "data" and args[0] is not first:
            return args[0].data  # that of the whole, whose writes are followed
        among = tensors_among((args, kwargs))
        # Parameters are left over whose model computes nothing now
        params = [t for t in among if isinstance(t, ShardedParameter)]
        if op.run is convert and param is None and spec_of(first) is None:
            args, kwargs = mapped((args, kwargs), _as_declared)
            return func(*args, **kwargs)  # in the dtype and on the device of a parameter
        seen, writes = op.name in ("data", "detach"), op.writes_with(kwargs)
        for t in among if seen or writes else ():
            if getattr(type(t), "_onefold_faced", False):
                wait_before_write(t, seen)
        if seen and params:
            return _given_out(op, func, params[0])
        for t in () if op.asks else params:
            if not t.__dict__["onefold"].in_place:
                raise storageless_error(func, f"parameter {t.__dict__['onefold'].name!r}")
        reads = not op.about_itself and not writes
        if reads and torch.is_grad_enabled():
            entries = {id(e): e for t in params if (e := owner_of(t)[0]) is not None}
            if any(entry.compute.requires_grad for entry in entries.values()):
                return compute_outside(func, args, kwargs, entries.values())
        if any(spec_of(t) is not None for t in among):
            return compute(op, func, args, kwargs, among)
        if reads:
            args, kwargs = mapped((args, kwargs), _as_declared)
        return func(*args, **kwargs)


def _as_declared(t: torch.Tensor) -> torch.Tensor:
    """Return a sharded parameter in the dtype in which the model was declared, where its masters have
    another.
    """
    declared = t.__dict__["_onefold_declared"] if isinstance(t, ShardedParameter) else t.dtype
    return t if declared == t.dtype else t.detach().to(declared)


def _given_out(op: Operator, func: Any, param: ShardedParameter) -> Any:
    """Return `.data` or `detach()` of a parameter."""
    info, spec = param.__dict__["onefold"], spec_of(param)
    if not info.in_place:
        return elsewhere(func(param), f"parameter {info.name!r}", spec)
    out = seen_data(param) if op.name == "data" else func(param)
    out = out if spec is None else dress(out, spec)
    param.__dict__["_onefold_given_out"] = [*map(weakref.ref, given_out(param)), weakref.ref(out)]
    return out


dispatched_by[0] = dispatch


def bare(params: Iterable[nn.Parameter]) -> None:
    """Make sharded parameters plain `nn.Parameter`s over this rank's elements, for the duration of
    an optimizer's step: without dispatch a step is as fast as on any tensor.
    """
    for param in params:
        if (plain := param.__dict__.get("_onefold_bare")) is not None:
            param.__class__ = plain


def face(params: Iterable[nn.Parameter]) -> None:
    """Undo `bare`: make the parameters `ShardedParameter`s again."""
    for param in params:
        if (faced := param.__dict__.get("_onefold_class")) is not None:
            param.__class__ = faced


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
_HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook"))
#: Operations on the optimizer's object itself, also inside a forward pass.
_OWN: dict[str, Any] = {
    **dict.fromkeys(words("_version requires_grad__set__ requires_grad_ __hash__ _grad")),
    "grad": seen_grad,
    "grad__set__": give_grad,
    "data__set__": give_data,
}
