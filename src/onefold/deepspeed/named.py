"""The optimizer and the schedule that a configuration names.

DeepSpeed's names and defaults differ from torch's. Read literally, a file would silently train
differently:

| the file says               | DeepSpeed runs              | so does Onefold                                         |
|-----------------------------|-----------------------------|---------------------------------------------------------|
| "Adam"                      | AdamW                       | torch.optim.AdamW                                       |
| "Adam", adam_w_mode: false  | Adam (L2 in the gradient)   | torch.optim.Adam                                        |
| "AdamW", adam_w_mode: false | AdamW                       | torch.optim.AdamW                                       |
| no weight_decay             | 0 (torch_adam: torch's)     | weight_decay=0.0 (with torch_adam, torch's own default) |
| "Adam" or "AdamW"           | FusedAdam, DeepSpeedCPUAdam | fused=True on every tier (torch_adam: torch's default)  |
| "Muon"                      | Muon, with AdamW beside it  | torch.optim.Muon, with torch.optim.AdamW (muon.py)      |
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from onefold.deepspeed import muon
from onefold.deepspeed.reading import DeepSpeedConfigError, is_unset
from onefold.deepspeed.schedules import SCHEDULES
from onefold.deepspeed.schema import Named
from onefold.recipe.optimizers import KNOWN, OF_DEEPSPEED
from onefold.wording import did_you_mean

#: Params of DeepSpeed's Adam that torch's lacks.
_OF_ADAM = (
    "adam_w_mode",
    "torch_adam",
    "bias_correction",
    "set_grad_none",
    "fp32_optimizer_states",
)
#: Params that ask for what torch's optimizers do not do, unless they have this value.
_NOT_BUILT = {
    "bias_correction": (True, "torch's Adam always corrects the bias"),
    "fp32_optimizer_states": (True, "optimizer states are fp32 here"),
    "per_head_muon": (
        False,
        "torch.optim.Muon orthogonalizes whole matrices, not the rows of each head",
    ),
}


@dataclass(frozen=True)
class Spec:
    """What to make.

    Attributes:
        name: a class of torch.optim, Lion, one of DeepSpeed's schedules, or a class of
            torch.optim.lr_scheduler.
        params: its arguments, without the parameters or the optimizer; those of muon.py for "Muon".
        given: its name in the file.
    """

    name: str
    params: dict[str, Any]
    given: str


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of a name in `OF_DEEPSPEED`.
    Raises: DeepSpeedConfigError: its package is not installed.
    """
    row = OF_DEEPSPEED[name]
    try:
        found: type[torch.optim.Optimizer] = row.load()
    except ImportError:
        raise DeepSpeedConfigError(f"{name} is not in torch: pip install {row.package}.") from None
    return found


def optimizer_of(section: Named) -> Spec:
    """Raises: DeepSpeedConfigError: an unknown optimizer, one that cannot be sharded, or unknown
    params. NotImplementedError: a variant that torch does not have.
    """
    given, params = section.type, section.params
    row = KNOWN.get(given.lower())
    names = {name.lower(): name for name in OF_DEEPSPEED}
    if (name := names.get(given.lower())) is None:
        why = f"{row.refused}." if row is not None else did_you_mean(given, OF_DEEPSPEED)
        raise DeepSpeedConfigError(f"optimizer.type={given!r} cannot be used: {why}")
    if "max_grad_norm" in params:
        raise DeepSpeedConfigError(
            'optimizer.params.max_grad_norm: write "gradient_clipping" at the top level instead.'
        )
    is_adam = name in ("Adam", "AdamW")
    known = muon.PARAMS if name == "Muon" else inspect.signature(optimizer_class(name)).parameters
    params = _checked("optimizer", params, [*known, *(_OF_ADAM if is_adam else ())])
    for key, (only, why) in _NOT_BUILT.items():
        if bool(params.get(key, only)) != only:
            raise NotImplementedError(f"optimizer.params.{key}: {why}; leave it out.")
    if is_adam:
        if params.get("adam_w_mode", True):
            name = "AdamW"
        if params.get("torch_adam"):
            params.setdefault("foreach", None)
        else:
            params.setdefault("weight_decay", 0.0)
            if not params.keys() & {"fused", "foreach", "capturable", "differentiable"}:
                params["fused"] = True
        params = {key: value for key, value in params.items() if key not in _OF_ADAM}
    if name == "Lion":  # DeepSpeed's defaults
        params = {"lr": 1e-3, "betas": (0.9, 0.999)} | params
    return Spec(name, params, given)


def schedule_of(section: Named) -> Spec:
    """Raises: DeepSpeedConfigError: an unknown schedule, or unknown or missing params."""
    known = inspect.signature(_schedule_class(section.type)).parameters
    params = _checked("scheduler", section.params, known)
    for name, parameter in [*known.items()][1:]:  # without the optimizer
        if parameter.default is parameter.empty and name not in params:
            raise DeepSpeedConfigError(f"scheduler.params.{name} is not set: write a value.")
    return Spec(section.type, params, section.type)


def make_schedule(spec: Spec, optimizer: torch.optim.Optimizer) -> Any:
    return _schedule_class(spec.name)(optimizer, **spec.params)


def _schedule_class(name: str) -> Any:
    found = SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if not (isinstance(found, type) and hasattr(found, "get_last_lr")):
        raise DeepSpeedConfigError(
            f"scheduler.type={name!r}: expected a class of torch.optim.lr_scheduler, or one of"
            f" DeepSpeed's. {did_you_mean(name, SCHEDULES)}"
        )
    return found


def _checked(section: str, given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return the params that are set. An unknown one raises, since they are passed on as arguments."""
    for name in given:
        if name not in (names := [*known]):
            raise DeepSpeedConfigError(
                f"{section}.params.{name}: there is no such key. {did_you_mean(name, names)}"
            )
    return {name: value for name, value in given.items() if not is_unset(value)}
