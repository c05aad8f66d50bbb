"""torch.autocast around an engine's forward passes, and what its gradients weigh on the wire.

| the file says                       | autocast set around the call | the forward pass runs                            |
|-------------------------------------|------------------------------|--------------------------------------------------|
| `torch_autocast` with a dtype       | any, or none                 | under autocast in that dtype                     |
| no `torch_autocast`                 | none                         | in the precision of the file                     |
| no `torch_autocast`                 | set                          | in the precision of the file; a warning says so  |

Gradients of the module classes that `lower_precision_safe_modules` names travel in the autocast's
dtype, others in their own.
"""

from __future__ import annotations

import contextlib
import logging
import pkgutil
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

__all__ = [
    "PARAM_COMM_DTYPE_ATTR_NAME",
    "get_comm_dtype",
    "get_default_autocast_lower_precision_modules",
    "has_comm_dtype",
]
logger = logging.getLogger("onefold")

#: The classes whose gradients travel in the autocast's dtype, if the file names none.
SAFE_MODULES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
#: The attribute of a parameter that tells readers in which dtype its gradient travels.
PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"


def mark_for_the_wire(model: nn.Module, dtype: torch.dtype, modules: Sequence[str] | None) -> None:
    """Let gradients of the safe modules travel in the autocast's dtype. Call it before `shard`.

    Args:
        modules: full names of their classes; None takes `SAFE_MODULES`.

    Raises:
        ValueError: a class of `lower_precision_safe_modules` cannot be imported.
    """
    safe = SAFE_MODULES if modules is None else tuple(map(_imported, modules))
    for module in model.modules():
        if type(module) not in safe:
            continue
        for parameter in module.parameters(recurse=False):
            marks: dict[str, Any] = parameter.__dict__
            marks[PARAM_COMM_DTYPE_ATTR_NAME] = marks["_onefold_wire"] = dtype


def _imported(name: str) -> type:
    try:
        found: Any = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        found = None
    if not isinstance(found, type):
        raise ValueError(
            f"torch_autocast.lower_precision_safe_modules names {name!r}, and there is no such"
            " class: write its full name, as in 'torch.nn.Linear'."
        )
    return found


def context_of(
    dtype: torch.dtype | None, device: torch.device
) -> contextlib.AbstractContextManager[Any]:
    """Return the context of an engine's forward pass on `device`. `dtype`: `torch_autocast`'s."""
    if dtype is not None:
        return torch.autocast(device.type, dtype=dtype)
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    _warn()
    return torch.autocast(device.type, enabled=False)


@cache
def _warn() -> None:
    logger.warning(
        "engine(...) was called under torch.autocast, and its configuration has no"
        ' "torch_autocast": the pass computes in the precision of the configuration. Write'
        ' "torch_autocast": {"enabled": true, "dtype": "bfloat16"} to compute under autocast.'
    )


# -- names under `deepspeed.runtime.torch_autocast` ------------------------------------------------


def has_comm_dtype(param: nn.Parameter) -> bool:
    """Whether the gradient of a parameter travels in the dtype of an autocast."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    """Return the dtype in which the gradient of a parameter travels, if no key of the configuration
    says otherwise.
    """
    found: torch.dtype = getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return found


def get_default_autocast_lower_precision_modules() -> list[str]:
    return [f"{kind.__module__}.{kind.__name__}" for kind in SAFE_MODULES]
