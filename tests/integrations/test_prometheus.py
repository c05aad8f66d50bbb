"""What Prometheus is told of a run."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
import torch

pytest.importorskip("prometheus_client")
import onefold
from onefold.integrations.prometheus import serve
from onefold.observe.meter import Meter
from zoo import TinyGPT, tokens_of


def asked(port: int) -> dict[str, float]:
    """{series: value} of one request, as Prometheus makes it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    rows = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    return {series: float(value) for series, value in rows}


def test_the_newest_row_of_a_run_is_served(tmp_path: Path) -> None:
    exporter = serve(0, tmp_path)
    try:
        assert asked(exporter.port) == {}
        rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5, "held": {"now": {"a b": 7}}}]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "metrics.jsonl").write_text(text + '{"step": 3, "lo')
        labels = f'{{rank="0",run="{tmp_path}"}}'
        expected = {"onefold_step": 2.0, "onefold_loss": 2.5, "onefold_held_now_a_b": 7.0}
        assert asked(exporter.port) == {name + labels: n for name, n in expected.items()}
    finally:
        exporter.close()
    with pytest.raises(OSError):
        asked(exporter.port)


def test_rows_of_a_meter_are_served_by_rank() -> None:
    model = onefold.shard(TinyGPT(), onefold.Recipe.zero(3))
    optimizer = torch.optim.AdamW(model.parameters())
    meter, exporter = Meter(model, optimizer), serve(0)
    try:
        loss = model(tokens_of(0))
        loss.backward()
        optimizer.step()
        exporter.show(meter.step(loss=loss, tokens=24), rank=1)
        seen = asked(exporter.port)
        assert seen['onefold_loss{rank="1",run=""}'] == pytest.approx(loss.item())
        assert all('rank="1"' in series for series in seen) and len(seen) > 5
    finally:
        exporter.close()


def test_a_run_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no folder: give the --output of a run"):
        serve(0, tmp_path / "none")
