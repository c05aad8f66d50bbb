"""A whole parameter as its module sees it in a forward pass, and while its unit is not gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from onefold.runtime.differentiate import CALLS, in_autograd
from onefold.runtime.open_passes import in_forward
from onefold.runtime.parameters.interval import (
    disable_torch_function,
    get_grad,
    set_grad,
)
from onefold.runtime.parameters.values import give_grad, needs_no_elements, seen_grad


class Whole(nn.Parameter):
    """A whole parameter as its module sees it in a forward pass."""

    @property
    def data(self) -> torch.Tensor:
        """In a forward pass all who read it share one version counter, which tells of their writes:
        see `keep_writes` in runtime/refresh.py.
        """
        value: torch.Tensor = _DATA.__get__(self)
        seen = self.__dict__.get("_onefold_entry")
        entry = seen() if seen is not None and in_forward() and not in_autograd() else None
        if entry is None:
            return value
        if entry.alias is None or entry.alias.data_ptr() != value.data_ptr():
            entry.alias = value
        return entry.alias.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        seen = self.__dict__.get("_onefold_entry")
        if seen is not None and (entry := seen()) is not None:
            entry.seen_version = -1  # it was written to
        _DATA.__set__(self, value)

    # `.grad` and `requires_grad` of the object that the optimizer has. Autograd does not come here: it
    # accumulates into the whole, and the reducer takes it from there at once.

    @property
    def grad(self) -> torch.Tensor | None:
        own: torch.Tensor | None = get_grad(self)
        if own is not None or (param := _param_of(self)) is None:
            return own
        return seen_grad(param)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if (param := _param_of(self)) is None:
            set_grad(self, value)
        else:
            give_grad(param, value)

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


class Released(Whole):
    """A whole parameter while its unit is not gathered: it has a shape and no memory, and a kernel
    that is given it may read address 0.

    Code may have kept it from an earlier moment, where it was whole: a hook's closure, `ctx.weight`
    of a Function, a list. At its first use it is gathered again, and then is a `Whole`. Code that
    does not ask a tensor's class (TorchScript, custom operators) must read `module.weight` anew.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if needs_no_elements(func) or func in CALLS:  # autograd knows them by their nodes
            with disable_torch_function():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(Released, _gathered_again, (args, kwargs or {}))
        return func(*args, **kwargs)


def _gathered_again(whole: Released) -> nn.Parameter:
    """Return `whole` with memory; outside passes, the optimizer's object, which serves code there.
    Collective, as reading `module.weight`.
    """
    seen = whole.__dict__.get("_onefold_entry")
    entry = seen() if seen is not None else None
    engine = entry.engine() if entry is not None else None
    if entry is None or engine is None or entry.compute is not whole:
        raise RuntimeError(
            f"a whole parameter of shape {tuple(whole.shape)} was used after the model that it"
            " belongs to was sharded anew or has gone. Read it from its module again."
        )
    if not engine.computing:
        return entry.param
    with disable_torch_function():
        return engine.use(entry, keeps=True)


def _param_of(whole: Whole) -> nn.Parameter | None:
    """Return the optimizer's object of a whole parameter; None if its engine is closed."""
    seen = whole.__dict__.get("_onefold_entry")
    entry = seen() if seen is not None else None
    return entry.param if entry is not None and entry.compute is whole else None


_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
set_requires_grad: Any = _REQUIRES_GRAD.__set__  # (whole, bool): of the whole alone
_DATA: Any = torch.Tensor.data
point: Any = _DATA.__set__  # (whole, tensor): for the engine itself; does not count as a write
