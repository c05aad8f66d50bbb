"""State divided over groups is saved once and read by any recipe, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onefold
from models import TinyGPT, tokens_of
from ranks import run_ranks

RECIPES: list[dict[str, Any]] = [
    {"stage": 3, "shard_group": 2},
    {"stage": 3},
    {"stage": 3, "shard_group": 2, "optimizer_over": "all"},
    {"stage": 2, "shard_group": 2},
    {"stage": 3, "group": 2, "second_copy": True},
    {"stage": 0},
    {"stage": 3, "shard_group": 2},
]


def made(options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = onefold.shard(TinyGPT(), onefold.Recipe.zero(**options))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    model(tokens_of(10 * number + torch.distributed.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def handed_on(folder: str) -> list[str]:
    """Each recipe reads what the one before saved and saves it again: what the last read is what the first had."""
    model, optimizer = made(RECIPES[0])
    for number in range(2):
        step(model, optimizer, number)
    first: dict[str, Tensor] = onefold.full_state_dict(model)
    found = []
    for number, options in enumerate(RECIPES):
        onefold.save(f"{folder}/{number}", model=model, optimizer=optimizer)
        model, optimizer = made(options)
        onefold.load(f"{folder}/{number}", model=model, optimizer=optimizer)
        read = onefold.full_state_dict(model)
        found += [f"{options}: {name}" for name in first if not torch.equal(first[name], read[name])]
    twin, twins = made(RECIPES[0])  # moments too: the next step of the last is that of a run that never stopped
    for number in range(3):
        step(twin, twins, number)
    step(model, optimizer, 2)
    goes_on, never_stopped = onefold.full_state_dict(model), onefold.full_state_dict(twin)
    return found + [f"the next step: {name}" for name in goes_on if not torch.equal(goes_on[name], never_stopped[name])]


def test_any_recipe_reads_what_groups_saved(tmp_path: Path) -> None:
    assert run_ranks(4, handed_on, str(tmp_path)) == [[]] * 4
