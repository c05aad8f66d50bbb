"""The sharded parameter: what the optimizer, and any code outside a gather, sees of a parameter
that is divided.

It is an `nn.Parameter` over plain memory: this rank's interval of the parameter, one-dimensional,
in master precision. It keeps the
face of the whole: shape, number of elements and every attribute that somebody put on it.

| who looks                                         | sees                                                                              |
|---------------------------------------------------|-----------------------------------------------------------------------------------|
| the optimizer inside `step()`                     | a plain `nn.Parameter`: the local interval (`bared`)                              |
| the forward pass of the unit that owns it         | the whole parameter (another object, swapped in)                                  |
| any other code inside a forward pass of the model | the whole parameter, gathered on first use (shape, dtype: no gather)              |
| code inside a backward pass of the model          | the same; but `.data`, detach() and what writes in place: the interval            |
| code outside, with gradients                      | the whole parameter, gathered for the operation (`outside`)                       |
| code outside, without; `.data`, `.grad`, detach() | an interval with the face of the whole (`interval`, `operators`)                 |

`parameter.onefold` holds name, logical shape, this rank's interval and `gather()`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from onefold.runtime import differentiate
from onefold.runtime.parameters import gradient_hooks
from onefold.runtime.parameters.interval import (
    GivenOut,
    ShardedParameterError,
    disable_torch_function,
    dispatched_by,
    dress,
    get_grad,
    set_grad,
    spec_of,
)
from onefold.runtime.parameters.operators import (
    OF_ANOTHERS_KIND,
    compute,
    is_about_itself,
    name_of,
    words,
    writes_in_place,
)
from onefold.runtime.parameters.outside import compute_outside
from onefold.runtime.parameters.storageless import seen_storageless, storageless_error
from onefold.runtime.parameters.values import (
    before_write,
    dropped_grad,
    give_data,
    give_grad,
    give_whole,
    seen_data,
    seen_grad,
)

if TYPE_CHECKING:
    from onefold.runtime.entry import Entry
    from onefold.runtime.parameters.owning_engine import OwningEngine

__all__ = [
    "ShardInfo",
    "ShardedParameter",
    "ShardedParameterError",
    "disable_torch_function",
    "leaf_asked_by",
]

#: Told of each optimizer that takes a sharded parameter into a group (optim/whole_state/following.py): torch
#: asks there whether it is a leaf.
leaf_asked_by: list[Callable[[Any], None] | None] = [None]


class ShardInfo:
    """What `parameter.onefold` says about a sharded parameter.

    Attributes:
        name: its name in the model.
        shape: its logical shape.
        interval: `(start, stop)`, the elements of the flattened parameter that this rank holds.
        dtype: the dtype it is computed in (the parameter itself is held in master precision).
        sharded: whether this rank holds only a part (stage 0 holds the whole, and still computes
            with another object).
        on_disk: whether its elements rest on NVMe, or encoded: the parameter has a shape, and no
            memory.
    """

    def __init__(self, entry: Entry, interval: tuple[int, int]) -> None:
        self._entry = weakref.ref(entry)
        self.name, self.shape, self.interval = (
            entry.slot.name,
            torch.Size(entry.slot.shape),
            interval,
        )
        self.dtype = entry.compute.dtype
        self.sharded = not entry.flat.whole_master
        self.in_place = entry.flat.storage.in_place

    def __deepcopy__(self, memo: object) -> ShardInfo:
        return self

    def __reduce__(self) -> Any:
        return (str, (repr(self),))

    def gather(self) -> torch.Tensor:
        """The whole parameter in master precision, shape `self.shape`. A collective: every rank
        must call it.
        """
        entry = self._entry()
        engine = entry.engine() if entry is not None else None
        if entry is None or engine is None:
            raise RuntimeError(f"the model of parameter {self.name!r} is gone.")
        return engine.whole(entry)

    def __repr__(self) -> str:
        return (
            f"{self.name!r}: elements {self.interval[0]} to {self.interval[1]} of shape"
            f" {tuple(self.shape)}"
        )


_enabled = torch._C._is_torch_function_enabled
_T: Any = torch._C.TensorBase
_get_shape, _get_dtype = _T.shape.__get__, _T.dtype.__get__


def _recomputing() -> bool:
    """In a forward pass that autograd runs again."""
    return torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()


def _in_backward() -> bool:
    """In a backward pass: the backward of a Function, a hook, a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _in_own_pass(engine: OwningEngine) -> bool:
    """In a pass of the parameter's own model: another's is looked at from outside."""
    return engine.in_pass


