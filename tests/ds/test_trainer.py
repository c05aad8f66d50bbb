"""Trainer's `deepspeed={...}` beside itself under DDP, and a loop under the command. Every feature of
Trainer, TRL and Lightning at every stage is in the matrix of tools.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from needed import skip_without
from on_ranks import on_ranks
from reference import differences

skip_without("accelerate")


@on_ranks(2, server="served")
def test_trainer_trains_saves_and_goes_on_as_under_ddp(folder: Path) -> None:
    from others.runs import SAVES, by_json, checkpoint, trained

    asks = {
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save": True,
    }
    ddp = trained(folder, **asks)
    ours = trained(folder, **by_json(3), **asks, **SAVES)
    again = trained(folder, **by_json(2), **asks, resume=checkpoint(ours))
    assert len(ddp.losses) == 4 and ours.rates == ddp.rates
    for of in ("losses", "norms", "evaluated"):
        assert getattr(ours, of) == pytest.approx(getattr(ddp, of), rel=1e-6), of
    assert again.losses[-2:] == pytest.approx(ours.losses[-2:], rel=1e-6)
    assert not differences(ddp.weights, ours.weights, 0, 1e-4)
    assert not differences(ours.weights, again.weights, 0, 1e-4)


# -- the command -----------------------------------------------------------------------------------

LOOP = """
import deepspeed, sys, torch
torch.manual_seed(0)
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 64))
engine, *_ = deepspeed.initialize(model=model, config=config)
local = deepspeed.utils.safe_get_local_fp32_param
own = sum(local(p).numel() for p in engine.module.parameters())
losses = []
for _ in range(3):
    loss = engine(torch.ones(2, 4) * (engine.global_rank + 1)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
with open(f"{sys.argv[1]}-{engine.global_rank}", "w") as file:
    print(type(engine).__name__, own < 4000, losses[-1] < losses[0], file=file)
"""


@pytest.mark.slow
def test_torchrun_starts_a_script_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "onefold.deepspeed", str(tmp_path / "train.py"), str(tmp_path / "said"),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("onefold serves the name deepspeed") == 1
    for rank in range(2):
        assert (tmp_path / f"said-{rank}").read_text() == "DeepSpeedEngine True True\n"
