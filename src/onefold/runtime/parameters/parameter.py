"""A sharded parameter as code outside passes sees it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import nn

from onefold.runtime import differentiate
from onefold.runtime.open_passes import in_forward
from onefold.runtime.parameters import gradient_hooks
from onefold.runtime.parameters.interval import (
    GivenOut,
    IntervalSpec,
    ShardedParameterError,
    disable_torch_function,
    dispatched_by,
    dress,
    entry_of,
    get_grad,
    mapped,
    set_grad,
    spec_of,
    tensors_among,
)
from onefold.runtime.parameters.operators import Operator, call_python, compute, convert
from onefold.runtime.parameters.outside import compute_outside
from onefold.runtime.parameters.schema import operator_of, words
from onefold.runtime.parameters.values import (
    dropped_grad,
    give_data,
    give_grad,
    give_whole,
    seen_data,
    seen_grad,
    seen_storageless,
    storageless_error,
    wait_before_write,
)
from onefold.runtime.resources import MasterAccess, Progress

if TYPE_CHECKING:
    from onefold.comm import Group
    from onefold.runtime.flat import Entry
    from onefold.runtime.gather import Gatherer
    from onefold.runtime.parameters.values import WriteCounters
    from onefold.runtime.passes import Passes
    from onefold.runtime.reduce import Reducer
    from onefold.runtime.unit import Unit


# -- what a parameter asks of its engine -----------------------------------------------------------
#
# `OwningEngine`: what sharded parameters and intervals use of the engine that they belong to.
#
# The engine is `Engine` (runtime/engine.py). Parameters refer to it weakly, and only by this
# protocol: their modules must not import the engine's.
#
# | user code                                         | needs                                                     |
# |---------------------------------------------------|-----------------------------------------------------------|
# | in a pass of the model, with a sharded parameter  | `computing`, `in_pass`, `use`                             |
# | between passes, with gradients (outside.py)       | `begin_outside`, `gather`, `backward_event`               |
# | between passes, reading or writing values         | `whole`, `masters`                                        |
# | torch.amp.GradScaler                              | `agree_on_overflow`                                       |


class OwningEngine(Protocol):
    """See the docstring of this module. `device` is where the model computes, `group` all ranks."""

    device: torch.device
    group: Group
    progress: Progress
    gather: Gatherer
    masters: MasterAccess
    passes: Passes
    reduce: Reducer
    write_counters: WriteCounters

    @property
    def computing(self) -> bool:
        """Whether code now computes with whole parameters: in a forward pass, or in its
        recomputation in backward.
        """
        ...

    @property
    def in_pass(self) -> bool:
        """Whether a forward or backward pass of the model is under way."""
        ...

    def use(self, entry: Entry, keeps: bool = False) -> torch.Tensor:
        """Return the whole parameter, for code in a forward pass outside the unit that owns it.
        `keeps`: it stays whole until the pass ends.
        """
        ...

    def whole(self, entry: Entry) -> torch.Tensor:
        """Return the whole parameter in master precision as a new tensor. Collective."""
        ...

    def agree_on_overflow(self, found: torch.Tensor) -> None:
        """Set `found` on every rank, in place, if it is set on any. Collective."""
        ...

    def backward_event(self, accumulates: bool = False) -> None:
        """Tell the engine that a backward pass has reached something of its own."""
        ...

    def begin_outside(self, entry: Entry) -> Unit:
        """Begin an operation with gradients outside a forward pass. Returns the unit whose whole
        parameters it uses.
        """
        ...


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
# | code in a pass that reads `module.weight`         | the whole parameter, gathered by the read (in_pass.py)                            |
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


def _recomputing() -> bool:
    """Whether this code runs in the recomputation of a forward pass (activation checkpointing)."""
    return differentiate.in_autograd() and torch.is_grad_enabled()


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

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.shape)

    # The dtype in which the model was declared, so that `x.to(next(model.parameters()).dtype)` fits
    # what the model computes with. `.data` and `.grad` report their own dtype, master precision.

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        if not _enabled() or reader.casts_states:
            return _get_dtype(self)
        if in_forward() or differentiate.in_autograd():
            # Recomputed code must take the same path as in the forward pass, where its module had
            # the whole parameter: adapters cast their input to this dtype
            entry = entry_of(self)
            if entry is not None and (engine := entry.engine()) and engine.in_pass:
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
    def is_leaf(self) -> bool:  # type: ignore[override]
        return True

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
    if op.name in _HOOKS and isinstance(first, ShardedParameter) and (entry := entry_of(first)):
        return gradient_hooks.register(entry, func, args, kwargs)
    with disable_torch_function():
        if gradient_hooks.showing and op.name in ("data", "detach"):
            whole = gradient_hooks.whole(first)
            if whole is not None:
                return whole
        if op.name in _OWN and isinstance(first, ShardedParameter):
            return _own(func, op.name, first, args, kwargs)
        # In a forward pass, or in the recomputation of one (which autograd runs with gradients
        # enabled), code gets whole parameters.
        if in_forward() or _recomputing():
            args, kwargs = _substitute(op, args, kwargs)
            if op.name == "data" and args[0] is not first:
                return args[0].data  # that of the whole, whose writes are followed
            # Parameters are left over that belong to another model, which is not in a pass
            among = tensors_among((args, kwargs))
            if not op.about_itself:
                _refuse_freed(among)
            return _run(op, func, args, kwargs, among, False)
        # The backward of a Function and a hook get whole parameters too, but for writes: these go
        # to the masters, which `.data` shows, because the whole is dropped after the pass.
        if differentiate.in_autograd() and not (
            op.name == "data" or op.about_itself or op.writes_with(kwargs)
        ):
            args, kwargs = _substitute(op, args, kwargs, "in_pass")
        return _between_passes(op, func, args, kwargs)


def _between_passes(op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    first = args[0] if args else None
    if op.run is convert and not getattr(type(first), "_onefold_faced", False):
        return func(*_as_declared(args), **_as_declared(kwargs))
    among = tensors_among((args, kwargs))
    params = [t for t in among if isinstance(t, ShardedParameter)]
    seen, writes = op.name in ("data", "detach"), op.writes_with(kwargs)
    if params and not (seen or op.asks or op.name in _OWN or op.name in _HOOKS):
        _refuse_storageless(func, params)
    for t in among if seen or writes else ():
        _wait_before_write(t, seen)
    if seen and isinstance(first, ShardedParameter):
        return _given_out(op, func, first)
    if op.name in ("dtype", "device", "is_complex"):
        _refuse_elsewhere(first, params)
    if getattr(func, "__module__", None) == _C10D_MODULE and op.name not in _SENDS:
        _refuse_collective(op.name, among)
    return _run(op, func, args, kwargs, among, True)


def _run(op: Operator, func: Any, args: Any, kwargs: Any, among: list[Any], cast: bool) -> Any:
    """Run `func`, with gradients if it will be differentiated, else on intervals, if any. `cast`:
    whole masters are read in the dtype that they show.
    """
    reads = not op.about_itself and not op.writes_with(kwargs)
    if reads and torch.is_grad_enabled():
        params = (t for t in among if isinstance(t, ShardedParameter))
        entries = {id(e): e for p in params if (e := entry_of(p)) is not None and e.engine()}
        if any(entry.compute.requires_grad for entry in entries.values()):
            return compute_outside(func, args, kwargs, list(entries.values()))
    if any(spec_of(t) is not None for t in among):
        return compute(op, func, args, kwargs, among)
    if reads and cast:
        args, kwargs = _as_declared(args), _as_declared(kwargs)
    return func(*args, **kwargs)


def _refuse_freed(among: list[Any]) -> None:
    for t in among:
        if isinstance(t, ShardedParameter):
            entry = entry_of(t)
            if entry is None or entry.engine() is None:
                name = t.__dict__["onefold"].name
                raise ShardedParameterError(
                    f"{name!r} is a parameter of a model that is gone, and was used in a pass of"
                    " another model, which cannot train it: keep the model, or use a clone of it."
                )


def _refuse_storageless(func: Any, params: list[ShardedParameter]) -> None:
    for param in params:
        info: ShardInfo = param.__dict__["onefold"]
        if not info.in_place:
            raise storageless_error(func, f"parameter {info.name!r}")


def _given_out(op: Operator, func: Any, param: ShardedParameter) -> Any:
    """Return `.data` or `detach()` of a parameter."""
    info, spec = param.__dict__["onefold"], spec_of(param)
    if not info.in_place:
        return seen_storageless(func(param), f"parameter {info.name!r}", spec)
    out = seen_data(param) if op.name == "data" else func(param)
    out = out if spec is None else dress(out, spec)
    param.__dict__.setdefault("_onefold_given_out", GivenOut()).add(out)
    return out


dispatched_by[0] = dispatch


def _wait_before_write(t: torch.Tensor, seen: bool) -> None:
    """See `MasterAccess.wait_before_write`."""
    if isinstance(t, ShardedParameter):
        wait_before_write(t, seen)
    elif not seen and (spec := spec_of(t)) is not None:
        spec.owners.wait_before_write()


def _as_declared(value: Any) -> Any:
    """Return `value` with each sharded parameter in it cast to the dtype in which the model was
    declared, where its masters have another.
    """

    def cast(t: torch.Tensor) -> torch.Tensor:
        declared = t.__dict__["_onefold_declared"] if isinstance(t, ShardedParameter) else t.dtype
        return t if declared == t.dtype else t.detach().to(declared)

    return mapped(value, cast)


def _own(func: Any, name: str, param: Any, args: Any, kwargs: Any) -> Any:
    """Run one of `_OWN`: these act on the optimizer's object, also inside a forward pass."""
    if name == "grad":
        return seen_grad(param)
    if name == "grad__set__":
        return give_grad(param, args[1])
    if name == "data__set__":
        entry = entry_of(param)
        if (
            in_forward()
            and entry is not None
            and (engine := entry.engine()) is not None
            and engine.computing
        ):
            return give_whole(entry, engine.use(entry), args[1])
        return give_data(param, args[1])
    return func(*args, **kwargs)


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


