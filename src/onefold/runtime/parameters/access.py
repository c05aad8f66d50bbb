"""What code that reads a weight gets: the whole parameter where its model computes, gathered if need
be.

[Note: memory is seen] Code may hand a weight to consumers that never ask a tensor's class how to
compute: an autograd Function, TorchScript, a compiled function, a custom operator, a checkpoint's
arguments. Such code sees the memory of a tensor. So in a pass the weight must be whole when a module's
attribute is read.

| who reads `module.weight`                                  | gets                                                          |
|------------------------------------------------------------|---------------------------------------------------------------|
| the forward pass of the unit that owns it                  | the whole parameter, which the pass has put there (`swap`) |
| other code in a pass of its model, or in the recomputation | the whole parameter, gathered now, until the pass ends        |
| the backward of an autograd Function of its model          | the same                                                      |
| a hook of a backward pass                                  | the sharded parameter: what a hook writes goes to the masters |
| a pass of another sharded model, code outside passes       | the sharded parameter (parameter.py)                          |

`module.parameters()` and its like always give sharded parameters, so that counting elements in a
forward pass gathers nothing. A function of torch that is given one computes with the whole: in a pass
of its model (`wholes`), and elsewhere with gradients (`compute_outside`).

A tensor saved for backward in gathered memory becomes a handle, whoever saves it (runtime/saved.py).
What code keeps without saving it is gathered again at its next use (`Released`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onefold.runtime.differentiate import in_autograd, keep_from_compiler, mapped, tensors_in
from onefold.runtime.open_passes import here, in_forward
from onefold.runtime.parameters.interval import (
    ShardedParameterError,
    disable_torch_function,
    entry_of,
    get_grad,
    owner_of,
    set_grad,
)
from onefold.runtime.parameters.operators import Operator, whole_of
from onefold.runtime.parameters.values import Elsewhere, arriving, give_grad, seen_grad
from onefold.runtime.saved import is_in, saving

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry, Unit


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
        entry, _ = owner_of(value)
        if entry is not None and value is entry.compute and not entry.flat.swapped_in:
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

    def leaf(t: torch.Tensor) -> torch.Tensor:
        return t if (entry := entry_of(t)) is None else entry.compute

    return func(*mapped(args, leaf), **mapped(kwargs, leaf))


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

    def whole(t: torch.Tensor) -> torch.Tensor:
        if (entry := entry_of(t)) is not None:
            return entry.compute
        gathered: torch.Tensor = whole_of(t, "an operation with gradients")
        return gathered

    def returned(t: torch.Tensor) -> torch.Tensor:
        """A copy of what lies in a gathered buffer; a view of the parameter itself, as `p.float()`
        returns it: a hook that the user registers on the result must not stay on the parameter.
        """
        if entry_of(t) is not None:
            t = t.view_as(t)
        return t.clone() if any(is_in(gather.by_storage, t) for gather in gathers) else t

    args, kwargs = mapped((args, kwargs), whole)
    with saving(gathers, stays=False):
        out = mapped(func(*args, **kwargs), returned)
    for engine, alone in engines.items():
        for unit in alone:
            engine.gather.release(unit)
        engine.passes.watch_outside(out)
    return out


keep_from_compiler(seen)


# -- the whole parameter ---------------------------------------------------------------------------


class Whole(nn.Parameter):
    """A whole parameter as its module sees it in a forward pass."""

    @property
    def data(self) -> torch.Tensor:
        """In a forward pass all who read it share one version counter, which tells of their writes:
        see `keep_writes` in runtime/passes.py.
        """
        value: torch.Tensor = _DATA.__get__(self)
        entry = owner_of(self)[0] if in_forward() and not in_autograd() else None
        if entry is None:
            return value
        if entry.alias is None or entry.alias.data_ptr() != value.data_ptr():
            entry.alias = value
        shared: torch.Tensor = entry.alias.detach()
        return shared

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        entry, _ = owner_of(self)
        if entry is not None:
            entry.seen_version = -1  # it was written to
        _DATA.__set__(self, value)

    # `.grad` and `requires_grad` of the object that the optimizer has. Autograd does not come here: it
    # accumulates into the whole, and the reducer takes it from there at once.

    @property
    def grad(self) -> torch.Tensor | None:
        param = _param_of(self)
        return get_grad(self) if param is None else seen_grad(param)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        param = _param_of(self)
        set_grad(self, value) if param is None else give_grad(param, value)

    @property
    def requires_grad(self) -> bool:
        return _REQUIRES_GRAD.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set it on the optimizer's object too. The reductions follow at the next pass."""
        if (param := _param_of(self)) is not None:
            _REQUIRES_GRAD.__set__(param, requires_grad)
        _REQUIRES_GRAD.__set__(self, requires_grad)
        return self

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Register it on the optimizer's object, whose hooks are called with the gradient."""
        if (param := _param_of(self)) is None:
            return super().register_post_accumulate_grad_hook(hook)
        return param.register_post_accumulate_grad_hook(hook)

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

    def bring(self, func: Any) -> nn.Parameter:
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


def _param_of(whole: Whole) -> nn.Parameter | None:
    """Return the optimizer's object of a whole parameter; None if its engine is closed."""
    entry, _ = owner_of(whole)
    return entry.param if entry is not None and entry.compute is whole else None


_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
set_requires_grad: Any = _REQUIRES_GRAD.__set__  # (whole, bool): of the whole alone
_DATA: Any = torch.Tensor.data
point: Any = _DATA.__set__  # (whole, tensor): for the engine itself; does not count as a write
