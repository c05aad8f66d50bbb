"""Where state rests, and in what: what a run is told about it, and what it says of itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from onefold.recipe.options import TIERS, UNLIMITED
from onefold.train.errors import TrainError
from onefold.train.machine import readable

if TYPE_CHECKING:
    from onefold.recipe import Recipe
    from onefold.train.config import TrainConfig


def tier_arguments(config: TrainConfig) -> dict[str, Any]:
    """The arguments of `Recipe.zero` about tiers and moments that the configuration gives; {} where
    all is as usual, on the device.
    """
    return config.arguments(TIERS)


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
    if recipe.offload_activations is not None:
        room = (
            ""
            if recipe.offload_activations >= UNLIMITED
            else f" up to {readable(recipe.offload_activations)}"
        )
        parts.append(f"activations on the host{room}")
    if recipe.tile is not None:
        parts.append(f"weights above {readable(recipe.tile)} in tiles")
    return ", ".join(parts)