def _computing(engine: OwningEngine) -> bool:
    return engine.computing


#: What asks for gradients only to drop them, or to fill them with zeros in place: it needs no face.
_DROPS = frozenset(
    getattr(drops, "__wrapped__", drops).__code__
    for drops in (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad)
)

#: Where `optimizer.load_state_dict` gives states the dtype of the parameter: of what the optimizer
#: steps.
_CASTS_STATES = "_process_value_according_to_param_policy"


class ShardedParameter(nn.Parameter):
    """See the table of this module."""

    _onefold_faced = True

    # What loops over parameters ask most often has a short way: a property costs a tenth of what
    # __torch_function__ does.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        if _enabled():
            return self.__dict__["onefold"].shape
        return _get_shape(self)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.shape)

    # What the model was declared in: `x.to(next(model.parameters()).dtype)` is what it computes
    # with. `.data` and `.grad` are in master precision, and say so.

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        if not _enabled() or sys._getframe(1).f_code.co_name == _CASTS_STATES:
            return _get_dtype(self)
        if ForwardDepth.value or _in_backward():
            # Code of a backward pass must come to what it came to in the forward pass, where its
            # module had the whole parameter: adapters cast their input to this
            entry = self.__dict__["_onefold_entry"]()
            if entry is not None and (engine := entry.engine()) and _in_own_pass(engine):
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
        asker = sys._getframe(1)
        if leaf_asked_by[0] is not None and asker.f_code.co_name == "add_param_group":
            leaf_asked_by[0](asker.f_locals.get("self"))
        return True

    @property
    def grad(self) -> torch.Tensor | None:
        if not _enabled():
            return get_grad(self)
        if gradient_hooks.showing and (entry := gradient_hooks.showing.get(id(self))) is not None:
            return entry.compute.grad
        with disable_torch_function():
            if sys._getframe(1).f_code in _DROPS:
                return dropped_grad(self)
            return seen_grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if not _enabled():
            set_grad(self, value)
        elif gradient_hooks.showing and (entry := gradient_hooks.showing.get(id(self))) is not None:
            entry.compute.grad = value
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
    """What is done with `func` where a sharded parameter or an interval is among its arguments."""
    # Not under disable_torch_function: what is recomputed inside needs to see parameters as they are
    if func in differentiate.CALLS:
        return differentiate.call(func, args, kwargs)
    if (
        gradient_hooks.showing
        and (answer := gradient_hooks.answered(func, args, kwargs)) is not NotImplemented
    ):
        return answer
    if (
        func in gradient_hooks.REGISTER
        and isinstance(args[0], ShardedParameter)
        and (entry := args[0].__dict__["_onefold_entry"]())
    ):
        return gradient_hooks.register(entry, func, args, kwargs)
    with disable_torch_function():
        name = name_of(func)
        first = args[0] if args else None
        if name in _OWN and isinstance(first, ShardedParameter):
            return _own(func, name, first, args, kwargs)
        # In a forward pass, or in a recomputation of one (which autograd runs with gradients on),
        # code wants the whole.
        if ForwardDepth.value or _recomputing():
            args, kwargs = _substitute(func, args, kwargs)
            # Another model's, which does not compute now
            if (entries := _differentiated(func, args, kwargs)) is not None:
                return compute_outside(func, args, kwargs, entries)
            return compute(func, args, kwargs) if _specs(args, kwargs) else func(*args, **kwargs)
        # So does the backward of a Function, and a hook. What they write goes to the master, which
        # `.data` shows them: the whole is dropped behind the pass.
        if _in_backward() and not (
            name in ("data", "detach") or is_about_itself(func) or writes_in_place(func, kwargs)
        ):
            args, kwargs = _substitute(func, args, kwargs, _in_own_pass)
        if name in OF_ANOTHERS_KIND and not getattr(type(first), "_onefold_faced", False):
            return func(*_as_declared(args), **_as_declared(kwargs))
        found = infos(args, kwargs)
        if (
            name not in _OF_STORAGELESS
            and (gone := next((i for i in found if not i.in_place), None)) is not None
        ):
            raise storageless_error(func, f"parameter {gone.name!r}")
        seen = name in ("data", "detach")
        if seen or writes_in_place(func, kwargs):
            _before_write(args, kwargs, seen)
        if seen and isinstance(first, ShardedParameter):
            if not first.__dict__["onefold"].in_place:
                return seen_storageless(
                    func(first), f"parameter {first.__dict__['onefold'].name!r}", spec_of(first)
                )
            out = seen_data(first) if name == "data" else func(first)
            out = out if (spec := spec_of(first)) is None else dress(out, spec)
            first.__dict__.setdefault("_onefold_given_out", GivenOut()).add(out)
            return out
        if name in ("dtype", "device", "is_complex") and _asked_by(_ELSEWHERE):
            _refuse_elsewhere(first, found)
        if (entries := _differentiated(func, args, kwargs)) is not None:
            return compute_outside(func, args, kwargs, entries)
        if _specs(args, kwargs):
            return compute(func, args, kwargs)
        if not is_about_itself(func) and not writes_in_place(func, kwargs):
            args, kwargs = _as_declared(args), _as_declared(kwargs)
        return func(*args, **kwargs)


