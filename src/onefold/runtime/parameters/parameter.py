"""A sharded parameter as code outside passes sees it, and the whole one that code in a pass gets.

`ShardedParameter` is the object that `model.parameters()` returns, and optimizers step, for each sharded
parameter. It is an `nn.Parameter` over plain memory: this rank's interval of the parameter,
one-dimensional, in master precision. It reports the shape and the number of elements of the whole
parameter, and keeps every attribute that the user has set on the original.

| who reads it                                      | sees                                                                              |
|---------------------------------------------------|-----------------------------------------------------------------------------------|
| the optimizer inside `step()`                     | a plain `nn.Parameter` over the local interval (see `bare`)                       |
| the forward pass of the unit that owns it         | the whole parameter (another object, `Whole`, swapped in)                         |
| code in a pass that reads `module.weight`         | the whole parameter, gathered by the read (`seen`)                                |
| code in a pass that has it from `parameters()`    | the whole parameter, gathered on first use (shape and dtype need no gather)       |
| code inside a backward pass of the model          | the same, but the interval for `.data`, `detach()` and in-place operations        |
| other code, with gradients enabled                | the whole parameter, gathered for the operation (`compute_outside`)               |
| other code without; `.data`, `.grad`, `detach()`  | an interval that shows the shape of the whole (`interval`, `operators`)           |

`parameter.onefold` holds the name, the logical shape, this rank's interval and `gather()`.

[Note: memory is seen] Code may hand a weight to consumers that never ask a tensor's class how to
compute: an autograd Function, TorchScript, a compiled function, a custom operator, a checkpoint's
arguments. Such code sees the memory of a tensor. So in a pass the weight must be whole when a module's
attribute is read.

| who reads `module.weight`                                  | gets                                                          |
|------------------------------------------------------------|---------------------------------------------------------------|
| the forward pass of the unit that owns it                  | the whole parameter, which the pass has put there (`swap`)    |
| other code in a pass of its model, or in the recomputation | the whole parameter, gathered now, until the pass ends        |
| the backward of an autograd Function of its model          | the same                                                      |
| a hook of a backward pass                                  | the sharded parameter: what a hook writes goes to the masters |
| a pass of another sharded model, code outside passes       | the sharded parameter                                         |

`module.parameters()` and its like always give sharded parameters, so that counting elements in a
forward pass gathers nothing.

A tensor saved for backward in gathered memory becomes a handle, whoever saves it (runtime/saved.py).
What code keeps without saving it is gathered again at its next use (`Released`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from onefold.runtime.differentiate import (
    here,
    in_autograd,
    in_forward,
    keep_from_compiler,
    mapped,
    tensors_in,
)
from onefold.runtime.parameters.interval import (
    Interval,
    ShardedParameterError,
    disable_torch_function,
    dress,
    entry_of,
    get_grad,
    get_shape,
    owner_of,
    set_grad,
    spec_of,
)
from onefold.runtime.parameters.operators import (
    OF_AUTOGRAD,
    Operator,
    call_python,
    convert,
    operator_of,
    whole_of,
    words,
)
from onefold.runtime.parameters.values import (
    Elsewhere,
    arriving,
    elsewhere,
    give_data,
    give_grad,
    given_out,
    register_hook,
    seen_grad,
    storageless_error,
    wait_before_write,
)
from onefold.runtime.saved import is_in, saving

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry, Unit


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
        in_place: False where the elements are stored on NVMe or encoded. The parameter then has a
            shape and no memory.
        declared: the dtype in which the model was declared, which `.dtype` shows.
        entry: returns the engine's entry; None if the model is gone: parameters may outlive it.
    """

    def __init__(self, entry: Entry, faced: Any, plain: Any) -> None:
        self.entry: Callable[[], Entry | None] = weakref.ref(entry)
        self.name, self.interval = entry.slot.name, entry.owned()
        self.shape = torch.Size(entry.shape)
        self.declared: torch.dtype = entry.declared
        self.in_place = entry.flat.storage.in_place
        # Its class between steps, and inside one
        self.faced, self.plain = faced, plain
        self.given: list[weakref.ref[torch.Tensor]] = []  # see `given_out`

    def __deepcopy__(self, memo: object) -> ShardInfo:
        return self

    def __reduce__(self) -> Any:
        return (str, (repr(self),))

    def gather(self) -> torch.Tensor:
        """Return the whole parameter in master precision, shape `self.shape`. Collective: every
        rank must call it.
        """
        if (entry := self.entry()) is None:
            raise RuntimeError(f"the model of parameter {self.name!r} is gone.")
        whole = entry.engine().whole(entry)  # type: ignore[union-attr]
        return whole if entry.box is None else entry.box.gather(whole)

    def __repr__(self) -> str:
        return (
            f"{self.name!r}: elements {self.interval[0]} to {self.interval[1]} of shape"
            f" {tuple(self.shape)}"
        )


