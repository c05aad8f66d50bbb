"""The reader of DeepSpeed configurations. The entry point is `read_deepspeed`.

`keys` holds the tables of known keys, `classes` those of schedules and optimizers.
"""

from onefold.deepspeed.config.auto import OF_RECIPES, refuse_auto
from onefold.deepspeed.config.explain import Explanation, KeyOutcome, explain
from onefold.deepspeed.config.reader import (
    BatchSizes,
    DeepSpeedConfig,
    LossScaling,
    read_deepspeed,
    recipe_from,
    resolve_batch_sizes,
)
from onefold.deepspeed.config.specs import OptimizerSpec, SchedulerSpec

__all__ = [
    "OF_RECIPES",
    "BatchSizes",
    "DeepSpeedConfig",
    "Explanation",
    "KeyOutcome",
    "LossScaling",
    "OptimizerSpec",
    "SchedulerSpec",
    "explain",
    "read_deepspeed",
    "recipe_from",
    "refuse_auto",
    "resolve_batch_sizes",
]
