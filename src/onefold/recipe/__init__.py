"""Room `recipe`: the options of a recipe and the rows that they come to, tiers, dtypes, formats of
moments, and the table of known optimizers. Knows no modules and no processes.
"""

from typing import TYPE_CHECKING, Any

from onefold.recipe.core import Recipe
from onefold.recipe.rows import Row, Tier, sharded_at

if TYPE_CHECKING:
    from onefold.recipe.moments import COMPUTE_DTYPES


def __getattr__(name: str) -> Any:
    if name != "COMPUTE_DTYPES":
        raise AttributeError(f"module 'onefold.recipe' has no attribute {name!r}")
    from onefold.recipe.moments import COMPUTE_DTYPES  # it imports torch

    return COMPUTE_DTYPES
