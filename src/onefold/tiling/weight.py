"""What `module.weight` is where the weight is in tiles.

| who looks                                            | sees                                                               |
|------------------------------------------------------|--------------------------------------------------------------------|
| code inside `with onefold.full_params(model):`       | the whole weight, in the memory of its tiles: what is written stays |
| shape, dtype, device                                 | those of the whole weight; nothing is gathered                     |
| code in a forward pass that computes with it         | the whole weight, all tiles gathered: equal results, nothing saved |
| code elsewhere, if the tiles are divided among ranks | `ShardedParameterError` with the way to gather it                  |
| `.grad`, and writes that would be lost               | `ShardedParameterError` with what to do instead                    |
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from onefold.memory import storage_of
from onefold.runtime.parameters.operators import METADATA, name_of
from onefold.runtime.parameters.parameter import (
    ForwardDepth,
    ShardedParameter,
    ShardedParameterError,
    disable_torch_function,
    infos,
)


def weight_of(tiles: Sequence[Any], shape: Sequence[int]) -> Tensor:
    """What `module.weight` is. See the table of this module."""
    weights = [tile.weight for tile in tiles]
    if not any(isinstance(w, ShardedParameter) or w.requires_grad for w in weights):
        whole = joint(weights, shape)
        if whole is not None:
            return nn.Parameter(whole, requires_grad=False)
    return WholeWeight(tiles, shape)


def joint(weights: Sequence[Tensor], shape: Sequence[int]) -> Tensor | None:
    """A view of `shape` of the memory in which `weights` lie one behind another; None where they do
    not.
    """
    end = None
    for weight in weights:
        # The type comes first: asking a divided parameter anything in a forward pass may gather it.
        if (
            type(weight) is not nn.Parameter
            or not weight.is_contiguous()
            or weight.storage_offset() != (end or weight.storage_offset())
        ):
            return None
        end = weight.storage_offset() + weight.numel()
    if len({storage_of(weight) for weight in weights}) > 1:
        return None
    strides = [prod(shape[at + 1 :]) for at in range(len(shape))]
    return weights[0].detach().as_strided(tuple(shape), strides, weights[0].storage_offset())


def rejoined(weights: Sequence[Tensor], shape: Sequence[int]) -> Tensor | None:
    """As `joint`, after giving the tiles of a model that is not divided (a copy of one, say) memory
    in one piece; None for others.
    """
    if (
        any(type(weight) is not nn.Parameter for weight in weights)
        or len({weight.device for weight in weights}) > 1
    ):
        return None
    whole = torch.empty(tuple(shape), dtype=weights[0].dtype, device=weights[0].device)
    for weight, rows in zip(
        weights, whole.split([weight.shape[0] for weight in weights]), strict=True
    ):
        weight.data = rows.copy_(weight.data)
    return joint(weights, shape)


def whole_of(tiles: Sequence[Any], shape: Sequence[int], writable: bool = False) -> Tensor:
    """The whole weight for code that asks for it: where its tiles lie if that is in one piece, or
    else put together.

    Raises:
        ShardedParameterError: they do not lie in one piece, and no forward pass is under way; or
            `writable`, and what is written would be lost.
    """
    weights = [tile.weight for tile in tiles]
    whole = joint(weights, shape)
    if whole is None:
        whole = rejoined(weights, shape)
    if whole is not None and (
        writable or not (torch.is_grad_enabled() and weights[0].requires_grad)
    ):
        return whole
    if whole is None:
        found = infos(weights, {})
        name = f"{found[0].name!r} and further" if found else "of a model that is not sharded"
        if writable or not _computing():
            raise ShardedParameterError(
                f"a weight in tiles ({name}) was {'to be written to' if writable else 'used'} as a"
                " whole where only its tiles are. Call its module instead, or do this inside `with"
                " onefold.full_params(model):` (with write=True, to change it), on every rank."
            )
        if not tiles[0].told:
            tiles[0].told = True
            logging.getLogger("onefold").warning(
                f"a weight in tiles ({name}) is read as a whole in the forward pass, which gathers"
                " all of it: results are equal, but no memory is saved. Call its module instead of"
                " reading its weight."
            )
    # By way of a split, since autograd refuses writes to what comes out of one: they would be lost.
    return torch.cat(weights).split(shape[0])[0]


def copy_of(tiles: Sequence[Any], shape: Sequence[int]) -> Tensor:
    """The whole weight without gradients, for a state dict; a copy where it does not lie in one
    piece. The tiles are whole on this rank.
    """
    weights = [tile.weight.detach() for tile in tiles]
    whole = joint([tile.weight for tile in tiles], shape)
    return torch.cat(weights) if whole is None else whole


def _computing() -> bool:
    """Whether sharded parameters are whole to code that runs now, see runtime/parameters/parameter.py."""
    return bool(ForwardDepth.value) or (
        torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
    )


_T: Any = torch.Tensor
_GRAD = {_T.grad.__get__, _T.grad.__set__}
_ALIASES = {_T.data.__get__, _T.detach, torch.detach}  # whoever asks for these may write into them
_SWITCHES = {_T.requires_grad.__set__, _T.requires_grad_}
_OPERATORS = {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


class WholeWeight(torch.Tensor):
    """Stands for a weight in tiles; holds nothing itself. See the table of this module."""

    _tiles: tuple[Any, ...]

    @staticmethod
    def __new__(cls: type[WholeWeight], tiles: Sequence[Any], shape: Sequence[int]) -> WholeWeight:
        like = tiles[0].weight
        kind = {"dtype": like.dtype, "device": like.device, "requires_grad": like.requires_grad}
        out: WholeWeight = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), **kind)
        out._tiles = tuple(tiles)
        return out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if name_of(func) in METADATA:
            with disable_torch_function():
                return func(*args, **kwargs)
        if func in _SWITCHES:
            for tile in args[0]._tiles:
                func(tile.weight, *args[1:], **kwargs)
            return args[0]
        if func in _GRAD:
            raise ShardedParameterError(
                "the gradient of a weight in tiles lies on its tiles: `tile.weight.grad for tile in"
                " module.tiles`."
            )
        if func == _T.data.__set__:
            raise ShardedParameterError(
                "a weight in tiles cannot be given other memory: write into it, with `copy_`."
            )
        first = args[0] if args else next(iter(kwargs.values()))
        target = first if _writes(func) else kwargs.get("out")
        writable = isinstance(target, WholeWeight) or (func in _ALIASES and not _computing())
        return func(*_whole(args, writable), **_whole(kwargs, writable))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise ShardedParameterError(
            f"{func} was given a weight in tiles, which has no memory of its own: call its module"
            " instead."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"a weight of shape {tuple(self.shape)} in {len(self._tiles)} tiles"


def _writes(func: Any) -> bool:
    """Whether a function of torch changes its first argument."""
    name = getattr(func, "__name__", "")
    return (
        name in _OPERATORS
        or name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
    )


def _whole(value: Any, writable: bool) -> Any:
    if isinstance(value, WholeWeight):
        return whole_of(value._tiles, tuple(value.shape), writable)
    if isinstance(value, dict):
        return {key: _whole(v, writable) for key, v in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_whole(v, writable) for v in value)
    return value
