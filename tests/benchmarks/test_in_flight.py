"""benchmarks/in_flight.py: the rows differ as their names say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import in_flight
from onefold.plan import replay
from onefold.runtime import schedule

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def test_the_timeline_shows_what_a_bound_in_bytes_and_a_stream_for_sums_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = 2 * 7_087_872  # bytes of one of GPT-2 in bf16
    for module in (schedule, replay):
        monkeypatch.setattr(module, "LARGE_TRAFFIC", 3 * block)
    command = ["--models", "gpt2", "--tokens", "64", "--output", str(tmp_path)]
    assert in_flight.main(command) == 0
    found = json.loads((tmp_path / "in_flight.json").read_text())["rows"]
    rows = {row["row"]: row for row in found}
    assert list(rows) == list(in_flight.ROWS)
    for bounded, unbounded in (("bytes", "counts"), ("both", "beside")):
        saved = rows[unbounded]["reduction_bytes"] - rows[bounded]["reduction_bytes"]
        assert saved >= 2 * block, (bounded, saved)  # what a block sends and receives
    for beside, in_turn in (("beside", "counts"), ("both", "bytes")):
        assert rows[beside]["engine_s"] < rows[in_turn]["engine_s"]
