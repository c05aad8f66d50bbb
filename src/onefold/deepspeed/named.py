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
| "Muon"                      | Muon, with AdamW beside it  | torch.optim.Muon, with torch.optim.AdamW (see below)      |

DeepSpeed's `"type": "Muon"`, one optimizer of two kinds of groups:

| the file says                      | Muon's groups                 | AdamW's groups                             |
|------------------------------------|-------------------------------|--------------------------------------------|
| lr, weight_decay                   | theirs (0.02 and 0 by default) | theirs (3e-4 and 0 by default)            |
| muon_lr, adam_lr                   | muon_lr instead of lr         | adam_lr instead of lr                      |
| momentum                           | theirs (0.95 by default)      |                                            |
| betas, eps                         |                               | theirs ((0.9, 0.95) and 1e-10 by default)  |
| adam_w_mode: false                 |                               | weight decay is added to the gradient      |

A group of `model_parameters` may set its own lr, weight_decay, momentum, betas and eps.

Muon steps matrices (parameters of two dimensions) whose name contains neither "embed" nor "lm_head". A parameter's attribute
`use_muon`, true or false, decides before its name does. Frozen parameters are left out.

Muon is torch's own (torch.optim.Muon), which is stepped once in an optimizer step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onefold.deepspeed.reading import DeepSpeedConfigError, is_unset
from onefold.deepspeed.schedules import SCHEDULES
from onefold.deepspeed.schema import Named, Params
from onefold.optim.muon import MuonWithAdamW
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

_MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95}
_ADAM: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-10}
#: What Muon's "params" may say. `ns_method` has no effect: both are the same iteration but for rounding.
_OF_MUON = (
    *(_MUON | _ADAM),
    *("muon_lr", "adam_lr", "adam_w_mode", "torch_adam", "foreach", "fp32_optimizer_states"),
    *("ns_method", "per_head_muon"),
)
#: Parts of names of matrices that AdamW steps.
_NOT_HIDDEN = ("embed", "lm_head")


@dataclass(frozen=True)
class Spec:
    """What to make.

    Attributes:
        kind: a class of torch.optim, Lion, `MuonWithAdamW`, one of DeepSpeed's schedules, or a class
            of torch.optim.lr_scheduler.
        params: its arguments, without the parameters or the optimizer; those of `make_muon` for "Muon".
        given: its name in the file.
    """

    kind: Any
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
    given = section.type
    row = KNOWN.get(given.lower())
    names = {name.lower(): name for name in OF_DEEPSPEED}
    if (name := names.get(given.lower())) is None:
        why = f"{row.refused}." if row is not None else did_you_mean(given, OF_DEEPSPEED)
        raise DeepSpeedConfigError(f"optimizer.type={given!r} cannot be used: {why}")
    if "max_grad_norm" in section.params.given:
        raise DeepSpeedConfigError(
            'optimizer.params.max_grad_norm: write "gradient_clipping" at the top level instead.'
        )
    is_adam = name in ("Adam", "AdamW")
    known = _OF_MUON if name == "Muon" else inspect.signature(optimizer_class(name)).parameters
    params = _checked("optimizer", section.params, [*known, *(_OF_ADAM if is_adam else ())])
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
    return Spec(MuonWithAdamW if name == "Muon" else optimizer_class(name), params, given)


def schedule_of(section: Named) -> Spec:
    """Raises: DeepSpeedConfigError: an unknown schedule, or unknown or missing params."""
    given = section.type
    if given in ("OneCycle", "LRRangeTest"):
        raise DeepSpeedConfigError(
            f"scheduler.type={given!r} is not built: give initialize a function as lr_scheduler=, such"
            " as lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr,"
            " total_steps)."
        )
    kind: Any = SCHEDULES.get(given) or getattr(torch.optim.lr_scheduler, given, None)
    if not (isinstance(kind, type) and hasattr(kind, "get_last_lr")):
        raise DeepSpeedConfigError(
            f"scheduler.type={given!r}: expected a class of torch.optim.lr_scheduler, or one of"
            f" DeepSpeed's. {did_you_mean(given, SCHEDULES)}"
        )
    known = inspect.signature(kind).parameters
    params = _checked("scheduler", section.params, known)
    for name, parameter in [*known.items()][1:]:  # without the optimizer
        if parameter.default is parameter.empty and name not in params:
            raise DeepSpeedConfigError(f"scheduler.params.{name} is not set: write a value.")
    return Spec(kind, params, given)


def _checked(section: str, params: Params, known: Iterable[str]) -> dict[str, Any]:
    """Return the params that are set. An unknown one raises, since they are passed on as arguments."""
    for name in params.given:
        if name not in (names := [*known]):
            raise DeepSpeedConfigError(
                f"{section}.params.{name}: there is no such key. {did_you_mean(name, names)}"
            )
    return {name: value for name, value in params.given.items() if not is_unset(value)}


# -- Muon ----------------------------------------------------------------------------------------


def make_muon(
    model: nn.Module, parameters: Sequence[Any], given: Mapping[str, Any]
) -> MuonWithAdamW:
    """Make the optimizer that a configuration names.

    Args:
        parameters: parameters of `model`, or groups of them.
        given: the checked params of the configuration.

    Raises:
        ValueError: `use_muon` is true for a parameter that is no matrix.
    """
    listed = [item for item in parameters if isinstance(item, Mapping)]
    loose = [item for item in parameters if not isinstance(item, Mapping)]
    if loose:
        listed.append({"params": loose})
    names = {id(p): name for name, p in model.named_parameters()}
    groups: list[dict[str, Any]] = []
    for group in listed:
        trained = [p for p in group["params"] if p.requires_grad]
        for use_muon in (True, False):
            half = [p for p in trained if _is_for_muon(names.get(id(p), ""), p) is use_muon]
            if half:
                groups.append({"params": half, **_muon_options(use_muon, given, group)})
    return MuonWithAdamW(groups)


def _is_for_muon(name: str, param: nn.Parameter) -> bool:
    told = param.__dict__.get("use_muon")
    if told is None:
        return param.ndim == 2 and not any(part in name.lower() for part in _NOT_HIDDEN)
    if told and param.ndim != 2:
        raise ValueError(
            f"{name!r} has use_muon=True and the shape {tuple(param.shape)}: Muon steps matrices, of"
            " two dimensions. Set use_muon to False on it; AdamW then steps it."
        )
    return bool(told)


def _muon_options(
    use_muon: bool, given: Mapping[str, Any], group: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of one half of a group: what the group sets, else what the file sets."""
    defaults, own = (_MUON, "muon_lr") if use_muon else (_ADAM, "adam_lr")
    given = {**given, "lr": given[own]} if own in given else given
    found = {key: group.get(key, given.get(key, default)) for key, default in defaults.items()}
    found["use_muon"] = use_muon
    if not use_muon:
        found["decoupled_weight_decay"] = given.get("adam_w_mode", True)
        found |= {"foreach": given.get("foreach")} if given.get("torch_adam") else {"fused": True}
    return found
