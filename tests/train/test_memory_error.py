"""When memory runs out, the error says what was held, where, what was planned, and what to change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import onefold
from onefold.train.config import resolve
from onefold.train.loop import train
from onefold.train.prepare import prepare
from onefold.train.worker import explain, is_out_of_memory
from started_runs import alone


def test_the_error_names_unit_ledger_plan_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    given = {
        "model": "llama:tiny",
        "tokenizer": "bytes",
        "data": str(tmp_path / "text.txt"),
        "seq": 32,
        "steps": 3,
        "precision": "bf16",
    }
    run = prepare(resolve(given), alone(), lambda line: None)
    block = next(u for u in onefold.engine_of(run.model).units if u.name != "(root)")
    module = block.module()
    assert module is not None
    module.register_forward_pre_hook(lambda *_: torch.empty(1 << 60, dtype=torch.uint8) and None)
    with pytest.raises(RuntimeError) as raised:
        train(run, lambda: False, lambda row: None)
    assert is_out_of_memory(raised.value)
    said = str(explain(run, raised.value))
    assert f"forward pass of unit {block.name!r}" in said, said
    assert "master weights" in said and "planned at most" in said, said
    assert "--micro-batch" in said and "--activation-checkpointing full" in said, said


def test_other_errors_are_not_taken_for_it() -> None:
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert is_out_of_memory(MemoryError())