_enabled = torch._C._is_torch_function_enabled
_get_dtype: Any = torch._C.TensorBase.dtype.__get__  # type: ignore[attr-defined]


def _seen_grad(self: Any) -> torch.Tensor | None:
    return seen_grad(self) if _enabled() else get_grad(self)


def _give_grad(self: Any, value: torch.Tensor | None = None) -> None:
    give_grad(self, value) if _enabled() else set_grad(self, value)


#: `.grad` of the optimizer's object, and of the whole.
_GRAD: Any = property(_seen_grad, _give_grad, _give_grad)


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

    grad = _GRAD

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
    # Outside disable_torch_function: these call functions that need the dispatch on parameters
    if func in CALLS:
        return call_autograd(func, args, kwargs)
    op = operator_of(func)
    if op.run is call_python:
        return call_python(op, func, args, kwargs)
    if not op.asks and any(isinstance(t, Elsewhere) for t in tensors_in((args, kwargs))):
        into = (args[:1], kwargs.get("out")) if op.writes_with(kwargs) else ()
        written = {id(t) for t in tensors_in(into)}

        def brought(t: torch.Tensor) -> torch.Tensor:
            return t.bring(op, id(t) in written) if isinstance(t, Elsewhere) else t

        return func(*mapped(args, brought), **mapped(kwargs, brought))
    first = args[0] if args else None
    param = first if isinstance(first, ShardedParameter) else None
    with disable_torch_function():
        if param is not None and op.name in _OWN:
            return (_OWN[op.name] or func)(*args, **kwargs)
        if op.name in OF_AUTOGRAD and isinstance(first, Elsewhere):
            return func(*args, **kwargs)
        if op.name == "device" and sys._getframe(2).f_globals.get("__name__") == _DDP:
            raise ShardedParameterError(WRAPPED)
        args, kwargs = wholes(op, args, kwargs)
        if param is not None and op.name in ("data", "detach"):
            return _handed_out(op, param, args[0])
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
                raise storageless_error(op.name, f"parameter {t.__dict__['onefold'].name!r}")
        reads = not op.about_itself and not writes
        if reads and torch.is_grad_enabled():
            entries = {e: None for t in params if (e := owner_of(t)[0]) is not None}
            if any(entry.compute.requires_grad for entry in entries):
                return compute_outside(func, args, kwargs, entries)
        if any(spec_of(t) is not None for t in among):
            if not args:  # its first argument was given by name
                name = next((k for k in _FIRST if k in kwargs), next(iter(kwargs)))
                args, kwargs = (kwargs[name],), {k: v for k, v in kwargs.items() if k != name}
            return op.run(op, func, args, kwargs)
        if reads:
            args, kwargs = mapped((args, kwargs), _as_declared)
        return func(*args, **kwargs)


