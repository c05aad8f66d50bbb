"""`zero.GatheredParameters`, before the engine and behind it.

| a parameter                      | on rank 0       | on the other ranks             | inside `GatheredParameters`    |
|----------------------------------|-----------------|--------------------------------|--------------------------------|
| made under `Init`, no engine yet | whole           | its shape, one element of NaN  | whole, rank 0's values         |
| of an engine, sharded            | an interval     | an interval                    | whole, in master precision     |
| any other                        | whole           | whole                          | as it is                       |

On leaving, the values of `modifier_rank` are everybody's; without one, what was changed is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onefold.integrations.deepspeed.names.first_rank import NUMBER, broadcast, drop, lend
from onefold.runtime.interval import disable_torch_function
from onefold.runtime.parameter import ShardedParameter, bare, face

_DEPTH = "_onefold_gathered"


class ZeroParamStatus(Enum):
    """What `param.ds_status` may be. A parameter here is always usable as it stands."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class GatheredParameters:
    """Inside, the parameters are whole on every rank. Collective.

    Args:
        params: a parameter, several, or a module. Those that are whole already are left alone.
        modifier_rank: the rank whose changes are kept on leaving; None keeps none.
        fwd_module: accepted; see `register_external_parameter`.
        enabled: False does nothing.

    Raises:
        ValueError: on leaving: a sharded parameter was given another shape.
        NotImplementedError: `modifier_rank` with parameters that rest on NVMe or encoded.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.modifier_rank = modifier_rank
        self._held: list[tuple[nn.Parameter, bool, Any]] = []
        self._params = _ordered(params) if enabled else []

    def __enter__(self) -> None:
        for param in self._params:
            depth = param.__dict__.get(_DEPTH, 0)
            param.__dict__[_DEPTH] = depth + 1
            kept: Tensor | None = None
            if depth:
                pass  # an outer context has gathered it
            elif isinstance(param, ShardedParameter):
                kept = _gather_sharded(param, self)
            else:
                lend(param)
            self._held.append((param, depth > 0, kept))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        held, self._held = self._held, []
        for param, nested, kept in held:
            param.__dict__[_DEPTH] -= 1
            writes = self.modifier_rank is not None and error is None
            with torch.no_grad():
                if writes:
                    broadcast(param.data, self.modifier_rank or 0)
                if nested:
                    continue
                param.__dict__.pop(_DEPTH)
                if kept is not None:
                    _put_back(param, kept, writes)
                elif dist.get_rank() != 0:
                    drop(param)


def _ordered(params: Any) -> list[nn.Parameter]:
    """Those that are not whole everywhere, each once, in an order that all ranks share: callers
    may have collected them in a set.
    """
    given: Iterable[Any] = (
        params.parameters()
        if isinstance(params, nn.Module)
        else [params]
        if isinstance(params, Tensor)
        else params
    )
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return []
    found: dict[int, nn.Parameter] = {}
    for p in given:
        parted = isinstance(p, ShardedParameter) or NUMBER in getattr(p, "__dict__", {})
        if parted or _DEPTH in getattr(p, "__dict__", {}):
            found[id(p)] = p
    return sorted(found.values(), key=_number)


def _number(param: nn.Parameter) -> tuple[int, int]:
    entry = param.__dict__.get("_onefold_entry")
    if entry is not None and (known := entry()) is not None:
        return (1, known.number)
    return (0, param.__dict__.get(NUMBER, 0))


def _gather_sharded(param: nn.Parameter, context: GatheredParameters) -> Tensor:
    """Make it a plain whole parameter; what it held is returned."""
    info: Any = param.onefold  # type: ignore[attr-defined]
    if context.modifier_rank is not None and not info.in_place:
        raise NotImplementedError(
            f"GatheredParameters: parameter {info.name!r} rests on NVMe or encoded, and cannot be"
            " changed there with modifier_rank: change it before initialize, or with"
            " onefold.full_params(model, write=True)."
        )
    whole = info.gather()
    with disable_torch_function():
        local = param.data
        bare([param])
        param.data = whole
    return local


def _put_back(param: nn.Parameter, local: Tensor, writes: bool) -> None:
    whole = param.data
    param.data = local
    face([param])
    info: Any = param.onefold  # type: ignore[attr-defined]
    if not writes:
        return
    if whole.shape != info.shape:
        raise ValueError(
            f"GatheredParameters: parameter {info.name!r} of shape {tuple(info.shape)} was given"
            f" shape {tuple(whole.shape)}. Change shapes before initialize, or inside `with"
            " onefold.unsharded(engine.module):`."
        )
    with disable_torch_function():
        held = param.dtype
    param.data = whole.to(held)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing: a parameter that another module's forward pass uses is gathered when it is used."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing; see `register_external_parameter`."""
