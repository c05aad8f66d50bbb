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

from onefold.deepspeed.named import optimizer_class

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


def _made(name: str, kind: Any, params: Iterable[Any], **options: Any) -> Any:
    """Make an optimizer of a class of torch. `options` of another optimizer are dropped from groups."""
    return count(kind(_groups(params, inspect.signature(kind).parameters), **options), name)


def _groups(params: Iterable[Any], options: Iterable[str]) -> list[dict[str, Any]]:
    listed = list(params)
    if listed and not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    known = {"params", *options}
    return [{name: v for name, v in group.items() if name in known} for group in listed]


class DeepSpeedCPUAdam(metaclass=_Kind):
    """`torch.optim.AdamW`, or `Adam` if `adamw_mode` is false, by DeepSpeed's name."""

    def __new__(
        cls,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> Any:
        if not bias_correction:
            raise NotImplementedError(
                "bias_correction=False: torch's Adam always corrects; leave it out."
            )
        return _made(
            cls.__name__,
            torch.optim.AdamW if adamw_mode else torch.optim.Adam,
            model_params,
            lr=lr,
            betas=tuple(betas),
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )


class FusedAdam(metaclass=_Kind):
    """`torch.optim.AdamW`, or `Adam` if `adam_w_mode` is false, by DeepSpeed's name."""

    def __new__(
        cls,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> Any:
        adam: Any = DeepSpeedCPUAdam
        options = (lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)
        return adam.__new__(cls, params, *options)


class DeepSpeedCPUAdagrad(metaclass=_Kind):
    """`torch.optim.Adagrad`, by DeepSpeed's name."""

    def __new__(
        cls,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> Any:
        if amsgrad:
            raise NotImplementedError("amsgrad=True: Adagrad has no such form; leave it out.")
        options = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        return _made("DeepSpeedCPUAdagrad", torch.optim.Adagrad, model_params, **options)


class DeepSpeedCPULion(metaclass=_Kind):
    """Lion of lion-pytorch, by DeepSpeed's name."""

    def __new__(
        cls,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> Any:
        options = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        return _made("DeepSpeedCPULion", optimizer_class("Lion"), model_params, **options)


FusedLion = DeepSpeedCPULion  # DeepSpeed's name for the GPU