_SUBCLASSES: dict[type, type] = {}


def faced_class(kind: type) -> type:
    """Return the class of a sharded parameter whose original was of class `kind`.

    It is a subclass of `kind` too, if `kind` is a subclass of `nn.Parameter` without dispatch of
    its own, so that `isinstance` checks on the parameter still hold.
    """
    if kind in (nn.Parameter, torch.Tensor, ShardedParameter):
        return ShardedParameter
    own = kind.__mro__[: -len(nn.Parameter.__mro__)]
    own_ways = any(
        "__torch_function__" in k.__dict__ or "__torch_dispatch__" in k.__dict__ for k in own
    )
    if own_ways or not issubclass(kind, nn.Parameter):
        return ShardedParameter
    if kind not in _SUBCLASSES:
        _SUBCLASSES[kind] = type(f"Sharded{kind.__name__}", (ShardedParameter, kind), {})
    return _SUBCLASSES[kind]


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
_DDP = ("nn/parallel/distributed.py", "nn\\parallel\\distributed.py")


def _refuse_elsewhere(tensor: Any, params: list[ShardedParameter]) -> None:
    """Raise ShardedParameterError if the code that uses the tensor (four frames up) is that of
    DistributedDataParallel, or of a collective of torch's.
    """
    code = sys._getframe(4).f_code
    if params and code.co_filename.endswith(_DDP):
        raise ShardedParameterError(WRAPPED)
    spec = spec_of(tensor)
    if spec is not None and code.co_filename.endswith("distributed_c10d.py"):
        raise _elsewhere_error(code.co_name, spec)


