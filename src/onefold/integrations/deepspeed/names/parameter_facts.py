"""What scripts read from a parameter of stage 3: `ds_status`, `ds_shape`, `ds_tensor` and others.

| attribute          | made under `zero.Init`, no engine yet                      | of an engine at stage 3                     |
|--------------------|------------------------------------------------------------|---------------------------------------------|
| `ds_status`        | NOT_AVAILABLE while it is divided                          | NOT_AVAILABLE if it is divided              |
| `ds_id`            | its number, the same on all ranks                          | its number, if it is divided                |
| `ds_shape`, `ds_numel` | of the whole                                           | of the whole                                |
| `ds_persist`       | whether it stays whole                                     | whether every rank holds the whole          |
| `ds_tensor`        | this rank's interval, in its dtype, while it is divided    | this rank's elements, in master precision   |
| `ds_process_group` | of all ranks                                               | of all ranks                                |
| `ds_summary()`     | a dict of these                                            | a dict of these                             |

Writes to `ds_tensor` and to `ds_tensor.data` are kept. On an engine it is an interval of the unit's
flat buffer: ranks hold different numbers of elements of a parameter, or none.
"""

from __future__ import annotations

import weakref
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onefold.runtime.parameters.interval import disable_torch_function
from onefold.runtime.parameters.parameter import ShardedParameter


class ZeroParamStatus(Enum):
    """The values of `param.ds_status`: whole, sharded, being gathered."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class LocalPart(Tensor):
    """This rank's elements of an engine's parameter, shape [their number]. It shares their memory.

    `part.data = value` writes to the parameter. Operations return plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> Tensor:
        return self.detach().as_subclass(Tensor)

    @data.setter
    def data(self, value: Tensor) -> None:
        from onefold.integrations.deepspeed.names.access import safe_set_local_fp32_param

        param = self.__dict__["param"]()
        if param is not None:
            safe_set_local_fp32_param(param, value)


def local_part(param: nn.Parameter) -> LocalPart:
    """Return `param.ds_tensor` of an engine's parameter.

    Raises:
        AttributeError: its elements are stored on NVMe or encoded.
    """
    info: Any = param.onefold  # type: ignore[attr-defined]
    if not info.in_place:
        raise AttributeError(
            f"ds_tensor: parameter {info.name!r} is stored on NVMe or encoded; take"
            " safe_get_local_fp32_param(param)."
        )
    with disable_torch_function():
        part = param.detach().as_subclass(Tensor).reshape(-1).as_subclass(LocalPart)
    part.__dict__["param"] = weakref.ref(param)
    return part


def summary(param: nn.Parameter) -> dict[str, Any]:
    """Return what `param.ds_summary()` returns."""
    part = getattr(param, "ds_tensor", None)
    return {
        "id": getattr(param, "ds_id", None),
        "status": param.ds_status.name,  # type: ignore[attr-defined]
        "numel": param.numel(),
        "ds_numel": param.ds_numel,  # type: ignore[attr-defined]
        "shape": tuple(param.shape),
        "ds_shape": tuple(param.ds_shape),  # type: ignore[attr-defined]
        "requires_grad": param.requires_grad,
        "persist": param.ds_persist,  # type: ignore[attr-defined]
        "ds_tensor.shape": None if part is None else tuple(part.shape),
    }


def world_group(param: Any = None) -> Any:
    """Return the group of the ranks that divide a parameter: all of them."""
    return dist.group.WORLD


def serve_facts() -> None:
    """Give sharded parameters the attributes that are computed when they are read."""
    kind: Any = ShardedParameter
    kind.ds_tensor = property(local_part)
    kind.ds_process_group = property(world_group)
    kind.ds_summary = summary


def note(param: nn.Parameter, status: ZeroParamStatus, persists: bool) -> None:
    """Set the attributes that do not change with the values."""
    said = param.__dict__
    said["ds_status"], said["ds_persist"] = status, persists
    said["ds_shape"], said["ds_numel"] = param.shape, param.numel()
