"""`zero_to_fp32`: whole models from checkpoint folders, by function and by the script in the folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import onefold
from onefold.checkpoint import CheckpointError
from onefold.integrations.deepspeed import initialize
from onefold.integrations.deepspeed.names.whole_model import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    get_optim_files,
)
from ranks import run_ranks


def build() -> nn.Sequential:
    """A frozen layer, one that is tied, and a buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3))
    model[3].weight = model[2].weight
    model[1].requires_grad_(False)
    model.register_buffer("seen", torch.tensor([4, 5]))
    return model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d = self.layers
        x = b(a(x))
        return c(x) + d(x)


def trained(folder: str, stage: int) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    engine, *_ = initialize(model=Net(), config=config)
    for tag in (None, "other"):
        engine.backward(engine(torch.ones(2, 6)).float().square().mean())
        engine.step()
        engine.save_checkpoint(f"{folder}/whole", tag, {"epoch": 3}, save_latest=tag is None)
    engine.save_checkpoint(f"{folder}/part", exclude_frozen_parameters=True)
    onefold.save(f"{folder}/plain/step-2", model=engine.module, optimizer=engine.optimizer, step=2)
    onefold.save(f"{folder}/weights/step-2", model=engine.module, step=2)
    return {n: v.float() for n, v in onefold.full_state_dict(engine.module).items()}


@pytest.fixture(scope="module", params=[1, 3])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder, and the model after the second step."""
    folder = tmp_path_factory.mktemp("zero")
    return folder, run_ranks(2, trained, str(folder), request.param)[0]


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_frozen_parameters_are_left_out_where_the_checkpoint_says_which_they_are(
    made: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, model = made
    frozen = {"layers.1.weight", "layers.1.bias"}
    for name, tag in (("whole", "other"), ("part", None), ("plain", None)):
        found = get_fp32_state_dict_from_zero_checkpoint(folder / name, tag, True)
        assert same(found, {n: v for n, v in model.items() if n not in frozen}), name
        assert found["layers.3.weight"] is found["layers.2.weight"]
        whole = get_fp32_state_dict_from_zero_checkpoint(folder / name, tag)
        assert whole.keys() == (model.keys() - frozen if name == "part" else model.keys())
    first = get_fp32_state_dict_from_zero_checkpoint(folder / "whole")
    assert first.keys() == model.keys() and not same(first, model), "latest names the first tag"
    with pytest.raises(CheckpointError, match="does not say which parameters were frozen"):
        get_fp32_state_dict_from_zero_checkpoint(folder / "weights", None, True)


def test_the_script_in_the_folder_writes_the_model(
    made: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, model = made
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(*given: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "zero_to_fp32.py", ".", *given]
        return subprocess.run(
            command, cwd=folder / "whole", env=env, capture_output=True, text=True, timeout=300
        )

    done = run(str(tmp_path / "out.bin"), "-t", "other")
    assert done.returncode == 0, done.stderr
    assert same(torch.load(tmp_path / "out.bin"), model)
    wrong = run(str(tmp_path / "none"), "-t", "missing")
    assert wrong.returncode == 1 and wrong.stderr.startswith("zero_to_fp32.py: "), wrong.stderr
    assert not (tmp_path / "none").exists() and "Traceback" not in wrong.stderr
    assert {p.name for p in (folder / "whole").iterdir()} == {
        "global_step1", "other", "latest", "zero_to_fp32.py"
    }  # fmt: skip


def test_files_have_a_size_and_an_index(
    made: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, model = made
    for safe, stem, suffix in ((True, "model", ".safetensors"), (False, "pytorch_model", ".bin")):
        out = tmp_path / suffix
        convert_zero_checkpoint_to_fp32_state_dict(folder / "whole", out, 300, safe, "other")
        index = json.loads((out / f"{stem}{suffix}.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        assert len(files) > 1 and files[0] == f"{stem}-00001-of-{len(files):05d}{suffix}"
        found: dict[str, torch.Tensor] = {}
        for file in files:
            part = load_file(out / file) if safe else torch.load(out / file)
            assert {n for n, f in index["weight_map"].items() if f == file} == part.keys()
            assert sum({v.data_ptr(): v.nbytes for v in part.values()}.values()) <= 2 * 300
            found |= part
        assert same(found, model)
        one = tmp_path / f"one {stem}"
        convert_zero_checkpoint_to_fp32_state_dict(folder / "whole", one, "5GB", safe, "other")
        (single,) = one.iterdir()
        assert single.name == f"{stem}{suffix}"
        assert same(load_file(single) if safe else torch.load(single), model)


def test_lightnings_questions_are_answered_from_memory(
    made: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, _ = made
    (file,) = get_optim_files(folder / "whole" / "global_step1")
    stage = torch.load(file, weights_only=False)["optimizer_state_dict"]["zero_stage"]
    assert stage in (1, 3)
    client = torch.load(get_model_state_file(folder / "whole" / "global_step1", stage))
    assert client["epoch"] == 3 and client["global_steps"] == 1
    with pytest.raises(CheckpointError, match="was not saved by an engine"):
        get_model_state_file(folder / "plain", stage)
