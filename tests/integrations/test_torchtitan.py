"""Onefold in torchtitan's trainer, where torchtitan is installed: not in `make test`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks

sys.path.append(str(Path(__file__).parent))
from torchtitan_trials import STEPS, by_torchtitan, resumed

missing = importlib.util.find_spec("torchtitan") is None
pytestmark = pytest.mark.skipif(missing, reason="torchtitan is not installed")


def flat(rows: list[tuple[float, float]]) -> list[float]:
    return [value for row in rows for value in row]


def test_torchtitans_trainer_has_the_losses_and_norms_of_its_fsdp2(tmp_path: Path) -> None:
    seen: dict[str, Any] = run_ranks(2, by_torchtitan, str(tmp_path), fresh=True)[0]
    for precision, stages, rel in (("fp32", (1, 3), 1e-6), ("bf16", (3,), 1e-3)):
        theirs = flat(seen[f"{precision} fsdp2"])
        assert len(set(theirs)) == 2 * STEPS
        for stage in stages:
            assert flat(seen[f"{precision} {stage}"]) == pytest.approx(theirs, rel=rel)
    assert len(seen["drawn"]) > 10
    for name, (mean, std, their_mean, their_std) in seen["drawn"].items():  # as torchtitan draws
        assert mean == pytest.approx(their_mean, abs=0.02), name
        assert std == pytest.approx(their_std, rel=0.05), name


def test_torchtitans_run_resumes_at_another_stage(tmp_path: Path) -> None:
    seen: dict[str, Any] = run_ranks(2, resumed, str(tmp_path), fresh=True)[0]
    assert len(seen["whole"]) == STEPS and len(seen["first"]) == 2
    assert flat(seen["first"] + seen["second"]) == pytest.approx(flat(seen["whole"]), rel=1e-6)
    assert seen["parsed"] == ("Trainer.Config", '{"stage": 2}', "CrossEntropyLoss.Config")
    assert len(seen["refused"]) == 8
    for key, sentence in seen["refused"].items():
        word = {"training.disable_cuda_graphs": "CUDA graphs", "validator.enable": "validator"}
        word |= {"compile.enable": "compile", "recipe": "names no stage"}
        assert word.get(key, key) in sentence, (key, sentence)