def _as_declared(t: torch.Tensor) -> torch.Tensor:
    """Return a sharded parameter in the dtype in which the model was declared, where its masters have
    another.
    """
    declared = t.__dict__["onefold"].declared if isinstance(t, ShardedParameter) else t.dtype
    return t if declared == t.dtype else t.detach().to(declared)


def _handed_out(op: Operator, param: ShardedParameter, whole: Any) -> Any:
    """Return `.data` or `detach()` of a parameter: of the `whole` where its model computes."""
    info, spec = param.__dict__["onefold"], spec_of(param)
    if whole is not param:  # all whose writes are followed share its counter, or that of `.data`
        return whole.detach() if op.name == "detach" or arriving(param) else whole.data
    wait_before_write(param, seen=True)
    if not info.in_place:
        return elsewhere(param.detach(), f"parameter {info.name!r}", spec)
    # Of both, so that writes to `.data` raise the parameter's own version counter
    out = param.detach()
    out = out if spec is None else dress(out, spec)
    info.given = [*map(weakref.ref, given_out(param)), weakref.ref(out)]
    return out


for _face in (Interval, Elsewhere):
    _face.__torch_function__ = ShardedParameter.__torch_function__  # type: ignore[method-assign]


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
_FIRST = ("input", "self", "tensor", "x", "A")  # names of first arguments
#: Functions that take parameters as `inputs`.
CALLS = {torch.autograd.grad, torch.autograd.backward}
#: Operations on the optimizer's object itself, also inside a forward pass.
_OWN: dict[str, Any] = {
    **dict.fromkeys(
        words(
            "_version requires_grad__set__ requires_grad_ __hash__ _grad"
            " register_post_accumulate_grad_hook"
        )
    ),
    "grad": seen_grad,
    "grad__set__": give_grad,
    "data__set__": give_data,
    "register_hook": register_hook,
}


# -- read as an attribute --------------------------------------------------------------------------


class ModuleParameters(dict[str, Any]):
    """The `_parameters` of a module whose parameters are sharded.

    `Module.__getattr__` reads an attribute by `[name]`, and gets the whole parameter in a pass.
    Other ways to read it (`get`, `items`, `values`) show what is stored.
    """

    def __getitem__(self, name: str) -> Any:
        # Compiled code is traced through this function. It finds what `swap` has put here, and
        # must meet no condition that changes from call to call
        value = dict.__getitem__(self, name)
        return seen(value) if getattr(value, "_onefold_faced", False) else value

    def __setitem__(self, name: str, value: Any) -> None:
        """Store `value`. `functional_call` puts back what it has read: for the whole of a parameter,
        the parameter itself is stored.
        """
        entry = entry_of(value)
        if entry is not None and value is entry.compute and not entry.unit.in_use:
            value = entry.param
        dict.__setitem__(self, name, value)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


#: (parameters of a module, name, value): for the engine itself.
put: Any = dict.__setitem__


def follow_reads(module: nn.Module) -> ModuleParameters:
    """Let reads of `module`'s parameters be seen. Returns its `_parameters` from now on."""
    there = module._parameters
    if not isinstance(there, ModuleParameters):
        there = module.__dict__["_parameters"] = ModuleParameters(there)
    return there


def seen(param: Any) -> Any:
    """Return what code that reads a module's attribute sees of a sharded parameter. See the table
    of this module. Collective at stage 3 if it gathers.
    """
    in_backward = in_autograd()
    if not here.passes and not in_backward:
        return param
    entry, engine = owner_of(param)
    if engine is None or not engine.computing:
        return param
    if in_backward and not torch.is_grad_enabled():  # no recomputation
        node: Any = torch._C._current_autograd_node()
        function = isinstance(node, torch.autograd.function.BackwardCFunction)
        if not function or not engine.in_pass:
            return param
    with disable_torch_function():
        return engine.passes.use(entry, keeps=True)


# -- given to a function of torch ------------------------------------------------------------------


