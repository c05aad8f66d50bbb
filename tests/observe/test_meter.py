"""A row of figures a step: plain numbers, exact where they are counts, ready for TensorBoard."""

from __future__ import annotations

import json

import pytest
from observed_loops import one_step, sharded
from torch import nn

import onefold
from onefold.comm import TrafficEvent
from onefold.observe.meter import Meter

KEYS = {
    "step", "lr", "tokens", "tokens_per_s", "mfu", "step_ms", "exposed_ms", "io_ms", "wire_bytes", "wire_bytes_between", "wire_bytes_plain",
    "memory", "host", "nvme", "moved_bytes",
}  # fmt: skip


def test_a_row_holds_every_figure_as_a_plain_number() -> None:
    model, optimizer = sharded(3, "bf16")
    meter = Meter(model, optimizer, flops_per_token=2e5, peak_flops=1e12)
    one_step(model, optimizer)
    row = meter.step(tokens=24)
    assert set(row) == KEYS
    assert row["lr"] == 1e-3 and row["host"] == row["nvme"] == row["io_ms"] == 0
    assert row["tokens_per_s"] == pytest.approx(24 / (row["step_ms"] / 1000))
    assert row["mfu"] == pytest.approx(row["tokens_per_s"] * 2e5 / 1e12)
    assert json.loads(json.dumps(row)) == row


def test_bytes_and_waits_are_those_of_the_step() -> None:
    model, optimizer = sharded()
    meter, traffic = Meter(model, optimizer), onefold.engine_of(model).traffic
    event = traffic.record(TrafficEvent("all-gather", "blocks.0", 1000, 4, "float32", "forward", 0))
    traffic.waited(event, since=event.launched - 0.25)
    first = meter.step()
    traffic.record(TrafficEvent("reduce-scatter", "blocks.0", 500))
    second, third = meter.step(), meter.step()
    assert [row["wire_bytes"] for row in (first, second, third)] == [1000, 500, 0]
    assert first["exposed_ms"] >= 250 and second["exposed_ms"] == third["exposed_ms"] == 0


def test_a_model_that_is_not_sharded_is_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="not sharded"):
        Meter(nn.Linear(2, 2), sharded()[1])
