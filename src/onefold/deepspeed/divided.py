"""Divided parameters: made under `zero.Init`, with one interval on each rank, and no engine yet.

    a parameter of 10 elements on 4 ranks: [0 .. 3) [3 .. 6) [6 .. 9) [9 .. 10)

A divided parameter keeps its identity, shape, dtype and attributes, and one element of memory. Its
class decides what each use does:

| use                                            | result                                            |
|------------------------------------------------|---------------------------------------------------|
| shape, dtype, device, number of elements       | that of the whole parameter                       |
| `to()`, `half()`, `detach()`, `.data`          | a stand-in: the same shape, without values        |
| anything else, while a model is made in `Init` | it is gathered: rank 0's whole values (zero.py)   |
| anything else                                  | an error that names `zero.GatheredParameters`     |
| `p.data = value`                               | it becomes a plain parameter with that value      |
| `onefold.shard`                                | its values are read, one unit at a time           |
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onefold.comm import StallError, as_bytes
from onefold.device import available, default_device
from onefold.runtime.parameters.operators import convert, operator_of
from onefold.runtime.state.start import KEEPER
from onefold.wording import few

#: The attribute for what this rank keeps of a parameter that was made under `Init`.
EARLY = "_onefold_early"
#: The numbers of parameters (`ds_id`), the same on all ranks.
numbers = itertools.count()


@dataclass
class Early:
    """What a rank keeps of a parameter from `Init` on, until an engine has it.

    Attributes:
        values: this rank's interval; None while the parameter is whole.
        stays: it is never divided.
    """

    values: Tensor | None = None
    stays: bool = False


_MAKES_PARAMETERS = nn.Parameter.__new__.__code__

#: The function of the active `Init` that gathers parameters; empty outside `Init`.
gathers: list[Callable[[Sequence[nn.Parameter]], None]] = []


class ApartError(StallError):
    """Ranks did different things with parameters that were made under `zero.Init`."""


class _Divided:
    """The base of divided parameters and stand-ins: decides what each use does (see the table)."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        op = operator_of(func)
        if (op.about_itself or op.asks) and op.name != "detach":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if op.name == "data__set__" and isinstance(args[0], DividedParameter):
            with torch._C.DisableTorchFunctionSubclass():
                param, value = args
                if isinstance(value, (StandIn, DividedParameter)):
                    value = value.as_subclass(Tensor)
                else:
                    param.__class__ = nn.Parameter
                param.data = value
                return None
        leaves = tree_leaves((args, kwargs)) if gathers else []
        if used := [leaf for leaf in leaves if isinstance(leaf, DividedParameter)]:
            gathers[-1](used)
            if op.name == "detach" and sys._getframe(1).f_code is _MAKES_PARAMETERS:
                # nn.Parameter(param) asks for a tensor of the class that `param` has
                return func(*args, **kwargs).as_subclass(nn.Parameter)
            return func(*args, **kwargs)
        own, follows = args[0], op.run is convert or op.name in ("data", "detach")
        if follows and isinstance(own, (StandIn, DividedParameter)):
            # Another tensor of the same elements is a stand-in, too
            with torch._C.DisableTorchFunctionSubclass():
                one = own.detach().as_subclass(Tensor).as_strided((), ())
                made = func(one, *args[1:], **kwargs).detach()
                return made.expand(own.shape).as_subclass(StandIn)
        _refuse(op.name, args)


class StandIn(_Divided, Tensor):
    """The result of `detach()`, `.data` or `to()` of a divided parameter: shape and dtype only."""


class DividedParameter(_Divided, nn.Parameter):
    """The class of a parameter while it is divided. It is `nn.Parameter` again once it is whole."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with torch._C.DisableTorchFunctionSubclass():
            new = nn.Parameter(self.data.as_subclass(Tensor), self.requires_grad)
        note(new)
        hide(new, self.__dict__[EARLY].values.clone())
        memo[id(self)] = new
        return new

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickling", [self])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter of shape {tuple(self.shape)}, divided under deepspeed.zero.Init"


def _give_up(params: Sequence[nn.Parameter]) -> None:
    """Be the keeper of divided parameters: see `KEEPER`."""
    gather(params)
    for param in params:
        del param.__dict__[KEEPER], param.__dict__[EARLY]


def gather(params: Sequence[nn.Parameter]) -> None:
    """Make the parameters whole on every rank, with rank 0's values: its new ones if it has replaced
    a parameter by `p.data = value`. Collective.
    """
    replaced = agree(
        "parameters are gathered", [not isinstance(p, DividedParameter) for p in params]
    )
    for param, is_replaced in zip(params, replaced, strict=True):
        early = param.__dict__[EARLY]
        values, early.values = early.values, None
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            like = param.data.as_subclass(Tensor)
            if isinstance(param, DividedParameter):
                param.__class__ = nn.Parameter  # type: ignore[assignment]
                if is_replaced:
                    param.data = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            if is_replaced or values is None:
                broadcast(param.data, 0)
            else:
                there = values.to(_wire(values.device))
                whole = there.new_empty(there.numel() * dist.get_world_size())
                parts = [as_bytes(part) for part in whole.split(there.numel())]
                dist.all_gather(parts, as_bytes(there))
                whole = whole[: like.numel()].view(like.shape)
                param.data = whole.to(like.device, like.dtype)


def note(param: nn.Parameter, stays: bool = False) -> None:
    """Number a parameter. All ranks make them in the same order. `stays`: it must not be divided."""
    own = param.__dict__
    own.setdefault("ds_id", next(numbers))
    own[EARLY], own[KEEPER] = Early(stays=stays), _give_up


def can_divide(param: nn.Parameter) -> bool:
    """Whether it is a plain parameter with values here. Others stay whole until `onefold.shard`."""
    return type(param) is nn.Parameter and not param.__dict__[EARLY].stays and _has_values(param)


def _has_values(param: nn.Parameter) -> bool:
    there = not param.is_meta and not isinstance(param, nn.parameter.UninitializedParameter)
    return there and param.layout is torch.strided and param.numel() > 0


def divide(param: nn.Parameter, source: int) -> None:
    """Keep this rank's interval of the values that rank `source` has. Collective.

    A parameter that cannot be divided gets all of `source`'s values.
    """
    if isinstance(param, DividedParameter):
        return
    if _has_values(param):
        broadcast(param.data, source)
    if can_divide(param):
        hide(param, interval(param))


def interval(param: nn.Parameter) -> Tensor:
    """Return this rank's interval of the values that a whole parameter has here; the last ones are
    filled up with zeros.
    """
    flat, each = param.data.detach().reshape(-1), -(-param.numel() // dist.get_world_size())
    mine = flat[dist.get_rank() * each :][:each]
    return torch.nn.functional.pad(mine, (0, each - mine.numel()))


def values_of(param: nn.Parameter) -> Tensor | None:
    """Return this rank's interval; None if the parameter is whole here."""
    early: Early | None = param.__dict__.get(EARLY)
    return None if early is None else early.values


