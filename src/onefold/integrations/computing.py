"""What a host's precision makes of a recipe."""

from __future__ import annotations

from dataclasses import replace

import torch

from onefold.recipe import Placement, Recipe


def computing_in(recipe: Recipe, dtype: torch.dtype) -> Recipe:
    """`recipe` with parameters that compute and travel in `dtype`, as
    `Recipe.zero(..., precision=)` would have them. Gradients keep a wire that was asked for.
    """
    travels = Placement.SHARDED in (recipe.parameters.placement, recipe.optimizer.placement)
    parameters = replace(recipe.parameters, dtype=dtype, wire=dtype if travels else None)
    wire = recipe.gradients.wire if recipe.gradients.wire is not None else dtype
    return recipe.replace(parameters=parameters, gradients=replace(recipe.gradients, wire=wire))
