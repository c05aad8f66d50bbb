"""transformers' Trainer with `deepspeed={...}`, served by Onefold, beside the same Trainer under
DDP: on two ranks, on the host.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from onefold.checkpoint.loading import source_of
from ranks import run_ranks

pytest.importorskip("accelerate")
sys.path.append(str(Path(__file__).parent))
from trainer_trials import ds, runs

HERE = Path(__file__).parent
ADAMW = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    }
}
WARMUP = {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    }
}
#: What the script is asked for beside the configuration, and what the configuration has beside its
#: stage.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "from_pretrained": (
        {
            "from_pretrained": True,
            "arguments": {
                "gradient_accumulation_steps": 2,
                "eval_strategy": "steps",
                "eval_steps": 2,
            },
        },
        {},
    ),
    "optimizer of the JSON": ({}, ADAMW),
    "lora": ({"from_pretrained": True, "lora": True}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_are_those_of_ddp(stage: int, kind: str, tmp_path: Path) -> None:
    asked, more = KINDS[kind]
    cases = [
        {"name": "ddp", "save": "of-ddp", **asked},
        {"name": "ours", "save": "of-ours", "deepspeed": ds(stage, **more), **asked},
    ]
    seen = run_ranks(2, runs, cases, str(tmp_path), server="served")[0]
    ddp, ours = seen["ddp"], seen["ours"]
    assert (ddp["type"], ours["type"]) == ("DistributedDataParallel", "DeepSpeedEngine")
    assert len(ddp["losses"]) == 4 and ours["losses"] == ddp["losses"]
    # The engine steps a schedule that it was given, so Trainer logs the rate of the next step
    rates = [*ddp["rates"][1:], 0.0] if "JSON" in kind else ddp["rates"]
    assert ours["rates"] == rates and ours["eval"] == ddp["eval"]
    assert ours["norms"] == pytest.approx(ddp["norms"], rel=1e-6)
    file = "adapter_model.safetensors" if asked.get("lora") else "model.safetensors"
    theirs, mine = load_file(tmp_path / "of-ddp" / file), load_file(tmp_path / "of-ours" / file)
    assert mine.keys() == theirs.keys()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_goes_on_from_its_checkpoint(stage: int, lora: bool, tmp_path: Path) -> None:
    """The second run is at another stage."""
    saves = {"save_strategy": "steps", "save_steps": 2}
    common = {"from_pretrained": True, "lora": lora}
    folder = tmp_path / "whole" / "checkpoint-2"
    cases = [
        {"name": "whole", "deepspeed": ds(stage), "arguments": saves, **common},
        {"name": "resumed", "deepspeed": ds(3), "resume": str(folder), **common},
    ]
    seen = run_ranks(2, runs, cases, str(tmp_path), server="served")[0]
    assert (folder / "latest").read_text() == "global_step2" and (folder / "global_step2").is_dir()
    assert seen["resumed"]["losses"] == seen["whole"]["losses"]
    assert seen["resumed"]["rates"] == seen["whole"]["rates"]
    source = source_of(folder / "global_step2")
    held = {item.name for item in source.items() if item.kind == "parameter"}
    source.close()
    assert held and all("lora_" in name for name in held) == lora, "adapters alone, or all"


def test_a_run_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Four samples a step on two ranks, then on one."""
    folder = tmp_path / "two" / "checkpoint-2"
    first = {
        "name": "two",
        "deepspeed": ds(3, **ADAMW),
        "arguments": {"save_strategy": "steps", "save_steps": 2},
    }
    second = {
        "name": "one",
        "deepspeed": ds(2, **ADAMW),
        "resume": str(folder),
        "arguments": {"gradient_accumulation_steps": 2},
    }
    two = run_ranks(2, runs, [first], str(tmp_path), server="served")[0]["two"]
    one = run_ranks(1, runs, [second], str(tmp_path), server="served")[0]["one"]
    assert len(one["losses"]) == 4 and one["losses"][:2] == two["losses"][:2]
    assert one["losses"][2:] == pytest.approx(two["losses"][2:], rel=1e-3)


@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_with_optimizer_and_schedule_of_the_json(stage: int, tmp_path: Path) -> None:
    arguments = {"warmup_steps": 2, "bf16": True}
    given = ds(stage, bf16={"enabled": "auto"}, **ADAMW, **WARMUP)
    cases = [
        {"name": "ddp", "arguments": {"bf16": True}},
        {"name": "ours", "deepspeed": given, "arguments": arguments},
    ]
    seen = run_ranks(2, runs, cases, str(tmp_path), server="served")[0]
    ours = seen["ours"]
    assert len(ours["losses"]) == 4
    assert ours["losses"] == pytest.approx(seen["ddp"]["losses"], abs=0.05)
    # Iterations -1 and 0 of DeepSpeed's schedule are both 0
    assert max(ours["rates"]) <= 1e-2 and len(set(ours["rates"])) > 1


def by_torchrun(script: Path, *arguments: str) -> str:
    """What two ranks print."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "onefold.deepspeed", str(script), *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("onefold serves the name deepspeed") == 1
    return done.stdout


def test_torchrun_starts_a_loop_of_ones_own_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import deepspeed, sys, torch\n"
        "torch.manual_seed(0)\n"
        "config = {'train_micro_batch_size_per_gpu': 2, 'zero_optimization': {'stage': 3}}\n"
        "config['optimizer'] = {'type': 'AdamW', 'params': {'lr': 0.01}}\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 64))\n"
        "engine, *_ = deepspeed.initialize(model=model, config=config)\n"
        "local = deepspeed.utils.safe_get_local_fp32_param\n"
        "own = sum(local(p).numel() for p in engine.module.parameters())\n"
        "losses = []\n"
        "for _ in range(3):\n"
        "    loss = engine(torch.ones(2, 4) * (engine.global_rank + 1)).square().mean()\n"
        "    engine.backward(loss)\n"
        "    engine.step()\n"
        "    losses.append(loss.item())\n"
        "with open(f'{sys.argv[1]}-{engine.global_rank}', 'w') as file:\n"
        "    print(type(engine).__name__, own < 4000, losses[-1] < losses[0], file=file)\n"
    )
    by_torchrun(tmp_path / "train.py", str(tmp_path / "said"))
    for rank in range(2):
        assert (tmp_path / f"said-{rank}").read_text() == "DeepSpeedEngine True True\n"


def test_torchrun_starts_the_script_by_the_command(tmp_path: Path) -> None:
    import json

    asked = {"folder": str(tmp_path), "name": "run", "deepspeed": ds(3)}
    asked["deepspeed"].pop("steps_per_print")
    by_torchrun(HERE / "trainer_script.py", json.dumps(asked))
    seen = json.loads((tmp_path / "run.json").read_text())
    assert seen["type"] == "DeepSpeedEngine" and len(seen["losses"]) == 4