dispatched_by[0] = dispatch


def _before_write(args: Any, kwargs: Any, seen: bool) -> None:
    """See `MasterAccess.before_write`."""
    for t in _flatten((args, kwargs)):
        if isinstance(t, ShardedParameter):
            before_write(t, seen)
        elif isinstance(t, torch.Tensor) and not seen and (spec := spec_of(t)) is not None:
            spec.owners.before_write()


def _as_declared(value: Any) -> Any:
    """`value` with each whole parameter whose masters are in another dtype than the model was
    declared in cast to that.
    """
    if isinstance(value, ShardedParameter):
        declared = value.__dict__["_onefold_declared"]
        return value if declared == value.dtype else value.detach().to(declared)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map(_as_declared, value))
    return {k: _as_declared(v) for k, v in value.items()} if isinstance(value, dict) else value


def _own(func: Any, name: str, param: Any, args: Any, kwargs: Any) -> Any:
    """What belongs to the optimizer's object itself, inside a forward pass too."""
    if name == "grad":
        return seen_grad(param)
    if name == "grad__set__":
        return give_grad(param, args[1])
    if name == "data__set__":
        entry = param.__dict__["_onefold_entry"]()
        if (
            ForwardDepth.value
            and entry is not None
            and (engine := entry.engine()) is not None
            and engine.computing
        ):
            return give_whole(entry, engine.use(entry), args[1])
        return give_data(param, args[1])
    return func(*args, **kwargs)


def bare(params: Iterable[nn.Parameter]) -> None:
    """Let sharded parameters be plain ones for an optimizer's step: of this rank's elements, as
    fast as any.
    """
    for param in params:
        if (plain := param.__dict__.get("_onefold_bare")) is not None:
            param.__class__ = plain


def face(params: Iterable[nn.Parameter]) -> None:
    """The end of `bare`."""
    for param in params:
        if (faced := param.__dict__.get("_onefold_class")) is not None:
            param.__class__ = faced


_SUBCLASSES: dict[type, type] = {}


