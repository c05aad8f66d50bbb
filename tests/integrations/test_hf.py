"""onefold.hf besides its losses: what it takes and refuses, what it overrides, what it writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ranks import run_ranks

pytest.importorskip("accelerate")
sys.path.append(str(Path(__file__).parent))
from hf_checks import alone, around
from hf_trials import quantized


def test_what_it_takes_and_what_it_refuses(tmp_path: Path) -> None:
    """One rank; what is wrong is a sentence of the list that comes back."""
    assert run_ranks(1, alone, str(tmp_path), server="libraries") == [[]]


def test_evaluation_saving_figures_and_compiled_blocks(tmp_path: Path) -> None:
    assert run_ranks(2, around, str(tmp_path), server="libraries") == [[], []]


def test_a_frozen_base_is_held_quantized(tmp_path: Path) -> None:
    seen = run_ranks(2, quantized, str(tmp_path), server="libraries")[0]
    plain = seen["None"]
    for codec, most in (("int8", 0.02), ("nf4", 0.1)):
        ours = seen[codec]
        assert ours["encoded"] and not plain["encoded"]
        assert ours["memory"] < plain["memory"], codec
        assert ours["loss"] == pytest.approx(plain["loss"], abs=most)
        assert ours["loss"] != plain["loss"]
        saved = load_file(tmp_path / codec / "checkpoint-4" / "adapter_model.safetensors")
        assert all("lora" in name for name in saved) and saved.keys() == seen[codec]["adapters"]