def wholes(op: Operator, args: Any, kwargs: Any) -> Any:
    """Return the arguments with whole parameters in place of the sharded ones whose model computes.

    The backward of a Function and a hook get whole parameters too, but for writes: these go to the
    masters, which `.data` shows, because the whole is dropped after the pass.
    """
    backward, itself = in_autograd(), op.about_itself or op.name == "data"
    if op.name in ("data", "detach") and arriving(args[0]):
        itself = False  # a gradient hook of the parameter reads it
    computes = in_forward() or (backward and torch.is_grad_enabled())
    if not computes and (not backward or itself or op.writes_with(kwargs)):
        return args, kwargs

    def whole(t: torch.Tensor) -> torch.Tensor:
        entry, engine = owner_of(t)
        if engine is None and computes and not op.about_itself and "onefold" in t.__dict__:
            raise ShardedParameterError(
                f"{t.__dict__['onefold'].name!r} is a parameter of a model that is gone, and was used"
                " in a pass of another model, which cannot train it: keep the model, or use a clone"
                " of it."
            )
        if engine is None or t is not entry.param:
            return t
        if not (engine.computing if computes else engine.in_pass):
            return t
        about_itself = op.about_itself and op.name != "detach"
        return entry.compute if about_itself else engine.passes.use(entry)

    return mapped((args, kwargs), whole)


def call_autograd(func: Any, args: Any, kwargs: Any) -> Any:
    """Call one of CALLS with the whole parameters in place of the sharded ones among its arguments:
    autograd knows only the former.

    Raises:
        ValueError: gradients of DTensor parameters are to be returned.
    """
    if func == torch.autograd.grad:
        for t in tensors_in(args[1] if len(args) > 1 else kwargs["inputs"]):
            if (entry := entry_of(t)) is not None and entry.box is not None:
                raise ValueError(
                    f"torch.autograd.grad was asked for the gradient of {entry.name!r}, a DTensor."
                    " Use loss.backward() and read `.grad`, or torch.autograd.grad with respect to"
                    " activations."
                )
    args, kwargs = mapped((args, kwargs), leaf_of)
    released = any(isinstance(t, Elsewhere) for t in tensors_in((args, kwargs)))
    with disable_torch_function() if released else nullcontext():  # it would come here again
        return func(*args, **kwargs)


def leaf_of(t: torch.Tensor) -> torch.Tensor:
    """Return the whole parameter, which autograd knows, of a sharded one; any other tensor itself."""
    return t if (entry := entry_of(t)) is None else entry.compute


# -- outside a pass --------------------------------------------------------------------------------
#
# Operations on parameters outside a forward pass of their model: a penalty on weights, a temperature
# in the loss, tied weights.
#
# With gradients enabled, an operation on a sharded parameter gathers the whole parameter and computes
# on it. Autograd sees the same leaf that the forward pass uses. So the gradient of the operation is
# accumulated with that of the forward pass, and reduced with it.
#
# [Note: outside, nothing stays gathered] At stage 3 a unit that is gathered for one operation is
# released after it. Where autograd saves a tensor in the gathered buffer, it keeps a handle that does
# not stay (runtime/saved.py). Where the operation returns a view of the buffer, the user gets a copy,
# which keeps the graph. A penalty over all parameters therefore never holds more than one unit.
#
# At stage 3 each operation is a gather, so every rank must do the same operations.


