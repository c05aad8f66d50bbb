"""The names of DeepSpeed's own optimizers, served by torch's optimizers and Onefold's Lion.

accelerate passes the parameter groups of the optimizer that the user made, with all their options.
Options that the class here does not have are dropped.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from onefold.deepspeed.lion import Lion

#: The optimizers that count as instances, by the name of the class.
_known: dict[str, weakref.WeakSet[Any]] = {}


class _Makes(type):
    """A class whose call makes one of torch's optimizers. It, and those of a configuration that
    DeepSpeed would make with this class, count as instances.
    """

    def __init__(cls, name: str, bases: Any, members: dict[str, Any]) -> None:
        super().__init__(name, bases, members)
        cls.__signature__ = inspect.signature(members["make"].__func__)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        made = cls.make(*args, **options)  # type: ignore[attr-defined]
        note(cls.__name__, made)
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        return any(known is instance for known in _known.get(cls.__name__, ()))


def note(name: str, optimizer: Any) -> None:
    """Let the optimizer count as an instance of the class of that name."""
    _known.setdefault(name, weakref.WeakSet()).add(optimizer)


def note_configured(optimizer: Any, on_host: bool) -> None:
    """Note an optimizer that a configuration has named, if it is one of DeepSpeed's classes.

    Args:
        on_host: whether its states are stored on the host.
    """
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        note("DeepSpeedCPUAdam" if on_host else "FusedAdam", optimizer)
    elif on_host and isinstance(optimizer, torch.optim.Adagrad):
        note("DeepSpeedCPUAdagrad", optimizer)


def _groups(params: Iterable[Any], options: Iterable[str]) -> list[dict[str, Any]]:
    """Return the parameter groups without the options that are not in `options`."""
    listed = list(params)
    if listed and not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    known = {"params", *options}
    return [{name: v for name, v in group.items() if name in known} for group in listed]


def _adam(
    params: Iterable[Any],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    decoupled: bool,
) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    options: dict[str, Any] = {
        "lr": lr,
        "betas": tuple(betas),
        "eps": eps,
        "weight_decay": weight_decay,
        "amsgrad": amsgrad,
    }
    return kind(_groups(params, inspect.signature(kind).parameters), **options)


class DeepSpeedCPUAdam(metaclass=_Makes):
    """`torch.optim.AdamW`, or `Adam` if `adamw_mode` is false, by DeepSpeed's name."""

    @staticmethod
    def make(
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        """Return a `torch.optim.AdamW`, or an `Adam` if `adamw_mode` is false.

        Raises:
            NotImplementedError: `bias_correction` is false.
        """
        _needs_correction(bias_correction)
        return _adam(model_params, lr, betas, eps, weight_decay, amsgrad, adamw_mode)


class FusedAdam(metaclass=_Makes):
    """`torch.optim.AdamW`, or `Adam` if `adam_w_mode` is false, by DeepSpeed's name."""

    @staticmethod
    def make(
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> torch.optim.Optimizer:
        """Return a `torch.optim.AdamW`, or an `Adam` if `adam_w_mode` is false.

        Raises:
            NotImplementedError: `bias_correction` is false.
        """
        _needs_correction(bias_correction)
        return _adam(params, lr, betas, eps, weight_decay, amsgrad, adam_w_mode)


def _needs_correction(wanted: bool) -> None:
    if not wanted:
        raise NotImplementedError(
            "bias_correction=False: torch's Adam always corrects; leave it out."
        )


class DeepSpeedCPUAdagrad(metaclass=_Makes):
    """`torch.optim.Adagrad`, by DeepSpeed's name."""

    @staticmethod
    def make(
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        """Return a `torch.optim.Adagrad`.

        Raises:
            NotImplementedError: `amsgrad` is true.
        """
        if amsgrad:
            raise NotImplementedError("amsgrad=True: Adagrad has no such form; leave it out.")
        kind = torch.optim.Adagrad
        options: dict[str, Any] = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        return kind(_groups(model_params, inspect.signature(kind).parameters), **options)


class DeepSpeedCPULion(Lion):
    """Lion. Options of other optimizers in the parameter groups are dropped."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        options = ("lr", "betas", "weight_decay")
        super().__init__(_groups(model_params, options), lr, betas, weight_decay)


class FusedLion(DeepSpeedCPULion):
    """`DeepSpeedCPULion` under DeepSpeed's name for the GPU."""
