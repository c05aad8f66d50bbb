"""DeepSpeed's `"type": "Muon"`: which parameters Muon steps, and with which options.

| the file says                      | Muon's groups                 | AdamW's groups                             |
|------------------------------------|-------------------------------|--------------------------------------------|
| lr, weight_decay                   | theirs (0.02 and 0 by default) | theirs (3e-4 and 0 by default)            |
| muon_lr, adam_lr                   | muon_lr instead of lr         | adam_lr instead of lr                      |
| momentum                           | theirs (0.95 by default)      |                                            |
| betas, eps                         |                               | theirs ((0.9, 0.95) and 1e-10 by default)  |
| adam_w_mode: false                 |                               | weight decay is added to the gradient      |

A group of `model_parameters` may set its own lr, weight_decay, momentum, betas and eps.

Muon steps matrices whose name contains neither "embed" nor "lm_head". A parameter's attribute
`use_muon`, true or false, decides before its name does. Frozen parameters are left out.

Muon is torch's own (torch.optim.Muon), which is stepped once in an optimizer step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from onefold.optim.muon import MuonWithAdamW
from onefold.wording import few

logger = logging.getLogger("onefold")

_MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95}
_ADAM: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-10}
#: What "params" may say. `ns_method` has no effect: both are the same iteration but for rounding.
PARAMS = (
    *(_MUON | _ADAM),
    *("muon_lr", "adam_lr", "adam_w_mode", "torch_adam", "foreach", "fp32_optimizer_states"),
    *("ns_method", "per_head_muon"),
)
#: Parts of names of matrices that AdamW steps.
_NOT_HIDDEN = ("embed", "lm_head")


def make(model: nn.Module, parameters: Sequence[Any], given: Mapping[str, Any]) -> MuonWithAdamW:
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
                groups.append({"params": half, **_options(use_muon, given, group)})
    _tell_others(groups, names)
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


def _options(use_muon: bool, given: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of one half of a group: what the group sets, else what the file sets."""
    defaults = _MUON if use_muon else _ADAM
    found = {**defaults, **{key: given[key] for key in defaults if key in given}}
    found["lr"] = given.get("muon_lr" if use_muon else "adam_lr", found["lr"])
    found |= {key: group[key] for key in defaults if key in group}
    found["use_muon"] = use_muon
    if not use_muon:
        found["decoupled_weight_decay"] = given.get("adam_w_mode", True)
        if given.get("torch_adam", False):
            found["foreach"] = given.get("foreach")
        else:
            found["fused"] = True
    return found


def _tell_others(groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> None:
    """Warn of parameters that DeepSpeed would flatten to matrices, and AdamW steps here."""
    others = [
        names.get(id(p), "")
        for group in groups
        for p in group["params"]
        if p.ndim > 2 and "use_muon" not in p.__dict__
    ]
    if others:
        logger.warning(
            "Muon: AdamW steps %d parameters of more than two dimensions (%s), because Muon steps"
            " matrices.",
            len(others),
            few(others, 3),
        )
