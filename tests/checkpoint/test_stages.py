"""Checkpoints that stages of a pipeline saved apart become one of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import onefold
from onefold.checkpoint import CheckpointError, join_stages, latest
from onefold.checkpoint.tensorfile import TensorFile
from onefold.inspection.verify import examine


class Stage(nn.Module):
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
    optimizer = torch.optim.AdamW(
        [{"params": params[:1]}, {"params": params[1:]}] if groups == 2 else params, lr=lr
    )
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    onefold.save(folder, model=module, optimizer=optimizer, step=step, extra={"of": folder.name})


def test_the_whole_model_loads_what_its_stages_saved(tmp_path: Path) -> None:
    folder, parts = tmp_path / "step-2", [Stage(0, 1), Stage(2), Stage(3)]
    for place, part in zip((2, 9, 10), parts, strict=True):  # in the order of the numbers
        save(folder / f"stage-{place}", part)
    join_stages(folder)
    whole = onefold.shard(Stage(0, 1, 2, 3), onefold.Recipe.zero(1))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.5)
    loaded = onefold.load(latest(tmp_path) or "", model=whole, optimizer=optimizer)
    assert (loaded.path, loaded.step, loaded.extra) == (folder, 2, {"of": "stage-2"})
    assert optimizer.param_groups[0]["lr"] == 0.1
    got = whole.state_dict()
    for part in parts:
        for name, value in part.state_dict().items():
            assert torch.equal(got[name], value), name
    assert len(optimizer.state) == 8 and all(s["step"] == 1 for s in optimizer.state.values())
    assert not examine(folder).problems


def test_damage_in_a_stage_is_found(tmp_path: Path) -> None:
    save(tmp_path / "stage-0", Stage(0))
    save(tmp_path / "stage-1", Stage(1))
    join_stages(tmp_path)
    assert not examine(tmp_path).problems
    file = tmp_path / "stage-1" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    with TensorFile(file) as tensors:
        at = tensors.header["parameter:layers.1.weight@0"].begin
    data[at] ^= 1
    file.write_bytes(data)
    assert examine(tmp_path).problems
    with pytest.raises(CheckpointError, match="stage-1/rank-00000"):
        onefold.load(tmp_path, model=onefold.shard(Stage(0, 1), onefold.Recipe.zero(1)))


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (lambda f: save(f, Stage(0)), "both stage-0 and stage-1 hold the parameter 'layers.0"),
        (lambda f: save(f, Stage(1, table=2.0)), "hold the buffer 'table'"),
        (lambda f: save(f, Stage(1), step=3), "stage-0 at step 2, stage-1 at step 3"),
        (lambda f: save(f, Stage(1), lr=0.2), r"other options in some stages \(lr\)"),
        (lambda f: save(f, Stage(1), groups=2), "different numbers of groups of optimizer 0: 1, 2"),
        (lambda f: join_stages(f.parent), "is a checkpoint already"),
    ],
    ids=["names", "buffers", "steps", "options", "groups", "twice"],
)
def test_stages_that_do_not_belong_together_are_refused(
    second: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    save(tmp_path / "stage-0", Stage(0))
    with pytest.raises(CheckpointError, match=sentence):
        second(tmp_path / "stage-1")
        join_stages(tmp_path)
        join_stages(tmp_path)


def test_a_folder_without_stages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoints of stages"):
        join_stages(tmp_path)


def test_a_stage_whose_save_did_not_finish_is_missed(tmp_path: Path) -> None:
    save(tmp_path / "stage-0", Stage(0))
    with pytest.raises(CheckpointError, match=r"of 1 stages \(stage-0\), expected 2"):
        join_stages(tmp_path, stages=2)
    hidden = tmp_path / ".stage-1.0123abcd.unfinished"
    hidden.mkdir()
    with pytest.raises(CheckpointError, match="unfinished holds no whole checkpoint"):
        join_stages(tmp_path)
    hidden.rmdir()
    save(tmp_path / "stage-1", Stage(1))
    (tmp_path / "stage-1" / "manifest.json").rename(tmp_path / "taken")
    with pytest.raises(CheckpointError, match="stage-1 holds no whole checkpoint"):
        join_stages(tmp_path)
    (tmp_path / "taken").rename(tmp_path / "stage-1" / "manifest.json")
    join_stages(tmp_path, stages=2)
    assert not examine(tmp_path).problems
