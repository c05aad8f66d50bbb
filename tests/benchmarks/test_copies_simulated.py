"""benchmarks/copies.py: the rows differ as their names say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import copies

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def test_the_timeline_shows_what_copies_of_gradients_add_to_a_step(tmp_path: Path) -> None:
    command = ["--cases", "gpt2:2:2", "--tokens", "64", "--link", "5", "--output", str(tmp_path)]
    assert copies.main(command) == 0
    found = json.loads((tmp_path / "copies.json").read_text())["rows"]
    then, now = found
    assert (then["row"], now["row"]) == ("before", "now")
    gradients = 4 * 124_439_808 / 2  # bytes of a rank's
    # Both micro-batches come down; the host adds the second one, which it reads twice and writes
    assert then["down_s"] == pytest.approx(2 * gradients / 5e9, rel=0.01)
    assert now["down_s"] == pytest.approx(then["down_s"], rel=0.01)
    assert then["adds_s"] == pytest.approx(3 * gradients / (110e9 / 2), rel=0.02)
    assert now["adds_s"] == 0.0
    assert then["update_s"] == pytest.approx(now["update_s"])
