"""torch.autocast around an engine's forward passes, and what its gradients weigh on the wire.

| the file says                       | autocast set around the call | the forward pass runs                            |
|-------------------------------------|------------------------------|--------------------------------------------------|
| `torch_autocast` with a dtype       | any, or none                 | under autocast in that dtype                     |
| no `torch_autocast`                 | none                         | in the precision of the file                     |
| no `torch_autocast`                 | set                          | in the precision of the file; a warning says so  |

Gradients of the module classes that `lower_precision_safe_modules` names travel in the autocast's
dtype, others in their own.

And fp16 loss scaling by DeepSpeed's rule.

finite step    every `window` finite steps since the last overflow: scale x 2, hysteresis refilled
overflow       step skipped; hysteresis left? use one up : scale / 2, never below the minimum

Unlike torch's scaler, the scale falls only after `hysteresis` overflows.
"""

from __future__ import annotations

import contextlib
import logging
import pkgutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from onefold.deepspeed.schema import FP16

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


def mark_for_the_wire(
    model: nn.Module, dtype: torch.dtype | None, modules: Sequence[str] | None
) -> bool:
    """Let gradients of the safe modules travel in the autocast's dtype, and no others. Call it before
    `shard`. Returns whether they traveled otherwise before.

    Args:
        dtype: None if there is no autocast.
        modules: full names of their classes; None takes `SAFE_MODULES`.

    Raises:
        ValueError: a class of `lower_precision_safe_modules` cannot be imported.
    """
    safe = SAFE_MODULES if modules is None else tuple(map(_imported, modules))
    marked = [m for m in model.modules() if dtype is not None and type(m) in safe]
    lower = {id(p) for module in marked for p in module.parameters(recurse=False)}
    differ = False
    for parameter in model.parameters():
        marks, wanted = parameter.__dict__, dtype if id(parameter) in lower else None
        differ |= marks.pop("_onefold_wire", None) != wanted
        marks.pop(PARAM_COMM_DTYPE_ATTR_NAME, None)
        if wanted is not None:
            marks[PARAM_COMM_DTYPE_ATTR_NAME] = marks["_onefold_wire"] = wanted
    return differ


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


# -- the loss scale of fp16 ------------------------------------------------------------------------


_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class LossScaler:
    """Hold the loss scale and change it. Ranks that report the same overflows have the same scale.

    Attributes:
        scale: what the loss is multiplied with; `cur_scale` and `loss_scale` are other names.
        dynamic: False if the configuration fixes the scale.
        scale_window: finite steps between two growths.
        min_scale: the smallest scale.
        delayed_shift: overflows that lower the scale once.
        consecutive_hysteresis: whether a finite step refills the hysteresis.
        cur_iter, last_overflow_iter, cur_hysteresis: the state, under DeepSpeed's names.
    """

    def __init__(self, spec: FP16) -> None:
        self.dynamic = spec.loss_scale == 0
        self.scale_window = spec.loss_scale_window
        self.min_scale = spec.min_loss_scale
        self.delayed_shift = spec.hysteresis
        self.consecutive_hysteresis = spec.consecutive_hysteresis
        self._shown: Callable[[], Any] = lambda: None
        self._scale = 2.0**spec.initial_scale_power if self.dynamic else spec.loss_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.cur_hysteresis = spec.hysteresis

    @property
    def scale(self) -> float:
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = float(value)
        if (optimizer := self._shown()) is not None:
            optimizer.cur_scale = optimizer.loss_scale = self._scale

    cur_scale = loss_scale = scale

    def show_on(self, optimizer: Any) -> None:
        """Set what callers read of the loss scale. These are plain attributes: `optimizer.loss_scale =
        8` changes nothing, `optimizer.loss_scaler.cur_scale = 8` does.

        | attribute                          | what it is                                               |
        |------------------------------------|----------------------------------------------------------|
        | `loss_scaler`                      | this object; outside fp16 its scale is 1                 |
        | `cur_scale`, `loss_scale`          | its scale; changes of the scaler are followed            |
        | `dynamic_loss_scale`               | whether the scale changes by itself                      |
        | `overflow`                         | whether the last step was skipped                        |
        | `needs_scaler()`                   | whether a loss has to be scaled before `backward()`      |
        """
        self._shown = weakref.ref(optimizer)
        self.scale = self.scale
        optimizer.loss_scaler, optimizer.overflow = self, False
        optimizer.dynamic_loss_scale, optimizer.needs_scaler = self.dynamic, self.is_needed

    def is_needed(self) -> bool:
        """Whether the loss has to be scaled: not if the scale is fixed at 1."""
        return self.dynamic or self.scale != 1

    def update(self, overflow: bool) -> None:
        """Update the scale after one optimizer step.

        Raises:
            FloatingPointError: gradients overflow although the scale is at its minimum, so training
                cannot go on in fp16.
        """
        if not self.dynamic:
            return
        if overflow:
            if self.cur_hysteresis > 1:
                self.cur_hysteresis -= 1
            elif self.scale <= self.min_scale:
                raise FloatingPointError(
                    "gradients are not finite although the loss scale is at its minimum,"
                    f" {self.min_scale:g}: lower the learning rate, clip gradients, or compute"
                    " in bf16."
                )
            else:
                self.scale = max(self.scale / 2, self.min_scale)
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable = self.cur_iter - self.last_overflow_iter - 1
            if stable > 0 and stable % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.scale *= 2
        self.cur_iter += 1

    def state_dict(self) -> dict[str, float]:
        """Return the state, under the names that DeepSpeed's scaler uses."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        for name in _STATE:
            setattr(self, name, state[name])


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