def compute_outside(func: Any, args: Any, kwargs: Any, entries: Iterable[Entry]) -> Any:
    """Run `func` with gradients on the whole parameters of `entries`, which are among the
    arguments. Collective at stage 3.
    """
    engines: dict[Any, list[Unit]] = {}  # with the units that are gathered for this alone
    for entry in entries:
        engine: Any = entry.engine()
        unit, alone = engine.begin_outside(entry), engines.setdefault(engine, [])
        if engine.gather.gather_alone(unit):
            alone.append(unit)
    gathers = [engine.gather for engine in engines]

    def returned(t: torch.Tensor) -> torch.Tensor:
        """A copy of what lies in a gathered buffer; a view of the parameter itself, as `p.float()`
        returns it: a hook that the user registers on the result must not stay on the parameter.
        """
        if entry_of(t) is not None:
            t = t.view_as(t)
        return t.clone() if any(is_in(gather.by_storage, t) for gather in gathers) else t

    try:
        args, kwargs = whole_of(mapped((args, kwargs), leaf_of), "an operation with gradients")
        with saving(gathers, stays=False):
            out = mapped(func(*args, **kwargs), returned)
    finally:
        for engine, alone in engines.items():
            for unit in alone:
                engine.gather.release(unit)
    for engine in engines:
        engine.passes.watch_outside(out)
    return out


keep_from_compiler(seen)


# -- the whole parameter ---------------------------------------------------------------------------


_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
set_requires_grad: Any = _REQUIRES_GRAD.__set__  # (whole, bool): of the whole alone


class Whole(nn.Parameter):
    """A whole parameter as its module sees it in a forward pass."""

    @property
    def data(self) -> torch.Tensor:
        """In a forward pass all who read it share one version counter, which tells of their writes:
        see `keep_writes` in runtime/passes.py.
        """
        value: torch.Tensor = _DATA.__get__(self)
        entry = entry_of(self) if in_forward() and not in_autograd() else None
        if entry is None:
            return value
        if entry.alias is None or entry.alias.data_ptr() != value.data_ptr():
            entry.alias = value
        return entry.alias.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if (entry := entry_of(self)) is not None:
            entry.seen_version = -1  # it was written to
        _DATA.__set__(self, value)

    # `.grad`, `requires_grad` and hooks of the object that the optimizer has. Autograd does not come
    # here: it accumulates into the whole, and the reducer takes it from there at once.

    grad = _GRAD

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set it on the optimizer's object too. The reductions follow at the next pass."""
        entry = entry_of(self)
        for each in (self,) if entry is None else (entry.param, self):
            set_requires_grad(each, requires_grad)
        return self

    requires_grad: Any = property(_REQUIRES_GRAD.__get__, requires_grad_)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Register it on the optimizer's object, with which the engine calls it."""
        entry = entry_of(self)
        on: Any = super() if entry is None else entry.param
        return on.register_post_accumulate_grad_hook(hook)

    def set_(self, source: Any = None, *place: Any, **options: Any) -> Any:
        """Set the tensor; do nothing, not even count a write, if `source` is the tensor itself.

        torch's parametrizations set what they wrap to itself, and peft's adapters of experts wrap
        anew in every forward pass.
        """
        if source is self and not place and not options:
            return self
        return super().set_(*(() if source is None else (source,)), *place, **options)


class Released(Elsewhere, Whole):
    """A whole parameter while its unit is not gathered.

    Code may have kept it from an earlier moment, where it was whole: a hook's closure, `ctx.weight`
    of a Function, a list. At its first use it is gathered again, and then is a `Whole`. Code that
    does not ask a tensor's class (TorchScript, custom operators) must read `module.weight` anew.
    """

    _onefold_faced = False  # like `Whole`

    def bring(self, op: Operator, written: bool) -> nn.Parameter:
        """Return it with memory; outside passes, the optimizer's object, which serves code there.
        Collective, as reading `module.weight`.
        """
        entry, engine = owner_of(self)
        if entry is None or entry.compute is not self:
            raise RuntimeError(
                f"a whole parameter of shape {tuple(self.shape)} was used after the model that it"
                " belongs to was sharded anew or has gone. Read it from its module again."
            )
        if not engine.computing:
            return entry.param
        with disable_torch_function():
            return engine.passes.use(entry, keeps=True)


_DATA: Any = torch.Tensor.data
point: Any = _DATA.__set__  # (whole, tensor): for the engine itself; does not count as a write
