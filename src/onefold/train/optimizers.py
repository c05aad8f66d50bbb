"""`--optimizer` and `--optimizer-options`: check them, and make the optimizer.

    --optimizer sgd --optimizer-options "momentum=0.9 nesterov=true"
    --optimizer adamw --optimizer-options "betas=0.9,0.99 eps=1e-6"
    --optimizer muon --muon-lr 0.02 --lr 3e-4    (Muon for hidden matrices, AdamW for the rest)

recipe/optimizers.py has the known optimizers and their options. It needs no torch, so an unknown name
or option is reported at once.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold.recipe.optimizers import TRAINED, WHOLE
from onefold.recipe.options import MOST
from onefold.wording import TrainError, did_you_mean

if TYPE_CHECKING:
    from onefold.train.config import TrainConfig

Value = bool | float | str | tuple[float, ...]


#: Of Muon's option adjust_lr_fn: updates as large as AdamW's, which take AdamW's learning rate.
MATCH_RMS = "match_rms_adamw"
#: The learning rate of Muon's updates otherwise: that of Jordan et al., Muon (2024).
MUON_LR = 0.02

#: The betas of Adam and its like, unless others are given.
BETAS = (0.9, 0.95)


def offered() -> str:
    """List the optimizers, and what to install for them."""
    names = (name + (f" (needs {o.package})" if o.package else "") for name, o in TRAINED.items())
    return _listed(names, "or")


def _listed(names: Iterable[str], last: str) -> str:
    *most, final = names
    return f"{', '.join(most)} {last} {final}"


#: Arguments of an optimizer that are options of the command.
ELSEWHERE = {"lr": "--lr", "weight_decay": "--weight-decay"}
#: Options that count something.
COUNTS = ("ns_steps",)
#: Options that are true or false. All others are numbers.
SWITCHES = ("amsgrad", "centered", "decoupled_weight_decay", "nesterov")
#: Options whose value is one of these words.
WORDS = {"adjust_lr_fn": ("original", MATCH_RMS)}


def read_options(value: object) -> object:
    """Parse a text or a mapping into {name: value}. Raises ValueError for anything else."""
    if value is None or value == "none":
        return None
    if isinstance(value, Mapping):
        pairs = [(str(name), given) for name, given in value.items()]
    elif isinstance(value, str):
        pairs = []
        for part in value.split():
            name, is_pair, given = part.partition("=")
            if not is_pair or not name or not given:
                raise ValueError(
                    f'expected name=value, separated by spaces, such as "betas=0.9,0.95 eps=1e-8";'
                    f" {part!r} is none"
                )
            pairs.append((name, given))
    else:
        raise ValueError('expected name=value, separated by spaces, such as "momentum=0.9"')
    return {name.replace("-", "_"): _value(name, given) for name, given in pairs} or None


def _value(name: str, given: object) -> Value:
    if (words := WORDS.get(name)) is not None:
        if str(given) not in words:
            raise ValueError(f"{name}={given}: expected {_listed(words, 'or')}")
        return str(given)
    text = str(given).strip()
    if name in SWITCHES:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{name}={given}: expected true or false")
        return text.lower() == "true"
    if name in COUNTS:
        number = _number(name, given)
        if not 1 <= number <= MOST or number != int(number):
            raise ValueError(f"{name}={given}: expected a whole number, 1 or more")
        return int(number)
    if isinstance(given, list | tuple):
        return tuple(_number(name, one) for one in given)
    if "," in text:
        return tuple(_number(name, one) for one in text.split(","))
    return _number(name, text)


def _number(name: str, given: object) -> float:
    try:
        number = float(str(given))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}={given}: expected a finite number, or several as 0.9,0.95")
    return number


def check_optimizer(config: TrainConfig) -> None:
    """Raise TrainError if the optimizer or an option is unknown, or the package not installed."""
    known = TRAINED.get(config.optimizer)
    if known is None:
        raise TrainError(
            f"--optimizer {config.optimizer}: {did_you_mean(config.optimizer, TRAINED)}"
        )
    if known.package and importlib.util.find_spec(known.module) is None:
        raise TrainError(f"--optimizer {config.optimizer} needs: pip install {known.package}.")
    given = config.optimizer_options or {}
    for name in given:
        if name in ELSEWHERE:
            raise TrainError(f"--optimizer-options {name}: give {ELSEWHERE[name]} instead.")
        if name not in known.options:
            raise TrainError(
                f"--optimizer-options {name}: {config.optimizer} has no such option."
                f" {did_you_mean(name, known.options)}"
            )
    if config.muon_lr is not None and not known.rest:
        raise TrainError(
            f"--muon-lr {config.muon_lr:g} is the rate of --optimizer muon; --optimizer"
            f" {config.optimizer} has --lr alone."
        )
    if known.update == WHOLE:
        _check_whole(config)
    if config.moments is not None and config.optimizer not in ("adamw", "adam"):
        raise TrainError(
            f"--moments {config.moments} is about the moments of adamw and adam;"
            f" --optimizer {config.optimizer} keeps others: leave one of the two out."
        )


def _check_whole(config: TrainConfig) -> None:
    """Raise TrainError for options with which no rank steps whole matrices."""
    given = (
        (config.offload_optimizer, "nvme", "--offload-optimizer", "keep the states on the device, or on the host (cpu)"),
        (config.step_in_backward, None, "--step-in-backward", "leave it out"),
    )  # fmt: skip
    for value, only, flag, instead in given:
        if value and (only is None or only in str(value)):
            raise TrainError(
                f"--optimizer {config.optimizer} steps whole matrices, which {flag} does not"
                f" allow: {instead}, or use an element-wise optimizer such as adamw."
            )


def refuse_another(config: TrainConfig, kept: Mapping[str, Any], path: Path) -> None:
    """Raise TrainError if the checkpoint at `path` has the states of another optimizer.
    `kept`: the checkpoint's extra values.
    """
    before = kept.get("optimizer", "adamw")  # checkpoints from before --optimizer do not say
    if before != config.optimizer:
        raise TrainError(
            f"{path} holds the states of --optimizer {before}, and this run has {config.optimizer}."
            f" Use --optimizer {before}, or start another run from the exported model (--model)."
        )


def planned_as(config: TrainConfig) -> str:
    """Return the plan's name for an optimizer with as many states per element."""
    given = config.optimizer_options or {}
    if config.optimizer == "sgd" and given.get("momentum"):
        return "sgd-momentum"
    return TRAINED[config.optimizer].planned or config.optimizer


