"""TRL's trainers with onefold.hf.TrainerMixin beside themselves under DDP: on two ranks, on the
host.
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
from trl_trials import runs

#: (trainer, with adapters): the stages that are compared.
KINDS: dict[tuple[str, bool], tuple[int, ...]] = {
    ("sft", False): (1, 2, 3),
    ("sft", True): (3,),
    ("dpo", False): (2, 3),
    ("dpo", True): (1, 3),
    ("reward", False): (3,),
    ("grpo", False): (1, 3),
    ("grpo", True): (3,),
}


def test_losses_are_those_of_ddp(
    tmp_path: Path, sample: Callable[[Iterable[Any], int], list[Any]]
) -> None:
    """SFT, DPO (reference model divided too, or adapters off), reward, GRPO with generation."""
    kinds = dict(sample(KINDS.items(), 3))
    cases: list[dict[str, Any]] = [
        {"name": f"{kind} {lora} {stage}", "kind": kind, "lora": lora, "recipe": stage}
        for (kind, lora), stages in kinds.items()
        for stage in (None, *stages)
    ]
    quantized = {"stage": 3, "frozen": "nf4"}
    cases += [
        {"name": f"{kind} nf4", "kind": kind, "lora": True, "recipe": quantized}
        for kind in ("dpo", "grpo")
        if (kind, True) in kinds
    ]
    seen = run_ranks(2, runs, cases, str(tmp_path), server="libraries")[0]
    for kind in ("dpo", "grpo"):  # the second with its reference as an idle adapter
        if (kind, True) not in kinds:
            continue
        plain = seen[f"{kind} True 3"]["loss"]
        assert seen[f"{kind} nf4"]["loss"] == pytest.approx(plain, abs=1e-3)
        assert seen[f"{kind} nf4"]["loss"] != plain
    for (kind, lora), stages in kinds.items():
        ddp = seen[f"{kind} {lora} None"]
        assert len(ddp["loss"]) == 4 and len(set(ddp["loss"])) == 4 and not ddp["sharded"]
        for stage in stages:
            name, ours = f"{kind} {lora} {stage}", seen[f"{kind} {lora} {stage}"]
            assert ours["sharded"], name
            # Some norms are above 1, and what is clipped by them has their rounding
            assert ours["loss"] == pytest.approx(ddp["loss"], rel=1e-5), name
            assert ours["grad_norm"] == pytest.approx(ddp["grad_norm"], rel=1e-5), name
            has_reference = kind in ("dpo", "grpo") and not lora
            assert ours["reference sharded"] == (has_reference and stage == 3), name
            if kind == "grpo":
                lengths = [row["completions/mean_length"] for row in ddp["logs"][:4]]
                assert len(set(lengths)) > 1, "texts of different lengths"
                assert lengths == [row["completions/mean_length"] for row in ours["logs"][:4]]
