"""The weights that GRPO gives to vLLM from a sharded model, beside those of DDP: on two ranks, on the
host, with stand-ins for vLLM.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import run_ranks

pytest.importorskip("trl")
sys.path.append(str(Path(__file__).parent))
from vllm_trials import runs, without_hook


def test_vllm_is_given_the_weights_of_ddp_in_bounded_memory(tmp_path: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "plain": {}, "lora": {"lora": True}, "modules": {"lora": "modules"}
    }  # fmt: skip
    stages = {"ddp": None, "1": 1, "3": 3}
    cases = [
        {"name": f"{kind} {stage}", "recipe": recipe, **asked}
        for kind, asked in kinds.items()
        for stage, recipe in stages.items()
        if kind == "modules" or stage != "1"
    ]
    # In bf16 it is what is computed with
    cases.append({"name": "bf16", "recipe": 3, "arguments": {"bf16": True}})
    ranks = run_ranks(2, runs, cases, str(tmp_path), server="libraries", timeout=500)
    for case in cases[:-1]:
        kind, _, stage = case["name"].partition(" ")
        first, second = (seen[case["name"]] for seen in ranks)
        ddp = ranks[0][f"{kind} ddp"]
        assert second["syncs"] == [] and len(first["syncs"]) == 4 == len(ddp["syncs"])
        assert first["reset"] == [1, 2, 3, 4]
        assert first["loss"] == pytest.approx(ddp["loss"], rel=1e-4, abs=1e-6), case["name"]
        assert first["syncs"][0].keys() == ddp["syncs"][0].keys()
        for ours, theirs in zip(first["syncs"], ddp["syncs"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        moved = [n for n, v in first["syncs"][0].items() if not v.equal(first["syncs"][3][n])]
        assert moved, "steps were made between them"
        for sync, announced in zip(first["syncs"], first["announced"], strict=True):
            assert [(n, list(v.shape)) for n, v in sync.items()] == [
                (n, shape) for n, _, shape in announced
            ]
        for seen in (first, second):
            torch.testing.assert_close(seen["colocated"], ddp["colocated"], rtol=1e-5, atol=1e-5)
        if stage != "ddp":
            assert first["sharded"] and 0 < first["highest"] <= 16 * 1024 < first["whole"]
    bf16 = ranks[0]["bf16"]
    assert {v.dtype for v in bf16["syncs"][0].values()} == {torch.bfloat16}
    assert all(dtype == "bfloat16" for _, dtype, _ in bf16["announced"][0])


def test_a_trl_without_a_place_for_weights_is_refused() -> None:
    (said,) = run_ranks(1, without_hook, server="libraries")
    assert "VLLMGeneration._iter_named_params" in said and "leave use_vllm out" in said
