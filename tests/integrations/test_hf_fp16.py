"""onefold.hf.Trainer in fp16 with its loss scale, beside Trainer under DDP with torch's autocast and
scaler: on two ranks, on the host.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks

pytest.importorskip("accelerate")
sys.path.append(str(Path(__file__).parent))
from fp16_trials import runs


def near(ours: dict[str, Any], ddp: dict[str, Any], name: str) -> None:
    """fp16 has a relative step of 1e-3; DDP casts in each operation."""
    # Sums that DDP's autocast makes in fp32 overflow a little earlier in fp16
    first = next((i for i, (a, b) in enumerate(both(ours, ddp)) if a != b), None)
    assert ours["loss"][:first] == pytest.approx(ddp["loss"][:first], rel=2e-3), name
    assert ours["loss"] == pytest.approx(ddp["loss"], rel=1e-2), name
    assert ours["eval_loss"] == pytest.approx(ddp["eval_loss"], rel=2e-3), name
    if first is None:
        assert ours["learning_rate"] == ddp["learning_rate"], name
    else:
        assert name.startswith("overflows") and first > 1, (name, ours["scales"], ddp["scales"])


def both(ours: dict[str, Any], ddp: dict[str, Any]) -> list[tuple[float, float]]:
    return list(zip(ours["scales"], ddp["scales"], strict=True))


def test_losses_and_scales_are_those_of_ddp(tmp_path: Path, sample: Any) -> None:
    """With a scale that grows, one at which the first steps overflow, and accumulation."""
    kinds: dict[str, dict[str, Any]] = {
        "grows": {"arguments": {"max_steps": 5}},
        "overflows": {
            "scaling": {"init_scale": 2.0**20, "growth_interval": 100},
            # The fused kernel skips steps by itself, unknown to accelerate
            "arguments": {"max_steps": 9, "max_grad_norm": 0.0, "optim": "adamw_torch"},
        },
        "accumulates": {
            "lora": True,
            "arguments": {
                "gradient_accumulation_steps": 2,
                "eval_strategy": "steps",
                "eval_steps": 2,
            },
        },
    }
    stages: dict[str, Any] = {
        "ddp": None, "1": 1, "2": 2, "3": 3,
        "host": {"stage": 3, "offload_optimizer": "cpu", "precision": "fp16"},
    }  # fmt: skip
    cases = [
        {"name": f"{kind} {stage}", "recipe": recipe, **asked}
        for kind, asked in kinds.items()
        for stage, recipe in stages.items()
        if stage != "2" or kind == "grows"
    ]
    others = sample((c["name"] for c in cases if c["name"].split()[1] not in ("ddp", "3")), 3)
    cases = [c for c in cases if c["name"].split()[1] in ("ddp", "3") or c["name"] in others]
    ranks = run_ranks(2, runs, cases, str(tmp_path), server="libraries")
    for seen in ranks:
        for case in cases:
            kind, _, stage = case["name"].partition(" ")
            ours, ddp = seen[case["name"]], seen[f"{kind} ddp"]
            if stage == "ddp":
                assert ours["scaler"] == "torch" and not ours["sharded"]
                continue
            assert ours["scaler"] == "onefold" and ours["kind"] == "torch.float16"
            assert ours["sharded"], case["name"]
            assert ours["scales"] == ranks[0][case["name"]]["scales"], "alike on all ranks"
            near(ours, ddp, case["name"])
    grows, overflows = ranks[0]["grows 3"], ranks[0]["overflows 3"]
    assert grows["scales"] == [2.0**12] * 3 + [2.0**13] * 3
    skipped = [b < a for a, b in zip(overflows["scales"], overflows["scales"][1:], strict=False)]
    assert skipped[0] and not all(skipped), overflows["scales"]
    # A step that is skipped moves neither weights nor the rate
    rates = overflows["learning_rate"]
    assert [a == b for a, b in zip(rates, rates[1:], strict=False)] == skipped[:-1]


def test_the_scale_goes_on_from_a_checkpoint_and_into_another_precision(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    at = str(tmp_path / "whole" / "checkpoint-2")
    bf16 = {"fp16": False, "bf16": True}
    cases: list[dict[str, Any]] = [
        {"name": "whole", "recipe": 3, "arguments": saves},
        {"name": "resumed", "recipe": 1, "resume": at, "arguments": saves},
        {"name": "in bf16", "recipe": 2, "resume": at, "arguments": saves | bf16},
        {"name": "and back", "recipe": 3, "arguments": saves,
         "resume": str(tmp_path / "in bf16" / "checkpoint-4")},
    ]  # fmt: skip
    for seen in run_ranks(2, runs, cases, str(tmp_path), server="libraries"):
        whole, resumed = seen["whole"], seen["resumed"]
        assert resumed["loss"] == whole["loss"] and len(whole["loss"]) == 5
        assert whole["scales"] == [2.0**12] * 3 + [2.0**13] * 3
        assert resumed["scales"] == whole["scales"][2:], "two good steps count"
        assert seen["in bf16"]["scales"] == [] and seen["in bf16"]["kind"] == "torch.bfloat16"
        assert seen["in bf16"]["loss"] == pytest.approx(whole["loss"], rel=2e-2)
        assert seen["and back"]["scales"] == [2.0**12] * 2, "there was none to go on from"
    assert (tmp_path / "whole" / "checkpoint-2" / "scaler.pt").is_file()
    assert not (tmp_path / "in bf16" / "checkpoint-4" / "scaler.pt").exists()
