"""Checkpoints that stages of a pipeline saved apart become one of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import onefold
from checkpoints.injured import flip
from onefold.checkpoint import CheckpointError, join_stages, latest
from onefold.checkpoint.tensorfile import TensorFile
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


def save(folder: Path, module: nn.Module, step: int = 2, lr: float = 0.1, groups: int = 1) -> None:
    onefold.shard(module, onefold.Recipe.zero(1))
    params = list(module.parameters())
    parts = [{"params": params[:1]}, {"params": params[1:]}] if groups == 2 else params
    optimizer = torch.optim.AdamW(parts, lr=lr)
    train(module, optimizer, [torch.ones(2, 3)])
    onefold.save(folder, model=module, optimizer=optimizer, step=step, extra={"of": folder.name})


def test_the_whole_model_loads_what_its_stages_saved_and_damage_is_found(tmp_path: Path) -> None:
    folder, parts = tmp_path / "step-2", [Stage(0, 1), Stage(2), Stage(3)]
    for place, part in zip((2, 9, 10), parts, strict=True):  # in the order of the numbers
        save(folder / f"stage-{place}", part)
    join_stages(folder)
    whole = onefold.shard(Stage(0, 1, 2, 3), onefold.Recipe.zero(1))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.5)
    loaded = onefold.load(latest(tmp_path) or "", model=whole, optimizer=optimizer)
    assert (loaded.path, loaded.step, loaded.extra) == (folder, 2, {"of": "stage-2"})
    assert optimizer.param_groups[0]["lr"] == 0.1
    expected = {name: value for part in parts for name, value in part.state_dict().items()}
    assert not differences(expected, dict(whole.state_dict()))
    assert len(optimizer.state) == 8 and all(s["step"] == 1 for s in optimizer.state.values())
    assert not examine(folder).problems
    file = folder / "stage-9" / "rank-00000.safetensors"
    with TensorFile(file) as tensors:
        at = tensors.header["parameter:layers.2.weight@0"].begin
    flip(file, at)
    assert examine(folder).problems
    with pytest.raises(CheckpointError, match="stage-9/rank-00000"):
        onefold.load(folder, model=whole)


def unfinished(folder: Path) -> None:
    (folder.parent / ".stage-1.0123abcd.unfinished").mkdir()


def without_manifest(folder: Path) -> None:
    save(folder, Stage(1))
    (folder / "manifest.json").unlink()


WRONG: dict[str, Callable[[Path], object]] = {
    "both stage-0 and stage-1 hold the parameter 'layers.0": lambda f: save(f, Stage(0)),
    "hold the buffer 'table'": lambda f: save(f, Stage(1, table=2.0)),
    "stage-0 at step 2, stage-1 at step 3": lambda f: save(f, Stage(1), step=3),
    r"other options in some stages \(lr\)": lambda f: save(f, Stage(1), lr=0.2),
    "different numbers of groups of optimizer 0: 1, 2": lambda f: save(f, Stage(1), groups=2),
    r"of 1 stages \(stage-0\), expected 2": lambda f: None,
    "is a checkpoint already": lambda f: join_stages(f.parent),
    "unfinished holds no whole checkpoint": unfinished,
    "stage-1 holds no whole checkpoint": without_manifest,
}


@pytest.mark.parametrize("words", WRONG)
def test_stages_that_do_not_belong_together_are_refused(words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoints of stages"):
        join_stages(tmp_path)
    save(tmp_path / "stage-0", Stage(0))
    WRONG[words](tmp_path / "stage-1")
    with pytest.raises(CheckpointError, match=words):
        join_stages(tmp_path, stages=2 if "expected 2" in words else None)
