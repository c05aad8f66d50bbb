"""The stages of a pipeline save one checkpoint of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.checkpoint import CheckpointError, latest
from onefold.inspection.verify import examine
from reference import differences, train


class Stage(nn.Module):
    """Some of the layers, and a buffer that all stages have."""

    def __init__(self, *numbers: int, table: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(numbers[0])
        self.layers = nn.ModuleDict({str(i): nn.Linear(3, 3) for i in numbers})
        self.register_buffer("table", torch.full((4,), table))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def trained(module: nn.Module, lr: float = 0.1, groups: int = 1) -> torch.optim.Optimizer:
    onefold.shard(module, onefold.Recipe.zero(1))
    params = list(module.parameters())
    parts = [{"params": params[:1]}, {"params": params[1:]}] if groups == 2 else params
    optimizer = torch.optim.AdamW(parts, lr=lr)
    train(module, optimizer, [torch.ones(2, 3)])
    return optimizer


@pytest.mark.parametrize("behind", [False, True])
def test_the_whole_model_loads_what_its_stages_saved(behind: bool, tmp_path: Path) -> None:
    folder, stages = tmp_path / "step-2", [Stage(0, 1), Stage(2), Stage(3)]
    given: Any = {"model": stages, "optimizer": [trained(stage) for stage in stages]}
    given |= {"step": 2, "extra": {"of": "all"}}
    if behind:
        saving = onefold.save_async(folder, **given)
        for stage, optimizer in zip(stages, given["optimizer"], strict=True):
            kept = dict(stage.state_dict())
            assert kept and optimizer.step() is None  # each waits for the copy
        saving.wait()
    else:
        expected = {n: v.clone() for part in stages for n, v in part.state_dict().items()}
        onefold.save(folder, **given)
    whole = onefold.shard(Stage(0, 1, 2, 3), onefold.Recipe.zero(1))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.5)
    loaded = onefold.load(latest(tmp_path) or "", model=whole, optimizer=optimizer)
    assert (loaded.path, loaded.step, loaded.extra) == (folder, 2, {"of": "all"})
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.state) == 8 and all(s["step"] == 1 for s in optimizer.state.values())
    assert not examine(folder)
    if not behind:
        assert not differences(expected, dict(whole.state_dict()))


def test_other_stages_load_it_in_one_call_and_miss_no_name(tmp_path: Path) -> None:
    stages = [Stage(0, 1), Stage(2), Stage(3)]
    optimizers = [trained(stage) for stage in stages]
    onefold.save(tmp_path / "a", model=stages, optimizer=optimizers, extra=3, step=1)
    expected = {n: v.clone() for part in stages for n, v in part.state_dict().items()}
    moments = [s for o in optimizers for s in o.state.values()]
    others = [Stage(0), Stage(1, 2, 3)]
    for stage in others:
        torch.nn.init.zeros_(next(stage.parameters()))
    theirs = [trained(stage, lr=0.5) for stage in others]
    loaded = onefold.load(tmp_path / "a", model=others, optimizer=theirs)
    assert (loaded.extra, loaded.missing, loaded.unexpected) == (3, (), ())
    assert not differences(expected, {n: v for s in others for n, v in s.state_dict().items()})
    assert [o.param_groups[0]["lr"] for o in theirs] == [0.1, 0.1]
    found = [s for o in theirs for s in o.state.values()]
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(moments, found, strict=True))
    seventh = onefold.shard(Stage(7), onefold.Recipe.zero(1))
    without_three = [others[0], onefold.shard(Stage(1, 2), onefold.Recipe.zero(1))]
    wrong = {
        r"2 are unknown .*layers\.3": without_three,
        "2 names are missing": [*others, seventh],
    }
    for words, models in wrong.items():
        with pytest.raises(CheckpointError, match=words):
            onefold.load(tmp_path / "a", model=models)
        assert onefold.load(tmp_path / "a", model=models, strict=False).step == 1


#: What is wrong with the second stage.
WRONG: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "several stages hold the parameter 'layers.0": (lambda: Stage(0), {}),
    "buffer 'table' is .* dtype, shape and values": (lambda: Stage(1, table=2.0), {}),
    "groups with different options": (lambda: Stage(1), {"lr": 0.2}),
    "have different groups": (lambda: Stage(1), {"groups": 2}),
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_stages_that_do_not_belong_together_are_refused(words: str, tmp_path: Path) -> None:
    make, options = WRONG[words]
    stages = [Stage(0), make()]
    optimizers = [trained(stages[0]), trained(stages[1], **options)]
    with pytest.raises(CheckpointError, match=words):
        onefold.save(tmp_path / "a", model=stages, optimizer=optimizers)
    assert not list(tmp_path.iterdir())
