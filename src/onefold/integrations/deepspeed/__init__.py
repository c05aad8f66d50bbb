"""DeepSpeed's training loop on `onefold.shard`: `initialize`, its four-tuple and the engine."""

from onefold.integrations.deepspeed.config import recipe_from
from onefold.integrations.deepspeed.engine import DeepSpeedEngine
from onefold.integrations.deepspeed.setup import add_config_arguments, initialize

__all__ = ["DeepSpeedEngine", "add_config_arguments", "initialize", "recipe_from"]
