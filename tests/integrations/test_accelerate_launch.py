"""accelerate's launcher and Onefold under the name deepspeed: `onefold accelerate launch`, and
`accelerate launch --module onefold.deepspeed`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from onefold.integrations.deepspeed.accelerate_launch import under_onefold
from ranks import absolute_path

SCRIPT = str(Path(__file__).with_name("accelerate_script.py"))
ENGINE = "onefold.integrations.deepspeed.engine"


def run(folder: Path, *line: str) -> list[list[str]]:
    """What each rank of the script wrote: its model's module, the number of ranks, its losses."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", *line, str(folder), *(["ddp"] if "ddp" in folder.name else [])],
        env={**os.environ, "PYTHONPATH": absolute_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [path.read_text().split() for path in sorted(folder.glob("rank*"))]


def test_a_script_of_accelerate_has_the_losses_of_ddp(tmp_path: Path) -> None:
    own = run(
        tmp_path / "own", "onefold", "accelerate", "launch", "--use_deepspeed", "--zero_stage", "3",
        "--num_processes", "2", SCRIPT,
    )  # fmt: skip
    ddp = run(
        tmp_path / "ddp", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "--module", "onefold.deepspeed", SCRIPT,
    )  # fmt: skip
    assert [said[:2] for said in own] == [[ENGINE, "2"]] * 2
    assert [said[0] for said in ddp] == ["torch.nn.parallel.distributed"] * 2
    assert [said[2:] for said in own] == [said[2:] for said in ddp]
    assert len(own[0]) == 2 + 4


def given(**changed: object) -> Namespace:
    plain = {
        "no_python": False, "num_machines": 1, "deepspeed_multinode_launcher": None, "module": False,
        "use_deepspeed": True, "training_script": "train.py", "training_script_args": ["--lr", "1"],
    }  # fmt: skip
    return Namespace(**{**plain, **changed})


def test_scripts_and_modules_are_handed_to_the_process_that_serves() -> None:
    script = under_onefold(given())
    assert (script.training_script, script.module) == ("onefold.deepspeed", True)
    assert script.training_script_args == ["train.py", "--lr", "1"]
    assert under_onefold(script).training_script_args == ["train.py", "--lr", "1"]
    module = under_onefold(given(module=True, training_script="package.train"))
    assert module.training_script_args == ["-m", "package.train", "--lr", "1"]
    with pytest.raises(ValueError, match=r"--num_machines 2 .*'pdsh' needs the command deepspeed"):
        under_onefold(given(num_machines=2))
    standard = given(num_machines=2, deepspeed_multinode_launcher="standard")
    assert under_onefold(standard).module
    with pytest.raises(ValueError, match="Leave --no_python out"):
        under_onefold(given(no_python=True))
