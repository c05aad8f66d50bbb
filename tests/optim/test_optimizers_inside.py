"""Optimizers that hold others and call their steps train as in one process, at every stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

import onefold
from ranks import run_ranks


class Around(Optimizer):
    """Steps the optimizer that it holds."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, base.defaults)

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class EverySecond(Around):
    """Steps it every second time."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return self.base.step(closure) if self.calls % 2 else None


class Combined(Optimizer):
    """Steps all that it holds, each with parameters of its own."""

    def __init__(self, *held: Optimizer) -> None:
        self.held = held
        super().__init__([group for each in held for group in each.param_groups], {})

    def step(self, closure: Any = None) -> None:
        for each in self.held:
            each.step()


def made(kind: str, model: nn.Module) -> Optimizer:
    params = list(model.parameters())
    if kind == "Combined":
        rest = torch.optim.SGD(params[2:], lr=0.05, momentum=0.9)
        return Combined(torch.optim.Adam(params[:2], lr=0.01), rest)
    kinds = {"Around": Around, "EverySecond": EverySecond}
    return kinds[kind](torch.optim.Adam(params, lr=0.01))


KINDS = ("Around", "EverySecond", "Combined")


def losses(stage: int | None) -> dict[str, list[float]]:
    """Of each kind of optimizer; all ranks have the same data. `stage` None: in plain PyTorch."""
    out: dict[str, list[float]] = {}
    for kind in KINDS:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
        if stage is not None:
            model = onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=20.0))
        optimizer, x = made(kind, model), torch.ones(3, 8)
        out[kind] = []
        for _ in range(5):
            loss = (model(x) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out[kind].append(loss.item())
    return out


def at_all_stages() -> list[dict[str, list[float]]]:
    return [losses(stage) for stage in (None, 0, 1, 2, 3)]


def test_optimizers_that_hold_others_train_as_in_plain_pytorch() -> None:
    for plain, *sharded in run_ranks(2, at_all_stages):
        for stage, found in enumerate(sharded):
            for kind in KINDS:
                ours, theirs = torch.tensor(found[kind]), torch.tensor(plain[kind])
                assert torch.allclose(ours, theirs, rtol=1e-5), (
                    f"stage {stage}, {kind}: {found[kind]}, plain PyTorch {plain[kind]}"
                )
