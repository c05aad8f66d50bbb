"""The value of `module.weight` for a tiled module.

| access                                               | result                                                              |
|------------------------------------------------------|---------------------------------------------------------------------|
| inside `with onefold.full_params(model):`            | the whole weight, in the memory of its tiles: writes reach them     |
| shape, dtype, device                                 | those of the whole weight; nothing is gathered                      |
| computation in a forward pass                        | the whole weight, all tiles gathered: right results, no memory saved |
| an autograd Function that is differentiated          | `ShardedParameterError` in backward, which says what to give it     |
| elsewhere, if the tiles are divided among ranks      | `ShardedParameterError`, which says how to gather                   |
| `.grad`, and writes that would be lost               | `ShardedParameterError`, which says what to do instead              |
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from onefold.memory import storage_of
from onefold.runtime.parameters.open_passes import in_forward
from onefold.runtime.parameters.parameter import (
    ShardedParameter,
    ShardedParameterError,
    disable_torch_function,
    infos,
)
from onefold.runtime.parameters.schema import Does, operator_of, words


def stored(tile: nn.Module) -> Any:
    """Return a tile's parameter without gathering it: in a pass, `tile.weight` does."""
    return tile._parameters.get("weight")


def weight_of(tiles: Sequence[Any], shape: Sequence[int]) -> Tensor:
    """Return the value of `module.weight`. See the table of this module."""
    weights = [stored(tile) for tile in tiles]
    if not any(isinstance(w, ShardedParameter) or w.requires_grad for w in weights):
        whole = joint(weights, shape)
        if whole is not None:
            return nn.Parameter(whole, requires_grad=False)
    return WholeWeight(tiles, shape)


def joint(weights: Sequence[Tensor], shape: Sequence[int]) -> Tensor | None:
    """Return one view of `shape` over `weights`; None if they are not contiguous in one storage."""
    end = None
    for weight in weights:
        # Check the type first: in a forward pass any access to a sharded parameter may gather it.
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
    """Move the tiles of an unsharded model (for example a copy) to one storage, and return `joint`
    of them; None for a sharded model.
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
    """Return the whole weight: a view of the tiles' memory if possible, else a concatenation (also
    if autograd needs the gradient).

    Raises:
        ShardedParameterError: no view is possible, and `writable` (writes would be lost) or no
            forward pass is under way.
    """
    weights = [stored(tile) for tile in tiles]
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
        if not (writable or _computing()) and torch._C._current_graph_task_id() != -1:
            _refuse_gradient()
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
    # The split makes autograd refuse in-place writes to the result. They would be lost.
    return torch.cat(weights).split(shape[0])[0]


def copy_of(tiles: Sequence[Any], shape: Sequence[int]) -> Tensor:
    """Return the whole weight without gradient, for a state dict: a view if possible, else a copy.
    The tiles must be whole on this rank.
    """
    weights = [stored(tile).detach() for tile in tiles]
    whole = joint([stored(tile) for tile in tiles], shape)
    return torch.cat(weights) if whole is None else whole


def _computing() -> bool:
    """Return whether code now sees whole parameters, see runtime/parameters/parameter.py."""
    return in_forward() or (torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1)


_T: Any = torch.Tensor
#: Questions that its own class answers, besides those about its shape.
_FACTS = words(
    "dtype device layout is_leaf requires_grad is_cuda is_cpu is_meta is_contiguous itemsize"
    " element_size is_floating_point is_complex storage_offset"
)
_GRAD = {_T.grad.__get__, _T.grad.__set__}
_ALIASES = {_T.data.__get__, _T.detach, torch.detach}  # the caller may write to their result
_SWITCHES = {_T.requires_grad.__set__, _T.requires_grad_}
_CURE = (
    "Call its module; or give the function `torch.cat([tile.weight for tile in module.tiles])`, or the"
    " recipe a larger tile."
)


class WholeWeight(torch.Tensor):
    """Represents a weight in tiles, without memory of its own. See the table of this module."""

    _tiles: tuple[Any, ...]

    @staticmethod
    def __new__(cls: type[WholeWeight], tiles: Sequence[Any], shape: Sequence[int]) -> WholeWeight:
        like = stored(tiles[0])
        kind = {"dtype": like.dtype, "device": like.device, "requires_grad": like.requires_grad}
        out: WholeWeight = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), **kind)
        out._tiles = tuple(tiles)
        if out.requires_grad:
            with disable_torch_function():
                out.register_post_accumulate_grad_hook(_refuse_gradient)
        return out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = operator_of(func)
        if op.does is Does.SHAPE or op.name in _FACTS:
            with disable_torch_function():
                return func(*args, **kwargs)
        if func in _SWITCHES:
            for tile in args[0]._tiles:
                func(stored(tile), *args[1:], **kwargs)
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
        target = first if op.writes else kwargs.get("out")
        writable = isinstance(target, WholeWeight) or (func in _ALIASES and not _computing())
        return func(*_whole(args, writable), **_whole(kwargs, writable))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise ShardedParameterError(
            f"{func} was given a weight in tiles, which has no memory of its own. {_CURE}"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"a weight of shape {tuple(self.shape)} in {len(self._tiles)} tiles"


def _refuse_gradient(*_: Tensor) -> None:
    """Raise ShardedParameterError: code other than torch's has computed with the weight, whose
    gradient would not reach the tiles. Called as a hook of the gradient, or when the backward pass of
    a Function reads the weight.
    """
    raise ShardedParameterError(
        "a weight in tiles was given to an autograd Function, whose gradient cannot reach the tiles."
        f" {_CURE}"
    )


def _whole(value: Any, writable: bool) -> Any:
    if isinstance(value, WholeWeight):
        return whole_of(value._tiles, tuple(value.shape), writable)
    if isinstance(value, dict):
        return {key: _whole(v, writable) for key, v in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_whole(v, writable) for v in value)
    return value
