"""What transformers' trainers do beside training with `deepspeed={...}`, served by Onefold: texts,
new tokens, AdaLoRA; beside the same under DDP, on two ranks.
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
from name_trials import every_trial


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trials")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What each rank saw."""
    return run_ranks(2, every_trial, str(folder), server="served")


def same_run(ours: dict[str, Any], ddp: dict[str, Any], steps: int = 4) -> None:
    assert ours["sharded"] and not ddp["sharded"] and len(ddp["loss"]) == steps
    for key in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        assert ours[key] == pytest.approx(ddp[key], rel=1e-5), key


def test_texts_are_those_of_ddp(found: list[dict[str, Any]]) -> None:
    """Sampled while Seq2SeqTrainer evaluates, and by each rank at a length of its own."""
    ranks = [seen["texts"] for seen in found]
    for seen in ranks:
        ddp = seen["None"]
        assert len(ddp["texts"]) == 2 and ddp["texts"][0] != ddp["texts"][1]
        for stage in ("1", "3"):
            same_run(seen[stage], ddp)
            assert seen[stage]["texts"] == ddp["texts"] and seen[stage]["own"] == ddp["own"]
    lengths = [len(seen["None"]["own"][0]) for seen in ranks]
    assert lengths[0] != lengths[1]


def test_new_tokens_are_trained_as_under_ddp(found: list[dict[str, Any]], folder: Path) -> None:
    seen = found[0]["tokens"]
    for kind in ("tied", "tied, mean", "untied"):
        ddp, ours = seen[f"{kind} None"], seen[f"{kind} 3"]
        same_run(ours, ddp)
        assert ours["shapes"] == [(70, 32), (70, 32)]
        theirs, mine = (
            load_file(folder / f"{kind} {stage}" / "model.safetensors") for stage in ("None", "3")
        )
        assert mine.keys() == theirs.keys()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


def test_adalora_gives_out_the_ranks_that_it_does_under_ddp(found: list[dict[str, Any]]) -> None:
    seen = found[0]["adalora"]
    ranks = seen["None"]["ranks"]
    assert sum(sum(row) for row in ranks.values()) == 8, "of 16 in the beginning"
    for stage in ("2", "3"):
        same_run(seen[stage], seen["None"], steps=8)
        assert seen[stage]["ranks"] == ranks
