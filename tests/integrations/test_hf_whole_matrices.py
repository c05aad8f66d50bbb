"""onefold.hf.Trainer with optimizers of whole matrices: transformers' Adafactor, and Muon beside
Adam as people write it.
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
sys.path.append(str(Path(__file__).parent))
from hf_trials import runs
from hf_whole_optimizers import MuonBesideAdam

KINDS: dict[str, dict[str, Any]] = {
    "adafactor": {"arguments": {"optim": "adafactor"}},
    "muon": {"more": {"optimizer_cls_and_kwargs": (MuonBesideAdam, {"lr": 0.01})}},
}


def case(kind: str, name: str, recipe: Any, **more: Any) -> dict[str, Any]:
    asked = KINDS[kind]
    arguments = {
        "max_grad_norm": 0.0,
        "save_strategy": "steps",
        "save_steps": 2,
        **asked.get("arguments", {}),
    }
    name = f"{kind} {name}"
    return {**asked, "name": name, "recipe": recipe, "save": f"saved {name}", **more} | {
        "arguments": arguments
    }


@pytest.mark.parametrize("kind", KINDS)
def test_whole_matrices_are_stepped_as_under_ddp_and_go_on_at_another_stage(
    tmp_path: Path, kind: str
) -> None:
    cases = [
        case(kind, "ddp", None),
        case(kind, "1", 1),
        case(kind, "3", "3"),
        case(kind, "again", 1, resume=f"{tmp_path}/{kind} 3/checkpoint-2"),
    ]
    seen = run_ranks(2, runs, cases, str(tmp_path), server="libraries")[0]
    ddp = seen[f"{kind} ddp"]
    assert len(set(ddp["loss"])) == 4
    theirs = load_file(tmp_path / f"saved {kind} ddp" / "model.safetensors")
    for name in ("1", "3", "again"):
        ours = seen[f"{kind} {name}"]
        assert ours["sharded"], name
        assert ours["loss"][-4:] == ddp["loss"][-len(ours["loss"][-4:]) :], name
        mine = load_file(tmp_path / f"saved {kind} {name}" / "model.safetensors")
        assert mine.keys() == theirs.keys(), name
        for key, tensor in mine.items():
            assert torch.equal(tensor, theirs[key]), (name, key)
