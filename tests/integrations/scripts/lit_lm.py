"""Trains a language model in a LightningModule, as Lightning's guide to transformers writes it.

torchrun --nproc-per-node 2 lit_lm.py --model M --data train.jsonl --output O --strategy ddp
"""

import argparse
import json

import lightning as L
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    get_linear_schedule_with_warmup,
)


class LitLM(L.LightningModule):
    def __init__(self, name, lr=1e-3, steps=2):
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForCausalLM.from_pretrained(name)
        self.losses, self.validated = [], []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.validated.append(loss.item())
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = get_linear_schedule_with_warmup(optimizer, 0, self.hparams.steps + 1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class TextData(L.LightningDataModule):
    def __init__(self, name, file):
        super().__init__()
        self.tokenizer, self.file = AutoTokenizer.from_pretrained(name), file

    def setup(self, stage=None):
        self.rows = load_dataset("json", data_files=self.file, split="train").map(
            lambda row: self.tokenizer(row["text"], truncation=True, max_length=48),
            remove_columns=["text"],
        )

    def loader(self, rows, **options):
        collate = DataCollatorForLanguageModeling(self.tokenizer, mlm=False)
        return DataLoader(rows, batch_size=1, collate_fn=collate, **options)

    def train_dataloader(self):
        return self.loader(self.rows, shuffle=True)

    def val_dataloader(self):
        return self.loader(self.rows.select(range(4)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()

    strategy = args.strategy
    if strategy.startswith("stage"):
        import onefold.lightning

        strategy = onefold.lightning.Strategy(stage=int(strategy[-1]))
    elif strategy.startswith("onefold"):
        import onefold.lightning

    L.seed_everything(42)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_steps=args.steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0,
        limit_train_batches=args.steps, default_root_dir=args.output,
    )  # fmt: skip
    module = LitLM(args.model, steps=args.steps)
    trainer.fit(module, datamodule=TextData(args.model, args.data))
    seen = {
        "loss": module.losses,
        "eval": module.validated,
        "kind": type(trainer.strategy).__module__,
    }
    with open(f"{args.output}/seen{trainer.global_rank}.json", "w") as out:
        json.dump(seen, out)


if __name__ == "__main__":
    main()
