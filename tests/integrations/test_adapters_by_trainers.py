"""Adapters of peft that bring whole modules or embedding layers: what Trainer writes, with a recipe
and with a configuration of DeepSpeed's, beside Trainer's own under DDP.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ranks import run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("peft")
sys.path.append(str(Path(__file__).parent))
import hf_trials
import trainer_trials

KINDS: dict[str, dict[str, Any]] = {
    "whole modules": {"modules_to_save": ["lm_head", "norm"]},
    "adapters on embeddings": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "more tokens": {"tokens": 70},
}
#: Where gradients are not scaled by their norm, its rounding is not in the weights.
UNCLIPPED = {"max_grad_norm": 0.0}
SAVES = {"save_strategy": "steps", "save_steps": 2, **UNCLIPPED}


def compare(folder: Path, other: Path, within: float) -> None:
    ours, theirs = (load_file(f / "adapter_model.safetensors") for f in (folder, other))
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    assert any("lora_" not in name for name in ours)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=within)
    for name in ours:
        if "base_layer" in name or name.endswith("embed_tokens.weight"):
            assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_onefolds_trainer_writes_and_reads_what_trainer_does_under_ddp(
    kind: str, tmp_path: Path
) -> None:
    """A run that goes on begins with other values in what was drawn."""
    common = {"lora": KINDS[kind], "arguments": SAVES}
    cases = [{"name": "ddp", "recipe": None, "save": "of-ddp", **common}]
    for stage in (1, 3):
        cases.append({"name": str(stage), "recipe": stage, "save": f"of-{stage}", **common})
        again = {"seed": 5, "resume": f"{tmp_path}/{stage}/checkpoint-2", "recipe": 4 - stage}
        cases.append({"name": f"{stage} resumed", "save": f"of-{stage} resumed", **common, **again})
    seen = run_ranks(2, hf_trials.runs, cases, str(tmp_path), server="libraries")[0]
    for name, ours in seen.items():
        assert ours["loss"] == seen["ddp"]["loss"], name
        compare(tmp_path / f"of-{name}", tmp_path / "of-ddp", 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_trainer_writes_under_the_name_deepspeed_what_it_does_under_ddp(
    kind: str, tmp_path: Path
) -> None:
    common = {"lora": KINDS[kind], "from_pretrained": True, "arguments": UNCLIPPED}
    cases: list[dict[str, Any]] = [{"name": "ddp", "save": "of-ddp", **common}]
    for stage in (1, 2, 3):
        given = {"deepspeed": trainer_trials.ds(stage), "arguments": SAVES}
        cases.append({"name": str(stage), "save": f"of-{stage}", **common, **given})
        again = {"seed": 5, "resume": f"{tmp_path}/{stage}/checkpoint-2"}
        again["deepspeed"] = trainer_trials.ds(4 - stage)
        cases.append({"name": f"{stage} resumed", "save": f"of-{stage} resumed", **common, **again})
    seen = run_ranks(2, trainer_trials.runs, cases, str(tmp_path), server="served")[0]
    for name, ours in seen.items():
        assert ours["losses"] == seen["ddp"]["losses"], name
        compare(tmp_path / f"of-{name}", tmp_path / "of-ddp", 1e-4)
