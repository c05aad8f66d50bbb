"""Check and translate the optimizer and the schedule that a DeepSpeed configuration names.

DeepSpeed's names and defaults differ from torch's. Read literally, a file would silently train
differently:

| the file says               | DeepSpeed runs              | so does Onefold                                         |
|-----------------------------|-----------------------------|---------------------------------------------------------|
| "Adam"                      | AdamW                       | torch.optim.AdamW                                       |
| "Adam", adam_w_mode: false  | Adam (L2 in the gradient)   | torch.optim.Adam                                        |
| "AdamW", adam_w_mode: false | AdamW                       | torch.optim.AdamW                                       |
| no weight_decay             | 0 (torch_adam: torch's)     | weight_decay=0.0 (with torch_adam, torch's own default) |
| "Adam" or "AdamW"           | FusedAdam, DeepSpeedCPUAdam | fused=True on every tier (torch_adam: torch's default)  |
| "Muon"                      | Muon, with AdamW beside it  | torch.optim.Muon, with torch.optim.AdamW (../muon.py)   |
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from onefold.deepspeed.config.classes import (
    ADAM_EXTRAS,
    MUON,
    REFUSED_OPTIMIZERS,
    SCHEDULES,
    optimizer_class,
)
from onefold.deepspeed.config.keys import Key, Section
from onefold.deepspeed.config.reading import Reading
from onefold.deepspeed.config.values import check_arguments, nearest
from onefold.recipe.optimizers import OF_DEEPSPEED


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer to make.

    Attributes:
        name: a class of torch.optim, or "Lion".
        params: its arguments, without the parameters; those of ../muon.py for "Muon".
        given: its name in the file.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    given: str = ""


@dataclass(frozen=True)
class SchedulerSpec:
    """A schedule to make.

    Attributes:
        name: one of DeepSpeed's schedules, or a class of torch.optim.lr_scheduler.
        params: its arguments, without the optimizer.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)


def read_optimizer(section: Mapping[str, Any], read: Reading) -> OptimizerSpec:
    """Read a section {"type": ..., "params": {...}}. List in `read` which params have no effect,
    and which are left at "auto".

    Raises:
        ValueError: an unknown optimizer, one that cannot be sharded, or unknown or wrong params.
        NotImplementedError: a variant of Adam that torch does not have.
    """
    given = section["type"]
    names = {name.lower(): name for name in OF_DEEPSPEED}
    refused = REFUSED_OPTIMIZERS.get(given.lower())
    if refused:
        raise ValueError(f"optimizer.type={given!r} cannot be used: {refused}.")
    if given.lower() not in names:
        near = nearest(given, names.values())
        hint = (
            f"did you mean {near!r}?" if near else f"expected one of {', '.join(names.values())}."
        )
        raise ValueError(f"optimizer.type={given!r}: there is no such optimizer; {hint}")
    name = names[given.lower()]
    params = section.get("params", {})
    if "max_grad_norm" in params:
        raise ValueError(
            'optimizer.params.max_grad_norm: write "gradient_clipping" at the top level instead.'
        )
    is_adam = name in ("Adam", "AdamW")
    known: Section = {**_signature(optimizer_class(name)), **(ADAM_EXTRAS if is_adam else {})}
    if name == "Muon":
        known = MUON
    values, left_auto = check_arguments("optimizer.params", params, known)
    read.left_auto += left_auto
    read.without_effect += [
        (f"optimizer.params.{key}", reason)
        for key in values
        if (reason := known[key].inert) is not None
    ]
    if is_adam:
        name, values = _adam(name, values)
    elif name == "Muon":
        _refuse_16_bit_states(values)
        if values.get("per_head_muon", False):
            raise NotImplementedError(
                "optimizer.params.per_head_muon=true: torch.optim.Muon orthogonalizes whole"
                " matrices, not the rows of each attention head; leave it out."
            )
    return OptimizerSpec(name, values, given)


def _adam(name: str, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Translate Adam's name and arguments by the table at the top of this file."""
    if not values.get("bias_correction", True):
        raise NotImplementedError(
            "optimizer.params.bias_correction=false: torch's Adam always corrects the bias; leave"
            " it out."
        )
    _refuse_16_bit_states(values)
    decoupled = name == "AdamW" or values.get("adam_w_mode", True)
    kept = {key: value for key, value in values.items() if key not in ADAM_EXTRAS}
    if values.get("torch_adam", False):
        kept.setdefault("foreach", None)
    else:
        kept.setdefault("weight_decay", 0.0)
        if not kept.keys() & {"fused", "foreach", "capturable", "differentiable"}:
            kept["fused"] = True
    return ("AdamW" if decoupled else "Adam"), kept


def _refuse_16_bit_states(values: Mapping[str, Any]) -> None:
    if not values.get("fp32_optimizer_states", True):
        raise NotImplementedError(
            "optimizer.params.fp32_optimizer_states=false: optimizer states are fp32 here; leave it"
            " out."
        )


def read_scheduler(section: Mapping[str, Any]) -> tuple[SchedulerSpec, list[str]]:
    """Read a section {"type": ..., "params": {...}}. Also return the paths left at "auto".

    Raises:
        ValueError: an unknown schedule, or unknown, wrong or missing params.
    """
    given = section["type"]
    known: Section
    if given in SCHEDULES:
        known = SCHEDULES[given]
    else:
        schedule = getattr(torch.optim.lr_scheduler, given, None)
        if not (
            inspect.isclass(schedule) and issubclass(schedule, torch.optim.lr_scheduler.LRScheduler)
        ):
            near = nearest(given, [*SCHEDULES, *_torch_schedules()])
            hint = (
                f"did you mean {near!r}?"
                if near
                else (
                    f"expected one of {', '.join(SCHEDULES)}, or a class of"
                    " torch.optim.lr_scheduler."
                )
            )
            raise ValueError(f"scheduler.type={given!r}: there is no such schedule; {hint}")
        known = _signature(schedule)
    values, left_auto = check_arguments("scheduler.params", section.get("params", {}), known)
    return SchedulerSpec(given, values), left_auto


def _torch_schedules() -> list[str]:
    kind = torch.optim.lr_scheduler.LRScheduler
    return [
        name
        for name, value in vars(torch.optim.lr_scheduler).items()
        if inspect.isclass(value) and issubclass(value, kind)
    ]


def _signature(cls: type) -> Section:
    """Return the keys that `cls` accepts, each with the kind of its default value."""
    keys: dict[str, Key] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if name in ("params", "optimizer") or parameter.kind is parameter.VAR_KEYWORD:
            continue
        default = parameter.default
        if isinstance(default, bool):
            keys[name] = Key("flag")
        elif isinstance(default, (int, float)):
            keys[name] = (
                Key("count")
                if isinstance(default, int) and name in ("last_epoch", "total_iters")
                else Key("number")
            )
        elif isinstance(default, tuple):
            keys[name] = Key("numbers")
        else:
            keys[name] = Key("any", required=default is parameter.empty)
    return keys
