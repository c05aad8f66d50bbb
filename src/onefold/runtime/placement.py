"""A unit is offloaded as a whole. If only a share of the states leaves the device, the last units of
the model go first. Their gradients come first in the backward pass and their parameters are needed
last in the next forward pass, so their transfers have the longest time to hide in. The choice
depends on sizes alone, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from onefold.layout import LOW
from onefold.recipe import Recipe, Tier
from onefold.recipe.moments import bytes_an_element
from onefold.runtime.units import Found, UnitSpec

if TYPE_CHECKING:
    pass


def offloaded_units(specs: Sequence[UnitSpec], recipe: Recipe, ranks: int) -> set[int]:
    """Return the indices of the units whose state leaves the device."""
    return offloaded_of_sizes(
        [sum(f.param.numel() for f in spec.found if f.param.requires_grad) for spec in specs],
        recipe,
        ranks,
    )


def offloaded_of_sizes(sizes: Sequence[int], recipe: Recipe, ranks: int) -> set[int]:
    """Do the same from the number of trained elements in each unit, which is what a plan knows of a
    model. Units of frozen parameters alone have size 0.
    """
    if recipe.optimizer.tier is Tier.DEVICE and recipe.parameters.tier is Tier.DEVICE:
        return set()
    if recipe.offload_bytes is None and recipe.offload_share >= 1:
        return set(range(len(sizes)))
    a_parameter = (
        torch.float32.itemsize + bytes_an_element(recipe.moments) + recipe.sums_dtype.itemsize
    )
    divided = ranks if recipe.optimizer.placement.value == "sharded" else 1
    budget = sum(sizes) * recipe.offload_share
    if recipe.offload_bytes is not None:
        budget = min(budget, recipe.offload_bytes * divided / a_parameter)
    chosen, taken = set(), 0
    for index in reversed(range(len(sizes))):
        # Units are added until a share is reached. A budget in bytes is never exceeded.
        if taken >= budget or (recipe.offload_bytes is not None and taken + sizes[index] > budget):
            continue
        chosen.add(index)
        taken += sizes[index]
    return chosen


def offload_notes(sizes: Sequence[int], recipe: Recipe, ranks: int) -> list[str]:
    """Return a note for the user if a budget is too small for any unit. `sizes`: trained elements
    in each unit.
    """
    if recipe.offload_bytes is None or offloaded_of_sizes(sizes, recipe, ranks) or not any(sizes):
        return []
    return [
        f"offload_optimizer: {recipe.offload_bytes:,} bytes a rank are too few for the states of"
        " any unit, so all of them stay on the device. Give more, or a share such as 0.5 (units go"
        " as a whole)."
    ]


def rests_encoded(found: Found, recipe: Recipe) -> bool:
    """Whether a parameter is one of the frozen weights that are stored encoded: matrices, except
    those of embeddings.
    """
    frozen = recipe.frozen is not None and not found.param.requires_grad and found.param.dim() >= 2
    return (
        frozen
        and found.param.dtype in LOW
        and not any(isinstance(module, nn.Embedding) for module, _ in found.places)
    )
