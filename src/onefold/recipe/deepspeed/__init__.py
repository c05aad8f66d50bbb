"""The reader of DeepSpeed configurations; `read_deepspeed` is the way in, `keys` the table of what is known."""

from onefold.recipe.deepspeed.reader import BatchSizes, DeepSpeedConfig, LossScaling, read_deepspeed
from onefold.recipe.deepspeed.specs import OptimizerSpec, SchedulerSpec

__all__ = ["BatchSizes", "DeepSpeedConfig", "LossScaling", "OptimizerSpec", "SchedulerSpec", "read_deepspeed"]
