"""A run small enough to be killed hundreds of times, with all that a checkpoint must bring back:
dropout, a schedule, a data position.

Each rank says what it does in lines of JSON, one file a rank; what a killed process has written
there stays.

    {"at": "start", "step": 4, "state": 2719872213}               loaded (or begun) at step 4, with this state
    {"at": "step", "step": 5, "loss": "0x1.1p+2", "state": ...}   the loss of the step, and the state after it
    {"at": "end", "step": 24, ...}                                all steps are done
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onefold
from onefold.checkpoint.tensorfile import bytes_of
from onefold.runtime.parameters.parameter import disable_torch_function

WORDS, LENGTH = 97, 8


class Block(nn.Module):
    """x (batch, length, width) -> the same"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """tokens (batch, length) -> the loss; tied weights, a buffer, sizes that no number divides."""

    def __init__(self, width: int = 22, depth: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.config = Config(width, depth)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(
            self.head(x * self.scale)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )


class Config:
    """Stands in for transformers' configuration: writes config.json."""

    def __init__(self, width: int, depth: int) -> None:
        self.values = {"model_type": "drill", "width": width, "depth": depth}

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "config.json").write_text(
            json.dumps(self.values, indent=1) + "\n", encoding="utf-8"
        )


class Data:
    """Batches (2, LENGTH) of tokens; the position says which comes next."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def next(self) -> Tensor:
        self.position += 1
        return torch.randint(
            WORDS,
            (2, LENGTH),
            generator=torch.Generator().manual_seed(1000 * self.position + self.rank),
        )

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Run:
    """Model, optimizer, schedule and data of one rank."""

    def __init__(self, stage: int, rank: int, seed: int = 1, precision: str = "fp32") -> None:
        torch.manual_seed(seed)
        self.model = onefold.shard(
            Net(), onefold.Recipe.zero(stage, precision=precision, stall_timeout=30.0)
        )
        norms = [p for n, p in self.model.named_parameters() if "norm" in n]
        rest = [p for n, p in self.model.named_parameters() if "norm" not in n]
        self.optimizer = torch.optim.AdamW(
            [{"params": norms, "lr": 0.02}, {"params": rest, "lr": 0.01}], weight_decay=0.01
        )
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.data = Data(rank)
        torch.manual_seed(100 * seed + rank)  # dropout differs from rank to rank

    def parts(self) -> dict[str, Any]:
        """What a checkpoint is to hold beside the model."""
        return {"optimizer": self.optimizer, "scheduler": self.scheduler, "data": self.data}

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(self.data.next())
        loss.backward()
        onefold.clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return float(loss)

    def state(self) -> int:
        """A checksum of this rank: weights, optimizer state, rates, position, random state."""
        found = zlib.crc32(
            json.dumps(
                [self.data.position, [g["lr"].hex() for g in self.optimizer.param_groups]]
            ).encode()
        )
        with disable_torch_function(), torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if not parameter.numel():
                    continue  # this rank has no element of it
                held = self.optimizer.state.get(parameter, {})
                for tensor in (parameter.data, *(held[key] for key in sorted(held))):
                    found = zlib.crc32(
                        bytes_of(tensor.contiguous()), zlib.crc32(name.encode(), found)
                    )
        return zlib.crc32(bytes_of(torch.get_rng_state()), found)

    def spoil(self) -> None:
        """Overwrite what a load is to bring."""
        with disable_torch_function(), torch.no_grad():
            for parameter in self.model.parameters():
                parameter.data.fill_(7.0)
                for value in self.optimizer.state.get(parameter, {}).values():
                    value.fill_(9.0)
        self.data.position = -1
        torch.manual_seed(0)


Say = Callable[[dict[str, Any]], None]


def train(
    stage: int, rank: int, steps: int, root: Path | None, every: int, asynchronous: bool, say: Say
) -> None:
    """Go on from the newest checkpoint in `root`, and save; without a root, from the start."""
    run = Run(stage, rank)
    checkpoints = (
        onefold.Checkpointer(root, model=run.model, keep=2, asynchronous=asynchronous)
        if root is not None
        else None
    )
    begun = checkpoints.load(**run.parts()) if checkpoints else None
    first = begun.step or 0 if begun else 0
    say({"at": "start", "step": first, "state": run.state()})
    for step in range(first + 1, steps + 1):
        loss = run.step()
        say({"at": "step", "step": step, "loss": loss.hex(), "state": run.state()})
        if checkpoints and step % every == 0:
            checkpoints.save(step, **run.parts())
    if checkpoints:
        checkpoints.close()
    say({"at": "end", "step": steps, "state": run.state()})


def lines(path: Path) -> list[dict[str, Any]]:
    """What a rank has said; a line that it was killed in the middle of is left out."""
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


class Log:
    """Lines into a file, each in one write."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def __call__(self, said: dict[str, Any]) -> None:
        os.write(self._file, (json.dumps(said) + "\n").encode())
