"""Room `recipe`: placements, tiers, dtypes, the presets, the tables of options and of known
optimizers. Knows no modules and no processes.

`options` and `optimizers` must not import torch, so the names below are imported on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onefold.recipe.core import (
        COMPUTE_DTYPES,
        PLACEMENTS_OF_STAGE,
        Placement,
        Recipe,
        Row,
        Tier,
    )

__all__ = ["COMPUTE_DTYPES", "PLACEMENTS_OF_STAGE", "Placement", "Recipe", "Row", "Tier"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'onefold.recipe' has no attribute {name!r}")
    from onefold.recipe import core

    return getattr(core, name)
