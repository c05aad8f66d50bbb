"""Room `recipe`: placements, tiers, dtypes, the presets. Knows no modules and no processes."""

from onefold.recipe.core import COMPUTE_DTYPES, PLACEMENTS_OF_STAGE, Placement, Recipe, Row, Tier

__all__ = ["COMPUTE_DTYPES", "PLACEMENTS_OF_STAGE", "Placement", "Recipe", "Row", "Tier"]
