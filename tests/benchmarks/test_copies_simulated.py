"""benchmarks/copies.py: the rows differ as their names say."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks import copies
from onefold.plan import shapes

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.fixture
def short() -> Iterator[shapes.ModelShape]:
    """GPT-2 with two of its twelve blocks."""
    whole = shapes.find("gpt2")
    row = replace(whole, name="gpt2-short", dims=replace(whole.dims, layers=2))
    with patch.dict(shapes.ARCHITECTURES, {row.name: row}):  # type: ignore[arg-type]
        yield shapes.architecture(row.name)


def test_the_timeline_shows_what_copies_of_gradients_add_to_a_step(
    tmp_path: Path, short: shapes.ModelShape
) -> None:
    command = [
        "--cases",
        "gpt2-short:2:2",
        "--tokens",
        "64",
        "--link",
        "5",
        "--output",
        str(tmp_path),
    ]
    assert copies.main(command) == 0
    found = json.loads((tmp_path / "copies.json").read_text())["rows"]
    then, now = found
    assert (then["row"], now["row"]) == ("before", "now")
    gradients = 4 * short.numel / 2  # bytes of a rank's
    # Both micro-batches come down; the host adds the second one, which it reads twice and writes
    assert then["down_s"] == pytest.approx(2 * gradients / 5e9, rel=0.01)
    assert now["down_s"] == pytest.approx(then["down_s"], rel=0.01)
    assert then["adds_s"] == pytest.approx(3 * gradients / (110e9 / 2), rel=0.02)
    assert now["adds_s"] == 0.0
    assert then["update_s"] == pytest.approx(now["update_s"])
