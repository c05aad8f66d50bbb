"""Onefold beside other tools: accelerate's dataloaders and launcher, Prometheus."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import reference
from needed import skip_without
from on_ranks import on_ranks, slow
from onefold.integrations.deepspeed.accelerate_launch import under_onefold
from ranks import absolute_path
from zoo import TinyGPT, tokens_of

skip_without("accelerate")
SERVER = "libraries"
HERE = Path(__file__)


class Model(nn.Module):
    """As the page calls it; it notes batches and losses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = reference.built(TinyGPT)
        self.seen: list[torch.Tensor] = []
        self.losses: list[float] = []

    def forward(self, tokens: torch.Tensor) -> Any:
        loss = self.inner(tokens)
        self.seen.append(tokens)
        self.losses.append(loss.item())
        return SimpleNamespace(loss=loss)


@slow
@on_ranks(2)
def test_the_pages_recipe_for_accelerate_trains_as_ddp_does() -> None:
    from others.runs import fresh

    page = (HERE.parents[2] / "docs" / "launchers.md").read_text()
    block = re.search(r'```python title="accelerate"\n(.*?)```', page, re.DOTALL)
    assert block is not None
    data = [{"tokens": tokens_of(i, 1)[0]} for i in range(16)]
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    with fresh():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        model = Model()
        # Clipping by the norm would leave its rounding in the weights
        exec(block[1].replace("1.0)  ", "1e9)"), {"model": model, "loader": loader})
    ddp = reference.ddp(reference.built(TinyGPT))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    losses = reference.train(ddp, optimizer, model.seen)
    assert len(losses) == 4 and model.losses == pytest.approx(losses, rel=1e-6)
    first, second = reference.on_each_rank([t.tolist() for t in model.seen])
    assert not any(batch in second for batch in first), "each rank has its own"


def launch(folder: Path, *line: str) -> list[list[str]]:
    """What each rank of the script wrote: its model's module, the number of ranks, its losses."""
    folder.mkdir()
    script = str(HERE.with_name("accelerate_loop.py"))
    done = subprocess.run(
        [sys.executable, "-m", *line, script, str(folder), *(["ddp"] if folder.name == "ddp" else [])],
        env={**os.environ, "PYTHONPATH": absolute_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [path.read_text().split() for path in sorted(folder.glob("rank*"))]


@slow
def test_a_script_under_accelerates_launcher_has_the_losses_of_ddp(tmp_path: Path) -> None:
    two = ["--num_processes", "2"]
    stage = ["--use_deepspeed", "--zero_stage", "3"]
    own = launch(tmp_path / "own", "onefold", "accelerate", "launch", *stage, *two)
    under = ["--multi_gpu", *two, "--module", "onefold.deepspeed"]
    ddp = launch(tmp_path / "ddp", "accelerate.commands.launch", *under)
    assert [said[:2] for said in own] == [["onefold.integrations.deepspeed.engine", "2"]] * 2
    assert [said[0] for said in ddp] == ["torch.nn.parallel.distributed"] * 2
    assert [said[2:] for said in own] == [said[2:] for said in ddp]
    assert len(own[0]) == 2 + 4


def given(**changed: object) -> Namespace:
    plain = {
        "no_python": False, "num_machines": 1, "deepspeed_multinode_launcher": None, "module": False, "use_deepspeed": True,
        "training_script": "train.py", "training_script_args": ["--lr", "1"],
    }  # fmt: skip
    return Namespace(**{**plain, **changed})


def test_scripts_and_modules_are_handed_to_the_process_that_serves() -> None:
    script = under_onefold(given())
    assert (script.training_script, script.module) == ("onefold.deepspeed", True)
    assert script.training_script_args == ["train.py", "--lr", "1"]
    module = under_onefold(given(module=True, training_script="package.train"))
    assert module.training_script_args == ["-m", "package.train", "--lr", "1"]
    with pytest.raises(ValueError, match=r"--num_machines 2 .*'pdsh' needs the command deepspeed"):
        under_onefold(given(num_machines=2))
    assert under_onefold(given(num_machines=2, deepspeed_multinode_launcher="standard")).module
    with pytest.raises(ValueError, match="Leave --no_python out"):
        under_onefold(given(no_python=True))


# -- Prometheus ------------------------------------------------------------------------------------