def hide(param: nn.Parameter, values: Tensor) -> None:
    """Keep this rank's interval `values`, and one element as the data."""
    param.__dict__[EARLY].values = values
    # NaN, so that a use by mistake shows
    value = math.nan if values.is_floating_point() or values.is_complex() else 0
    with torch._C.DisableTorchFunctionSubclass():
        one = torch.full((), value, dtype=values.dtype, device=param.device)
        param.data = one.expand(param.shape)
        param.__class__ = DividedParameter


def broadcast(tensor: Tensor, source: int, group: Any = None) -> None:
    """Broadcast the values of the `source`th rank of a group (None: of all ranks), by way of the
    accelerator if the backend needs that.
    """
    there = tensor.to(_wire(tensor.device, group)).contiguous()
    dist.broadcast(as_bytes(there), group=group, group_src=source)
    if there is not tensor:
        tensor.copy_(there)


def agree(doing: str, mine: Any = None, params: Sequence[nn.Parameter] = ()) -> Any:
    """Wait until every rank is about to do the same with parameters of the same shapes. Returns what
    rank 0 has given as `mine`. Collective.

    Args:
        doing: what this rank is about to do. It is compared, and quoted in the message.

    Raises:
        ApartError: on every rank: another rank does something else, or has ended with an error.
    """
    if dist.get_backend() == "fake":
        return mine
    # Not the dtypes: rank 0 alone may have loaded values of another dtype
    sizes = [
        None if isinstance(p, nn.parameter.UninitializedParameter) else tuple(p.shape)
        for p in params
    ]
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (doing, sizes, mine))
    if all(there[:2] == said[0][:2] for there in said):
        return said[0][2]
    told: dict[str, list[str]] = {}
    for rank, (what, *_) in enumerate(said):
        told.setdefault(what, []).append(str(rank))
    each = (
        f"on {'ranks' if len(of) > 1 else 'rank'} {few(of, 8)} {what}" for what, of in told.items()
    )
    raise ApartError(
        "the ranks do different things with parameters made under deepspeed.zero.Init:"
        f" {'; '.join(each)}. Each rank keeps a part of such a parameter, so every rank must read or"
        " change it: take the condition on the rank away, or change it after the model is made,"
        " inside `with deepspeed.zero.GatheredParameters(param, modifier_rank=0):`."
    )


def leave(error: BaseException) -> None:
    """Tell the ranks, at their next `agree`, that this one ended with an error. Waits for them."""
    if not isinstance(error, ApartError):
        with suppress(RuntimeError):
            agree(f"rank {dist.get_rank()} ended with {type(error).__name__}: {error}"[:500])


def _wire(device: torch.device, group: Any = None) -> torch.device:
    """Return the device from which the backend can send a tensor on `device`."""
    # "cuda:nccl", also of a group that was made without naming a backend
    kinds = [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]
    if device.type == "cpu" and "cpu" not in kinds and available():
        return default_device()
    return device


def _refuse(what: str, args: Any) -> NoReturn:
    shapes = [tuple(p.shape) for p in args if isinstance(p, (StandIn, DividedParameter))]
    raise RuntimeError(
        f"{what}: a parameter{f' of shape {shapes[0]}' if shapes else ''} was made under"
        " deepspeed.zero.Init, and each rank keeps a part of it. Read it inside `with"
        " deepspeed.zero.GatheredParameters(param):`, change it with modifier_rank=0, or do so"
        " after deepspeed.initialize."
    )


def shapes(params: Sequence[nn.Parameter]) -> str:
    """Describe the parameters for a message, by their shapes."""
    some = few([str(tuple(p.shape)) for p in params], 3)
    return f"{'a parameter' if len(params) == 1 else f'{len(params)} parameters'} of shape {some}"
