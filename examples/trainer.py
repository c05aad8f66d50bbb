"""Fine-tune a Hugging Face model with transformers' Trainer, by a recipe of Onefold.

    torchrun --nproc-per-node 2 examples/trainer.py path/to/model output        (or plain python: one rank)

No rank ever holds the model whole: it is built without memory, read shard by shard, and written so.
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import TrainingArguments

import onefold.hf


class Tokens(torch.utils.data.Dataset):
    """Something to learn: rows that count up."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(32) + index) % self.vocabulary
        return {"input_ids": ids, "labels": ids}


def main(source: str, output: str) -> list[float]:
    model = onefold.hf.from_pretrained(source)
    args = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        max_steps=6,
        logging_steps=1,
        save_steps=3,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = onefold.hf.Trainer(
        model, args, train_dataset=Tokens(model.config.vocab_size), recipe=onefold.Recipe.zero(3)
    )
    trainer.train()
    trainer.save_model(os.path.join(output, "model"))  # on every rank
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if trainer.is_world_process_zero():
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, saved in {output}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
