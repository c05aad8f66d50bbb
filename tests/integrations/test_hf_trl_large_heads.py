"""TRL's default losses hand `lm_head.weight` to an autograd Function and never call the head. With a
large untied vocabulary the head is a unit of its own. The runs equal DDP's at every stage, with
onefold.hf's mixin and with `deepspeed={...}` served by Onefold.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks

pytest.importorskip("trl")
sys.path.append(str(Path(__file__).parent))
from trl_trials import runs_under_the_name, runs_with_large_heads

#: In a distillation the Function takes the head of the teacher, another sharded model, as well.
KINDS = ("sft", "dpo", "kto", "grpo", "distillation")


def equal(seen: dict[str, Any], stages: tuple[int, ...]) -> None:
    ddp = seen["None"]
    assert len(ddp["loss"]) == 4 and len(set(ddp["loss"])) == 4 and not ddp["sharded"]
    for stage in stages:
        ours = seen[f"{stage}"]
        # GRPO's losses are what is left of terms of order 1 that cancel out: fp32 rounds these
        assert ours["loss"] == pytest.approx(ddp["loss"], rel=1e-5, abs=2e-8), stage
        # DDP's norm is summed in fp32: of 262,144 elements it is up to 6e-5 off
        assert ours["grad_norm"] == pytest.approx(ddp["grad_norm"], rel=1e-4), stage


@pytest.mark.parametrize("kind", KINDS)
def test_losses_with_a_large_untied_head_are_those_of_ddp(tmp_path: Path, kind: str) -> None:
    cases: list[dict[str, Any]] = [
        {"name": f"{stage}", "kind": kind, "recipe": stage, "digits": True}
        for stage in (None, 0, 1, 2, 3)
    ]
    seen = run_ranks(2, runs_with_large_heads, cases, str(tmp_path), server="libraries")[0]
    assert all("lm_head" in seen[f"{stage}"]["units"] for stage in (0, 1, 2, 3))
    equal(seen, (0, 1, 2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_losses_under_the_name_of_deepspeed_are_too(tmp_path: Path, kind: str) -> None:
    stages = (1, 3) if kind == "sft" else (3,)
    cases: list[dict[str, Any]] = [
        {"name": f"{stage}", "kind": kind, "stage": stage, "untied": True, "digits": True}
        for stage in (None, *stages)
    ]
    seen = run_ranks(2, runs_under_the_name, cases, str(tmp_path), server="served")[0]
    equal(seen, stages)
