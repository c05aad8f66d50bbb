"""A small checkpoint with everything in it, made by one rank in this process, for tests of what is
done with checkpoints offline.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
from zoo import TinyGPT, tokens_of


class Config:
    """Writes config.json, as a transformers configuration does."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "config.json").write_text(json.dumps({"model_type": "tiny"}))


class Tokenizer:
    """Writes its files, as transformers' do."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": {"a": 0, "b": 1}}})
        )


class Run:
    """Tied weights, a buffer, two parameter groups, a schedule: two steps of it are done."""

    def __init__(self, seed: int = 1, steps: int = 2, config: bool = True) -> None:
        torch.manual_seed(seed)
        plain = TinyGPT(depth=2, tied=True)
        plain.register_buffer("scale", torch.arange(6.0).reshape(2, 3))
        if config:
            plain.config = Config()
        self.model: nn.Module = onefold.shard(plain, onefold.Recipe.zero(1))
        norms = [p for n, p in self.model.named_parameters() if "norm" in n]
        rest = [p for n, p in self.model.named_parameters() if "norm" not in n]
        self.optimizer = torch.optim.AdamW(
            [{"params": rest}, {"params": norms, "weight_decay": 0.0}], lr=1e-2
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.step = 0
        for _ in range(steps):
            self.model(tokens_of(self.step)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1

    def save(self, path: Path, **more: Any) -> Path:
        parts: dict[str, Any] = {
            "optimizer": self.optimizer, "scheduler": self.scheduler, "data": {"position": 16}, "step": self.step,
            "extra": {"best": 1.5, "table": torch.arange(5000)},
        }  # fmt: skip
        return onefold.save(path, model=self.model, **(parts | more))


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to
