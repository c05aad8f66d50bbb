"""Hugging Face's Trainer on Onefold, and a mixin for any other Trainer class.

trainer = onefold.hf.Trainer(model, args, train_dataset=data, recipe=onefold.Recipe.zero(stage=3))
trainer.train()

class Tuner(onefold.hf.TrainerMixin, trl.SFTTrainer): ...
"""

try:
    from onefold.hf.arguments import TrainingArguments
    from onefold.hf.loading import from_pretrained
    from onefold.hf.trainer import Trainer, TrainerMixin
except ModuleNotFoundError as error:
    if error.name not in ("transformers", "accelerate"):
        raise
    raise ModuleNotFoundError(
        f"onefold.hf needs the package {error.name}, which is not installed: pip install"
        " transformers accelerate",
        name=error.name,
    ) from error

__all__ = ["Trainer", "TrainerMixin", "TrainingArguments", "from_pretrained"]
