"""What the pages print: fenced blocks, and the names that a block of Python takes for granted."""

from __future__ import annotations

import builtins
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import onefold
from zoo import TinyGPT, tokens_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = r"(?ms)^ *```+ *(\w*)(?: title=\"([^\"]*)\")?[^\n]*\n(.*?)^ *```+ *$"


@dataclass(frozen=True)
class Block:
    """A fenced block. `title` is "" if it has none."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, 1 + text[: found.start()].count("\n"), found[1], found[2] or "", found[3])
        for found in re.finditer(FENCED, text)
    ]


def prose_of(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(FENCED, "", page.read_text(encoding="utf-8"))


class Model(nn.Module):
    """A transformers model as a loop sees it (`model(**batch).loss`), and as DeepSpeed's engine
    does (`engine(batch)`).
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.gpt = TinyGPT()

    @property
    def layers(self) -> nn.ModuleList:
        return self.gpt.blocks

    def forward(self, batch: Any = None, input_ids: Any = None) -> Any:
        if batch is not None:
            return self.gpt(batch["input_ids"])
        return SimpleNamespace(loss=self.gpt(input_ids))


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": tokens_of(seed)} for seed in range(count)]


#: What a block names as "ds_config.json".
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 1.0,
}


class Given(dict[str, Any]):
    """The names of a block while it runs. A name that it reads and has not made is made then, if the
    text around it has such a thing; any other is a failure.
    """

    def __init__(self, text: str, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.text = text
        self.makers: dict[str, Callable[[], Any]] = {
            "onefold": lambda: onefold,
            "Recipe": lambda: onefold.Recipe,
            "torch": lambda: torch,
            "nn": lambda: nn,
            "contextlib": lambda: contextlib,
            "model": self.model,
            "MyModel": lambda: Model,
            "module": lambda: onefold.shard(Model(), onefold.Recipe.zero(3)),
            "optimizer": lambda: torch.optim.AdamW(self["module"].parameters()),
            "config": SimpleNamespace,
            "recipe": lambda: onefold.Recipe.zero(3),
            "state": lambda: Model().state_dict(),
            "batch": lambda: batches(1)[0],
            "loader": lambda: batches(3 * ranks)[rank::ranks],
            "micro_batches": lambda: batches(3 * ranks)[rank::ranks],
            "optim": lambda: torch.optim.AdamW(self["model"].parameters(), lr=3e-4),
            "data": lambda: [{"input_ids": row, "labels": row} for row in tokens_of(0)],
            "args": self.arguments,
            "loss": lambda: self["model"](**batches(1)[0]).loss,
        }

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        assert name in self.makers, f"neither the block nor the text around it makes {name}"
        self[name] = self.makers[name]()
        return self[name]

    def model(self) -> nn.Module:
        """Sharded, unless the block does that itself or is another library's."""
        model = Model()
        shards = re.search(r"onefold\.(shard|initialize|unshard)\(", self.text)
        if "onefold" not in self.text or (shards and shards[1] != "unshard"):
            return model
        precision = "fp16" if "GradScaler" in self.text else "fp32"
        return onefold.shard(model, onefold.Recipe.zero(3, precision=precision))

    def arguments(self) -> Any:
        from transformers import TrainingArguments

        return TrainingArguments("runs/a", max_steps=1)
