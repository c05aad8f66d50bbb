"""transformers' Trainer, and those of TRL, over `onefold.shard`: what `onefold.hf` offers.

Imports transformers and accelerate; nothing else of Onefold imports this.
"""

from onefold.integrations.hf.arguments import TrainingArguments
from onefold.integrations.hf.loading import from_pretrained
from onefold.integrations.hf.trainer import Trainer, TrainerMixin

__all__ = ["Trainer", "TrainerMixin", "TrainingArguments", "from_pretrained"]
