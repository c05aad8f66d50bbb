"""Onefold as an engine of verl, where verl is installed: not in `make test`, since it asks for
versions of its own.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks

sys.path.append(str(Path(__file__).parent))
from verl_trials import by_verl, interface, states

missing = importlib.util.find_spec("verl") is None
pytestmark = pytest.mark.skipif(missing, reason="verl is not installed")


def column(rows: list[dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows]


def test_verls_training_worker_has_the_losses_of_its_fsdp2(tmp_path: Path) -> None:
    seen = run_ranks(2, by_verl, str(tmp_path), fresh=True)[0]
    for name, theirs, rel in (("fp32", "fp32 fsdp2", 1e-6), ("bf16", "bf16 fsdp2", 1e-3)):
        ours = [key for key in seen if key.startswith(name) and key != theirs]
        assert len(ours) == (2 if name == "fp32" else 1)
        for key in [*ours, *(["lora 3"] if name == "fp32" else [])]:
            expected = seen["lora fsdp2" if key == "lora 3" else theirs]
            assert len(expected) == 3 and len(set(column(expected, "loss"))) == 3
            for what in ("loss", "grad_norm", "lr"):
                assert column(seen[key], what) == pytest.approx(column(expected, what), rel=rel)


def test_verls_checkpoint_comes_back_and_inference_gets_whole_tensors(tmp_path: Path) -> None:
    seen: dict[str, Any] = run_ranks(2, states, str(tmp_path), fresh=True)[0]
    assert seen["names"][0] == seen["names"][1] and len(seen["equal"]) == len(seen["names"][0])
    assert all(seen["equal"]) and all(seen["exported"]) and seen["exported"]
    assert seen["kept"] == ["global_step_2"]
    assert seen["reference"] == pytest.approx(seen["before"], rel=1e-3)
    assert seen["before"] != seen["evaluated"]
    assert seen["evaluated again"] == pytest.approx(seen["evaluated"], rel=1e-6)
    for what in ("loss", "grad_norm", "lr"):
        expected = pytest.approx(column(seen["second"], what), rel=1e-6)
        assert column(seen["again"], what) == expected
    assert seen["merged"]["names"] == seen["names"][0]
    assert seen["merged"]["off"] < 1e-6 < seen["merged"]["moved"]


def test_the_engine_fits_verls_interface_and_refuses_what_it_does_not_read() -> None:
    seen = run_ranks(1, interface, fresh=True)[0]
    assert seen["registered"] == ["cpu", "cuda"]
    assert seen["unknown"] == [] and seen["composed"] == ["onefold SHARDED"] * 3
    for key, sentence in seen["refused"].items():
        assert key in sentence, (key, sentence)
    assert "names no stage" in seen["no recipe"] and "given twice" in seen["precision twice"]
    assert seen["computes"] == ["torch.bfloat16", "torch.float32", "None"]
