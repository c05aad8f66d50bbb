"""Where state rests, and in what, from the words of a command line or a file to the arguments of
`Recipe.zero`.

| option                    | words                                                       | argument                     |
|---------------------------|-------------------------------------------------------------|------------------------------|
| --offload-optimizer       | cpu, nvme; 0.6 (a share), 6GB (a budget); nvme:0.6, nvme:6GB | "cpu", 0.6, ("nvme", 0.6)    |
| --offload-gradients       | cpu, nvme                                                   | the same                     |
| --offload-param           | cpu, nvme                                                   | the same                     |
| --offload-activations     | cpu, 8GB                                                    | the same                     |
| --nvme (may be repeated)  | folders                                                     | a list of them               |
| --tile                    | 256MB                                                       | the same                     |
| --step-in-backward        |                                                             | True                         |
| --moments                 | bf16, int8, fp8, int4                                       | the same                     |
| --stochastic-rounding     |                                                             | True                         |
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from onefold.train.errors import TrainError, readable

if TYPE_CHECKING:
    from onefold.recipe import Recipe
    from onefold.train.config import TrainConfig

_AS_THEY_ARE = ("offload_gradients", "offload_param", "offload_activations", "tile", "moments")


def tier_arguments(config: TrainConfig) -> dict[str, Any]:
    """The arguments of `Recipe.zero` about tiers and moments that the configuration gives; {} where
    all is as usual, on the device.
    """
    given: dict[str, Any] = {}
    if config.offload_optimizer not in (None, "none"):
        given["offload_optimizer"] = _optimizer(config.offload_optimizer)
    given |= {
        name: value
        for name in _AS_THEY_ARE
        if (value := getattr(config, name)) not in (None, "none")
    }
    if config.nvme:
        given["nvme"] = list(config.nvme)
    for switch in ("step_in_backward", "stochastic_rounding"):
        if getattr(config, switch):
            given[switch] = True
    return given


def _optimizer(text: str) -> Any:
    tier, colon, amount = text.partition(":")
    return (tier.strip(), _amount(amount)) if colon else _amount(text)


def _amount(text: str) -> str | float | int:
    """0.6 as a share, 6000000000 as bytes; what is no number (cpu, 6GB) as it is."""
    try:
        number = float(text)
    except ValueError:
        return text.strip()
    return int(number) if number > 1 and number.is_integer() else number


def refuse_without_folder(config: TrainConfig) -> None:
    """Say now, before any rank starts, that a folder for NVMe is not there.

    Raises:
        TrainError: it is not, or nothing can be written into it.
    """
    for folder in config.nvme or ():
        if not os.path.isdir(folder):
            raise TrainError(
                f"--nvme {folder}: there is no such folder; make one on the disk that is to be"
                " used."
            )
        if not os.access(folder, os.W_OK | os.X_OK):
            raise TrainError(
                f"--nvme {folder}: this user may not write there; choose another folder, or change"
                " its rights."
            )


def in_a_sentence(recipe: Recipe) -> str:
    """What rests off the device or in another format, for people; "" where nothing does."""
    from onefold.recipe import Tier
    from onefold.recipe.tiers import UNLIMITED

    rows = {
        "parameters": recipe.parameters.tier,
        "gradients": recipe.gradients.tier,
        "optimizer states": recipe.optimizer.tier,
    }
    parts = []
    for tier, name in ((Tier.HOST, "on the host"), (Tier.NVME, "on NVMe")):
        kinds = [kind for kind, where in rows.items() if where is tier]
        if kinds:
            parts.append(f"{' and '.join(filter(None, [', '.join(kinds[:-1]), kinds[-1]]))} {name}")
    if parts and recipe.offload_bytes is not None:
        parts.append(f"of up to {readable(recipe.offload_bytes)} of states a rank")
    elif parts and recipe.offload_share < 1:
        parts.append(f"of {recipe.offload_share:.0%} of the model")
    if recipe.moments is not None:
        parts.append(f"moments in {recipe.moments}")
    if recipe.activations is not None:
        room = "" if recipe.activations >= UNLIMITED else f" up to {readable(recipe.activations)}"
        parts.append(f"activations on the host{room}")
    if recipe.tile is not None:
        parts.append(f"weights above {readable(recipe.tile)} in tiles")
    return ", ".join(parts)
