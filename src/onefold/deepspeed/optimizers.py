"""DeepSpeed's optimizers by name, and its classes of wrapped optimizers, for `isinstance`.

An engine's optimizer is torch's own, of any class, or Lion of lion-pytorch. It counts as:

| class                                                        | which                                          |
|--------------------------------------------------------------|------------------------------------------------|
| `DeepSpeedOptimizer`                                         | the optimizer of every engine                  |
| `ZeROOptimizer`                                              | the optimizer of every engine at stages 1 to 3 |
| `FusedAdam`, `DeepSpeedCPUAdam`, `DeepSpeedCPUAdagrad`       | what the class has made, and what a            |
|                                                              | configuration names and DeepSpeed makes by it  |
| `DeepSpeedZeroOptimizer`, `DeepSpeedZeroOptimizer_Stage3`,   | none: scripts that ask go on to DeepSpeed's    |
| `FP16_Optimizer`, `FP16_UnfusedOptimizer`, `BF16_Optimizer`  | flat groups, and there are none here           |

accelerate passes the parameter groups of the optimizer that the user made, with all their options.
Options that the class here does not have are dropped.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from onefold.deepspeed.named import optimizer_of
from onefold.deepspeed.schema import Named, Params

if TYPE_CHECKING:
    from onefold.deepspeed.engine import DeepSpeedEngine

__all__ = [
    "BF16_Optimizer",
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "DeepSpeedOptimizer",
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "FP16_Optimizer",
    "FP16_UnfusedOptimizer",
    "FusedAdam",
    "FusedLion",
    "ZeROOptimizer",
]
_KINDS = "_deepspeed_kinds"


class _Kind(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.__name__ in getattr(instance, _KINDS, ())


class DeepSpeedOptimizer(metaclass=_Kind):
    """See this module's table."""


class ZeROOptimizer(metaclass=_Kind):
    """See this module's table."""


class _None(metaclass=_Kind):
    """See this module's table."""


DeepSpeedZeroOptimizer = DeepSpeedZeroOptimizer_Stage3 = _None
FP16_Optimizer = FP16_UnfusedOptimizer = BF16_Optimizer = _None


def count(optimizer: Any, *kinds: str) -> Any:
    """Let the optimizer count as an instance of these classes besides."""
    optimizer.__dict__.setdefault(_KINDS, set()).update(kinds)
    return optimizer


def count_as(engine: DeepSpeedEngine, configured: bool) -> None:
    """Let the engine's optimizer count as its classes. `configured`: the configuration names it."""
    optimizer, settings = engine.optimizer, engine.settings
    optimizer.optimizer = weakref.proxy(optimizer)
    count(optimizer, "DeepSpeedOptimizer", "ZeROOptimizer")
    if not settings.zero_enabled:  # a former engine may have had it
        getattr(optimizer, _KINDS).discard("ZeROOptimizer")
    on_host = "offload_optimizer" in settings.recipe_arguments
    if configured and isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        count(optimizer, "DeepSpeedCPUAdam" if on_host else "FusedAdam")
    elif configured and on_host and isinstance(optimizer, torch.optim.Adagrad):
        count(optimizer, "DeepSpeedCPUAdagrad")


def _groups(params: Iterable[Any], options: Iterable[str]) -> list[dict[str, Any]]:
    listed = list(params)
    if listed and not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    known = {"params", *options}
    return [{name: v for name, v in group.items() if name in known} for group in listed]


class _Made(metaclass=_Kind):
    """Makes the optimizer that a configuration names so, of torch's classes. Params and their defaults
    are those of the configuration. Options of another optimizer are dropped from parameter groups.
    """

    type = ""
    #: The names of further arguments by position, after `lr`.
    order = ""

    def __new__(
        cls, params: Iterable[Any] = (), lr: float | None = None, *more: Any, **options: Any
    ) -> Any:
        options |= zip(cls.order.split(), more, strict=False)
        params = options.pop("model_params", params)
        if "adamw_mode" in options:
            options["adam_w_mode"] = options.pop("adamw_mode")
        given = Params.model_validate({"lr": lr, **options})
        spec = optimizer_of(Named(type=cls.type, params=given))
        groups = _groups(params, inspect.signature(spec.kind).parameters)
        return count(spec.kind(groups, **spec.params), cls.__name__)


class FusedAdam(_Made):
    """`torch.optim.AdamW`, or `Adam` if `adam_w_mode` is false, by DeepSpeed's name."""

    type = "Adam"
    order = "bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none"


class DeepSpeedCPUAdam(_Made):
    """`torch.optim.AdamW`, or `Adam` if `adamw_mode` is false, by DeepSpeed's name."""

    type = "Adam"
    order = "bias_correction betas eps weight_decay amsgrad adamw_mode fp32_optimizer_states"


class DeepSpeedCPUAdagrad(_Made):
    """`torch.optim.Adagrad`, by DeepSpeed's name."""

    type = "Adagrad"
    order = "eps weight_decay"


class DeepSpeedCPULion(_Made):
    """Lion of lion-pytorch, by DeepSpeed's name."""

    type = "Lion"
    order = "betas weight_decay"


FusedLion = DeepSpeedCPULion  # DeepSpeed's name for the GPU
