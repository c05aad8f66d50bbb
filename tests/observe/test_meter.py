"""A row of figures a step: plain numbers, exact where they are counts, ready for TensorBoard."""

from __future__ import annotations

import json

import pytest
import torch
from observed_loops import one_step, sharded
from torch import nn

import onefold
from onefold.comm import TrafficEvent
from onefold.observe import Meter

KEYS = {
    "step", "loss", "grad_norm", "lr", "scale", "skipped", "tokens", "tokens_per_s", "mfu", "step_ms", "exposed_ms", "wire_bytes", "memory",
    "host", "nvme", "moved_bytes", "io_ms",
}  # fmt: skip


def test_a_row_holds_every_figure_as_a_plain_number() -> None:
    model, optimizer = sharded(3, "bf16")
    meter = Meter(model, optimizer, flops_per_token=2e5, peak_flops=1e12)
    loss, norm = one_step(model, optimizer)
    row = meter.step(loss=loss, tokens=24, grad_norm=norm)
    assert set(row) == KEYS
    assert (row["loss"], row["grad_norm"]) == (loss.item(), norm.item())
    assert (
        row["lr"] == 1e-3
        and row["scale"] is None
        and row["skipped"] == 0
        and row["host"] == row["nvme"] == row["io_ms"] == 0
    )
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


def test_a_step_after_which_the_scale_fell_was_skipped() -> None:
    model, optimizer = sharded()
    meter, scaler = Meter(model, optimizer), onefold.GradScaler(model, init_scale=1024.0)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    rows = [meter.step(scaler=scaler)]
    for scale in (512.0, 512.0, 1024.0, 256.0):
        scaler._scale.fill_(scale)
        rows.append(meter.step(scaler=scaler))
    assert [row["scale"] for row in rows] == [1024, 512, 512, 1024, 256]
    assert [row["skipped"] for row in rows] == [0, 1, 1, 1, 2]


def test_what_cannot_be_measured_is_refused_with_a_sentence() -> None:
    model, optimizer = sharded()
    with pytest.raises(ValueError, match="not sharded"):
        Meter(nn.Linear(2, 2), optimizer)
    with pytest.raises(ValueError, match="peak_flops=0: expected a number above 0"):
        Meter(model, optimizer, flops_per_token=1.0, peak_flops=0)
    with pytest.raises(ValueError, match=r"loss has shape \(2,\): expected one number"):
        Meter(model, optimizer).step(loss=torch.zeros(2))
