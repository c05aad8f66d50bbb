"""onefold.hf.Trainer beside transformers' own under DDP: on two ranks, on the host."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ranks import run_ranks

pytest.importorskip("accelerate")
sys.path.append(str(Path(__file__).parent))
from hf_trials import continued, runs

#: The stages that each kind of run is made at; where it is not named, all.
STAGES = {"clipped": "13", "lora": "13", "bf16": "13"}
#: What each kind of run is asked for.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulating": {
        "arguments": {
            "gradient_accumulation_steps": 2,
            "activation_checkpointing": True,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "warmup_steps": 2,
        }
    },
    "clipped": {"arguments": {"max_grad_norm": 0.3}},
    "lora": {"lora": True},
    "bf16": {"arguments": {"bf16": True}},
}


def test_losses_are_those_of_ddp_at_every_stage(
    tmp_path: Path, sample: Callable[[Iterable[Any], int], list[Any]]
) -> None:
    kinds = {"accumulating", *sample(KINDS, 3)}
    stages: dict[str, Any] = {"ddp": None, "1": 1, "2": {"stage": 2}, "3": "3"}
    cases = [
        {"name": f"{kind} {stage}", "recipe": recipe, "save": f"saved {kind} {stage}", **asked}
        for kind, asked in KINDS.items()
        for stage, recipe in stages.items()
        if kind in kinds and (stage == "ddp" or stage in STAGES.get(kind, "123"))
    ]
    seen = run_ranks(2, runs, cases, str(tmp_path), server="libraries")[0]
    for kind in kinds:
        ddp = seen[f"{kind} ddp"]
        assert len(ddp["loss"]) == 4 and not ddp["sharded"]
        assert len(ddp["eval_loss"]) == (2 if kind == "accumulating" else 0)
        file = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
        theirs = load_file(tmp_path / f"saved {kind} ddp" / file)
        for stage in STAGES.get(kind, "123"):
            name, ours = f"{kind} {stage}", seen[f"{kind} {stage}"]
            assert ours["sharded"], name
            assert ours["learning_rate"] == ddp["learning_rate"], name
            assert ours["loss"] == seen[f"{kind} 1"]["loss"], name
            # Where the gradients are scaled by their norm, its rounding is in the weights
            rel = {"clipped": 1e-6, "bf16": 1e-2}.get(kind, 0)
            assert ours["loss"] == pytest.approx(ddp["loss"], rel=rel, abs=0), name
            assert ours["eval_loss"] == ddp["eval_loss"], name
            rel = 5e-2 if kind == "bf16" else 1e-6
            assert ours["grad_norm"] == pytest.approx(ddp["grad_norm"], rel=rel), name
            mine = load_file(tmp_path / f"saved {name}" / file)
            assert mine.keys() == theirs.keys(), name
            assert {k: t.dtype for k, t in mine.items()} == {k: t.dtype for k, t in theirs.items()}
            if kind != "bf16":
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


def test_runs_go_on_from_checkpoints(tmp_path: Path) -> None:
    """At another stage, from another engine, with adapters, and from the best weights."""
    seen = run_ranks(2, continued, str(tmp_path), server="libraries")[0]
    pairs = [
        ("whole", "resumed"),
        ("ddp", "from ddp"),
        ("ddp", "read later"),
        ("whole", "read later again"),
        ("lora", "lora resumed"),
    ]
    for first, second in pairs:
        assert len(seen[first]["loss"]) == 4
        assert seen[second]["loss"] == seen[first]["loss"], second
        assert seen[second]["learning_rate"] == seen[first]["learning_rate"], second
    folder = tmp_path / "whole" / "checkpoint-4"
    there = {path.name for path in folder.iterdir()}
    assert there >= {
        "config.json", "model.safetensors", "onefold", "rng_state_0.pth", "rng_state_1.pth",
        "scheduler.pt", "trainer_state.json", "training_args.bin",
    }  # fmt: skip
    # save_total_limit=1, the newest being the best
    assert [p.name for p in (tmp_path / "whole").glob("checkpoint-*")] == ["checkpoint-4"]
    adapters = {path.name for path in (tmp_path / "lora" / "checkpoint-2").iterdir()}
    assert "adapter_model.safetensors" in adapters and "model.safetensors" not in adapters
    # The base is in the folder that it came from, and not in each checkpoint
    manifest = json.loads(
        (tmp_path / "lora" / "checkpoint-2" / "onefold" / "manifest.json").read_text()
    )
    assert "lora_A" in json.dumps(manifest) and "mlp" not in json.dumps(manifest)
    # Drawn anew as the model was sharded, so not those of `lora`
    assert len(set(seen["lora read later"]["loss"])) == 4
    assert (
        load_file(tmp_path / "adapters" / "adapter_model.safetensors").keys()
        == load_file(tmp_path / "lora" / "checkpoint-2" / "adapter_model.safetensors").keys()
    )
    best = seen["best"]
    assert best["best"].endswith("checkpoint-2") and best["losses"][1] > best["losses"][0]
    assert best["after"] == pytest.approx(best["losses"][0], rel=1e-6)


def test_a_run_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Four samples a step on two ranks, then on one; then saved by one and read by plain
    transformers.
    """
    saves = {"save_strategy": "steps", "save_steps": 2}
    first = {"name": "two", "recipe": 3, "arguments": saves}
    second = {
        "name": "one",
        "recipe": 1,
        "resume": str(tmp_path / "two" / "checkpoint-2"),
        "arguments": {"gradient_accumulation_steps": 2},
    }
    two = run_ranks(2, runs, [first], str(tmp_path), server="libraries")[0]["two"]
    one = run_ranks(1, runs, [second], str(tmp_path), server="libraries")[0]["one"]
    assert len(one["loss"]) == 4 and one["loss"][:2] == two["loss"][:2]
    assert one["loss"][2:] == pytest.approx(two["loss"][2:], rel=1e-3)