def make(config: TrainConfig, groups: list[dict[str, Any]], device: str) -> Any:
    """Make the optimizer over the groups, fused if torch has a fused kernel for it.
    Raises TrainError for values that the optimizer does not take.
    """
    known = TRAINED[config.optimizer]
    given: dict[str, Any] = dict(config.optimizer_options or {})
    adamlike: dict[str, Any] = {"betas": BETAS} if known.betas else {}
    if (TRAINED["adamw"] if known.rest else known).can_fuse(device):
        adamlike["fused"] = True
    try:
        if known.rest:  # Muon for the groups with use_muon=True, and AdamW for the others
            from onefold.optim.muon import MuonWithAdamW  # needs torch

            return MuonWithAdamW([
                {**(given if group["use_muon"] else adamlike), **group, "lr": peak_lr(config, group)}
                for group in groups
            ])  # fmt: skip
        return known.load()(groups, lr=config.lr, **{**adamlike, **given})
    except (ValueError, TypeError) as error:
        raise TrainError(f"--optimizer {config.optimizer}: {error}") from error


def peak_lr(config: TrainConfig, group: Mapping[str, Any]) -> float:
    """Return the peak learning rate of a group of the optimizer."""
    if not group.get("use_muon"):
        return config.lr
    if config.muon_lr is not None:
        return config.muon_lr
    adjusted = (config.optimizer_options or {}).get("adjust_lr_fn") == MATCH_RMS
    return config.lr if adjusted else MUON_LR


def rates(groups: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the learning rates of a step, for its row of metrics: `lr`, and `muon_lr` if Muon steps
    some of the groups.
    """
    found = {"muon_lr" if g.get("use_muon") else "lr": float(g["lr"]) for g in groups}
    return {"lr": found["muon_lr"], **found} if "muon_lr" in found else found
