"""`--optimizer` and `--optimizer-options`: check them, and make the optimizer.

    --optimizer sgd --optimizer-options "momentum=0.9 nesterov=true"
    --optimizer adamw --optimizer-options "betas=0.9,0.99 eps=1e-6"
    --optimizer muon --muon-lr 0.02 --lr 3e-4    (Muon for hidden matrices, AdamW for the rest)

recipe/optimizers.py has the known optimizers and their options. It needs no torch, so an unknown name
or option is reported at once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import FiniteFloat, PositiveInt, TypeAdapter, ValidationError

from onefold.recipe.optimizers import TRAINED
from onefold.wording import TrainError, did_you_mean

if TYPE_CHECKING:
    from onefold.train.config import TrainConfig

#: Of Muon's option adjust_lr_fn: updates as large as AdamW's, which take AdamW's learning rate.
MATCH_RMS = "match_rms_adamw"
#: The learning rate of Muon's updates otherwise: that of Jordan et al., Muon (2024).
MUON_LR = 0.02

#: The betas of Adam and its like, unless others are given.
BETAS = (0.9, 0.95)


def offered() -> str:
    """List the optimizers, and what to install for them."""
    names = (name + (f" (needs {o.package})" if o.package else "") for name, o in TRAINED.items())
    *most, last = names
    return f"{', '.join(most)} or {last}"


#: What some options take; all others take a number, or several.
KINDS: dict[str, Any] = {
    "adjust_lr_fn": Literal["original", "match_rms_adamw"],
    "ns_steps": PositiveInt,
    **dict.fromkeys(("amsgrad", "centered", "decoupled_weight_decay", "nesterov"), bool),
}


def read_options(value: object) -> object:
    """Parse a text or a mapping into {name: value}. Raises ValueError for anything else."""
    if isinstance(value, str) and value != "none":
        value = dict(part.partition("=")[::2] for part in value.split())
    if value is None or value == "none":
        return None
    if not isinstance(value, Mapping) or "" in value.values():
        raise ValueError(
            'expected name=value, separated by spaces, such as "betas=0.9,0.95 eps=1e-8"'
        )
    return {str(n).replace("-", "_"): _value(str(n), given) for n, given in value.items()} or None


def _value(name: str, given: object) -> Any:
    if not isinstance(given, list | tuple):
        given = str(given).split(",") if "," in str(given) else str(given)
    kind = KINDS.get(name.replace("-", "_"), FiniteFloat | tuple[FiniteFloat, ...])
    try:
        return TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        said = error.errors()[0]["msg"]
        raise ValueError(f"{name}={given}: {said[:1].lower()}{said[1:]}") from None


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
        if name not in known.options:
            raise TrainError(
                f"--optimizer-options {name}: {config.optimizer} has no such option"
                f" (--lr and --weight-decay are given apart). {did_you_mean(name, known.options)}"
            )
    if config.muon_lr is not None and not known.rest:
        raise TrainError(
            f"--muon-lr {config.muon_lr:g} is the rate of --optimizer muon; --optimizer"
            f" {config.optimizer} has --lr alone."
        )


#: {(an optimizer, how many states its options add): the row with as many}
WITH_MORE_STATES = {
    ("sgd", 1): "sgd-momentum",
    ("rmsprop", 1): "adam",
    ("rmsprop", 2): "adam-amsgrad",
    ("adam", 1): "adam-amsgrad",
    ("adamw", 1): "adam-amsgrad",
}


def planned_as(config: TrainConfig) -> str:
    """Return the plan's name for an optimizer with as many states per element."""
    given = config.optimizer_options or {}
    more = sum(bool(given.get(name)) for name in ("momentum", "amsgrad", "centered"))
    planned = TRAINED[config.optimizer].planned or config.optimizer
    return WITH_MORE_STATES.get((config.optimizer, more), planned)


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