def _elsewhere_error(function: str, spec: IntervalSpec) -> ShardedParameterError:
    return ShardedParameterError(
        f"torch.distributed.{function} was given {spec.name!r}, of which"
        f" each rank holds other elements (this one {spec.start} to {spec.stop} of shape"
        f" {tuple(spec.shape)}). Onefold starts from rank 0's weights and averages gradients by"
        " itself: leave the call out, or use a whole copy, parameter.onefold.gather()."
    )


#: Functions of torch.distributed that read the tensor they send, and write to other tensors only.
_SENDS = frozenset({"send", "isend", "all_gather", "all_gather_object", "gather"})
_C10D_MODULE = torch.distributed.distributed_c10d.__name__


def _refuse_collective(name: str, among: list[Any]) -> None:
    """Raise ShardedParameterError if a function of torch.distributed would write to an interval, or
    to a gathered copy that is dropped.
    """
    spec = next((s for t in among if (s := spec_of(t)) is not None), None)
    if spec is not None:
        raise _elsewhere_error(name, spec)


def infos(args: Any, kwargs: Any) -> list[ShardInfo]:
    return [
        info
        for t in tensors_among((args, kwargs))
        if isinstance(t, ShardedParameter) and (info := t.__dict__.get("onefold"))
    ]


def _substitute(op: Operator, args: Any, kwargs: Any, during: str = "computing") -> tuple[Any, Any]:
    """Return the arguments with sharded parameters replaced by whole ones, gathered if need be.

    `during`: what the parameter's own model must be doing, by an attribute of its engine; else the
    parameter stays.
    """

    def swap(t: torch.Tensor) -> torch.Tensor:
        entry = entry_of(t) if isinstance(t, ShardedParameter) else None
        engine = entry.engine() if entry is not None else None
        if entry is None or engine is None or not getattr(engine, during):
            return t
        if op.about_itself and op.name != "detach":
            return entry.compute
        return engine.use(entry)

    swapped: tuple[Any, Any] = mapped((args, kwargs), swap)
    return swapped


_HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook"))
#: Operations on the optimizer's object itself.
_OWN = words(
    "grad grad__set__ _version requires_grad__set__ requires_grad_ __hash__ data__set__ _grad"
)
