"""Hugging Face's Trainer on Onefold, and a mixin for any other Trainer class.

trainer = onefold.hf.Trainer(model, args, train_dataset=data, recipe=onefold.Recipe.zero(stage=3))
trainer.train()

class Tuner(onefold.hf.TrainerMixin, trl.SFTTrainer): ...
"""

from onefold.hf.arguments import TrainingArguments
from onefold.hf.loading import from_pretrained
from onefold.hf.trainer import Trainer, TrainerMixin

__all__ = ["Trainer", "TrainerMixin", "TrainingArguments", "from_pretrained"]
