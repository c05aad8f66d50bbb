"""The names of DeepSpeed's own optimizers, served by torch's optimizers and Onefold's Lion.

accelerate passes the parameter groups of the optimizer that the user made, with all their options.
Options that the class here does not have are dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from onefold.integrations.deepspeed.lion import Lion


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


def DeepSpeedCPUAdam(
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


def FusedAdam(
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


def DeepSpeedCPUAdagrad(
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