def faced_class(kind: type) -> type:
    """The class of a sharded parameter that was of class `kind`: it still is an instance of it,
    where `kind` only marks its parameters.
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
_C10D = ("distributed_c10d.py",)
_ELSEWHERE = (*_DDP, *_C10D)


def _asked_by(files: tuple[str, ...]) -> bool:
    """Whether the code that uses the tensor (three frames up) lies in one of `files`."""
    return sys._getframe(3).f_code.co_filename.endswith(files)


def _refuse_elsewhere(tensor: Any, found: list[ShardInfo]) -> None:
    if sys._getframe(3).f_code.co_filename.endswith(_DDP):
        if found:
            raise ShardedParameterError(WRAPPED)
        return
    spec = spec_of(tensor)
    if spec is not None:
        raise ShardedParameterError(
            f"torch.distributed.{sys._getframe(3).f_code.co_name} was given {spec.name!r}, of which"
            f" each rank holds other elements (this one {spec.start} to {spec.stop} of shape"
            f" {tuple(spec.shape)}). Onefold starts from rank 0's weights and averages gradients by"
            " itself: leave the call out, or use a whole copy, parameter.onefold.gather()."
        )


class ForwardDepth:
    """How many forward passes of sharded models are open: a quick way out for the common case of
    none.
    """

    value = 0


def infos(args: Any, kwargs: Any) -> list[ShardInfo]:
    return [
        info
        for t in _flatten((args, kwargs))
        if isinstance(t, ShardedParameter) and (info := t.__dict__.get("onefold"))
    ]


def _specs(args: Any, kwargs: Any) -> bool:
    """Whether any argument is one rank's part."""
    return any(
        spec_of(t) is not None for t in _flatten((args, kwargs)) if isinstance(t, torch.Tensor)
    )


def _graded(args: Any, kwargs: Any) -> list[Entry]:
    """The sharded parameters among the arguments, each once, in order."""
    out: dict[int, Entry] = {}
    for t in _flatten((args, kwargs)):
        if (
            isinstance(t, ShardedParameter)
            and (entry := t.__dict__["_onefold_entry"]()) is not None
            and entry.engine() is not None
        ):
            out[id(entry)] = entry
    return list(out.values())


def _differentiated(func: Any, args: Any, kwargs: Any) -> list[Entry] | None:
    """The sharded parameters among the arguments, if gradients of `func` reach one of them."""
    if not torch.is_grad_enabled() or is_about_itself(func) or writes_in_place(func, kwargs):
        return None
    entries = _graded(args, kwargs)
    return entries if any(entry.compute.requires_grad for entry in entries) else None


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _flatten(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _flatten(v)]
    return [value]


def _substitute(
    func: Any, args: Any, kwargs: Any, wanted: Callable[[OwningEngine], bool] = _computing
) -> tuple[Any, Any]:
    """The arguments with each sharded parameter of a model that is `wanted` replaced by its whole
    parameter, gathered if need be.
    """

    def swap(value: Any) -> Any:
        if isinstance(value, ShardedParameter):
            info = value.__dict__.get("onefold")
            entry = info._entry() if info is not None else None
            if entry is None or not wanted(entry.engine()):
                return value
            if (name := name_of(func)) == "data":
                entry.flat.written_in_forward = True  # perhaps: see `Whole`
            return (
                entry.compute
                if is_about_itself(func) and name not in ("data", "detach")
                else entry.engine().use(entry)
            )
        if isinstance(value, (list, tuple)):
            return type(value)(swap(v) for v in value) if not hasattr(value, "_fields") else value
        return value

    return tuple(swap(a) for a in args), {k: swap(v) for k, v in kwargs.items()}


_HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook"))
# What belongs to the optimizer's object.
_OWN = frozenset(
    (
        "grad",
        "grad__set__",
        "_version",
        "requires_grad__set__",
        "requires_grad_",
        "__hash__",
        "data__set__",
        "_grad",
    )
)
# What may be done to a parameter that has no memory.
_OF_STORAGELESS = (
    _OWN
    | _HOOKS
    | words("""
    shape dtype device ndim is_leaf requires_grad layout is_cuda is_cpu is_meta itemsize nbytes size dim numel nelement
    is_floating_point is_complex element_size stride __len__ is_contiguous data detach grad_fn is_sparse is_quantized is_nested
    untyped_storage storage_offset get_device as_subclass retain_grad names is_signed ndimension is_xpu is_mps is_mtia retains_grad
    """)
)
