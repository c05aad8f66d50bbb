"""Set a recipe's precision to that of a host library (Trainer, Lightning)."""

from __future__ import annotations

from dataclasses import replace

import torch

from onefold.recipe import Placement, Recipe


def computing_in(recipe: Recipe, dtype: torch.dtype) -> Recipe:
    """Return the recipe with parameters that are gathered and compute in `dtype`, as with
    `Recipe.zero(..., precision=)`. Gradients are sent in `dtype`, unless the recipe names a wire.
    """
    travels = Placement.SHARDED in (recipe.parameters.placement, recipe.optimizer.placement)
    parameters = replace(recipe.parameters, dtype=dtype, wire=dtype if travels else None)
    wire = recipe.gradients.wire if recipe.gradients.wire is not None else dtype
    return recipe.replace(parameters=parameters, gradients=replace(recipe.gradients, wire=wire))
