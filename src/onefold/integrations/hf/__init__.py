"""The contents of `onefold.hf`: transformers' Trainer and TRL's trainers on `onefold.shard`.

This package imports transformers and accelerate. No other part of Onefold imports it.
"""

from onefold.integrations.hf.arguments import TrainingArguments
from onefold.integrations.hf.loading import from_pretrained
from onefold.integrations.hf.trainer import Trainer, TrainerMixin

__all__ = ["Trainer", "TrainerMixin", "TrainingArguments", "from_pretrained"]
