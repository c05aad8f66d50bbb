"""The reader of DeepSpeed configurations; `read_deepspeed` is the way in, `keys` the table of what is known."""

from onefold.recipe.deepspeed.auto import OF_RECIPES, refuse_auto
from onefold.recipe.deepspeed.reader import BatchSizes, DeepSpeedConfig, LossScaling, read_deepspeed
from onefold.recipe.deepspeed.specs import OptimizerSpec, SchedulerSpec

__all__ = [
    "OF_RECIPES",
    "BatchSizes",
    "DeepSpeedConfig",
    "LossScaling",
    "OptimizerSpec",
    "SchedulerSpec",
    "read_deepspeed",
    "refuse_auto",
]
