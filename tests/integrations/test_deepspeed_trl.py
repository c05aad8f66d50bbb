"""TRL's trainers with `deepspeed={...}`, served by Onefold, beside themselves under DDP: on two
ranks, on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks

pytest.importorskip("trl")
sys.path.append(str(Path(__file__).parent))
from trl_trials import runs_under_the_name

#: What is asked for: the stages that are compared with DDP.
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "sft": ({"kind": "sft"}, (1, 2, 3)),
    "sft, adapters": ({"kind": "sft", "lora": True}, (3,)),
    "reward": ({"kind": "reward"}, (3,)),
    "dpo": ({"kind": "dpo"}, (2, 3)),
    "dpo, adapters": ({"kind": "dpo", "lora": True}, (1, 3)),
    "dpo, reference follows": (
        {
            "kind": "dpo",
            "arguments": {
                "sync_ref_model": True,
                "ref_model_sync_steps": 1,
                "ref_model_mixup_alpha": 0.5,
            },
        },
        (3,),
    ),
    "dpo, reference before": (
        {"kind": "dpo", "on_disk": True, "arguments": {"precompute_ref_log_probs": True}},
        (2, 3),
    ),
    "grpo": ({"kind": "grpo"}, (1, 3)),
    "grpo, adapters": ({"kind": "grpo", "lora": True}, (3,)),
    "grpo, not gathered": (
        {"kind": "grpo", "arguments": {"ds3_gather_for_generation": False}},
        (3,),
    ),
}


Sample = Callable[[Iterable[Any], int], list[Any]]


def test_losses_are_those_of_ddp(tmp_path: Path, sample: Sample) -> None:
    """With a reference model that follows, is asked beforehand, or is the model with its adapters
    off; with texts generated inside `GatheredParameters` and outside.
    """
    follows = ["dpo", "dpo, reference follows"]
    some = {"grpo", *follows, *sample(CASES, 4)}
    chosen = {name: case for name, case in CASES.items() if name in some}
    cases: list[dict[str, Any]] = [
        {"name": f"{name}, {stage}", "stage": stage, **asked}
        for name, (asked, stages) in chosen.items()
        for stage in (None, *stages)
    ]
    seen = run_ranks(2, runs_under_the_name, cases, str(tmp_path), server="served")[0]
    for name, (asked, stages) in chosen.items():
        ddp = seen[f"{name}, None"]
        assert len(ddp["loss"]) == 4 and len(set(ddp["loss"])) == 4
        assert ddp["types"][0] == "DistributedDataParallel"
        for stage in stages:
            ours = seen[f"{name}, {stage}"]
            assert ours["types"][0] == "DeepSpeedEngine" and ours["sharded"]
            has_reference = asked["kind"] in ("dpo", "grpo") and not asked.get("lora")
            reference = "DeepSpeedEngine" if has_reference else "NoneType"
            if "before" not in name:
                assert ours["types"][1] == reference, (name, stage)
            # Some norms are above 1, and what is clipped by them has their rounding
            assert ours["loss"] == pytest.approx(ddp["loss"], rel=1e-5), (name, stage)
            assert ours["grad_norm"] == pytest.approx(ddp["grad_norm"], rel=1e-5), (name, stage)
            if asked["kind"] == "grpo":
                lengths = [row["completions/mean_length"] for row in ddp["logs"][:4]]
                assert len(set(lengths)) > 1, "texts of different lengths"
                assert lengths == [row["completions/mean_length"] for row in ours["logs"][:4]]
    stays, moves = (seen[f"{name}, 3"]["loss"] for name in follows)
    assert moves[0] == stays[0] and moves[2:] != stays[2:]
