"""Set a recipe's precision to that of a host library (Trainer, Lightning)."""

from __future__ import annotations

import torch

from onefold.recipe import COMPUTE_DTYPES, Recipe


def computing_in(recipe: Recipe, dtype: torch.dtype) -> Recipe:
    """Return the recipe with parameters that are gathered and compute in `dtype`, as with
    `Recipe.zero(..., precision=)`. Gradients are sent in `dtype`, unless the recipe names a wire.
    """
    names = {of: name for name, of in COMPUTE_DTYPES.items()}
    return recipe.replace(precision=names[dtype])
