"""Two real ranks: what they record on the wire is what the formula says, and their files make one
report.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import onefold
from onefold.observe import Meter, measured, reconciled, record, write_observed
from onefold.observe.trace import Recording
from ranks import run_ranks
from zoo import TinyMLP, features_of


@dataclass
class Seen:
    """What one rank tells the test."""

    wire: dict[str, int]
    by_unit: dict[str, dict[str, int]]
    sent: int
    row: dict[str, Any]
    numel: int
    turn: int
    units: list[str]
    moves: list[tuple[str, str]]
    exposed: float
    waits: float
    inside: bool
    links: dict[str, int]
    groups: set[str]


#: What a forward pass uses last, and what is around it: they stay gathered until the backward pass.
TURN = ("(root)", "blocks.3")


def rank_of_a_run(stage: int, folder: str) -> Seen:
    torch.manual_seed(0)
    model = onefold.shard(TinyMLP(width=64, depth=4), onefold.Recipe.zero(stage))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = onefold.engine_of(model)
    meter = Meter(model, optimizer)

    def step(seed: int) -> None:
        model(features_of(seed, 4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    meter.step()
    with record(model, optimizer, activations=True) as seen:
        step(1)
    row = meter.step()
    account = measured(model, optimizer, seen, ranks_per_node=1)
    machine = reconciled(model, account)
    write_observed(
        folder,
        engine.rank,
        engine.world_size,
        account,
        recipe=engine.recipe,
        step=seen,
        machine=machine,
    )
    seen.write_chrome(Path(folder) / f"trace-{engine.rank}.json")
    return Seen(
        seen.wire(), seen.by_unit(), row["wire_bytes"], row, sum(u.numel for u in engine.units),
        sum(u.numel for u in engine.units if u.name in TURN), [u.name for u in engine.units],
        [(m.move, m.unit) for m in seen.moves], seen.exposed, sum(m.exposed for m in seen.moves), within(seen), account.links,
        {m.group for m in seen.moves if m.move != "control"},
    )  # fmt: skip


def within(seen: Recording) -> bool:
    """Whether every move of the recording lies in its window, waits included."""
    return all(
        seen.start <= m.launched <= m.landed <= seen.end
        and m.exposed <= m.landed - m.launched + 1e-6
        for m in seen.moves
    )


def test_the_ranks_files_make_one_report(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    from onefold.observe.report import build

    run_ranks(2, rank_of_a_run, 3, str(tmp_path))
    report = build(tmp_path)
    assert set(report.missing) == {"loss", "throughput", "comparison"}, report.missing
    assert set(report.figures["memory"]) == set(report.figures["timeline"]) == {"0", "1"}
    traffic: Any = report.figures["traffic"]
    assert {trace["name"] for trace in traffic["data"]} == {"all-gather", "reduce-scatter"}
    names = {
        e["name"]
        for e in json.loads((tmp_path / "trace-1.json").read_text())["traceEvents"]
        if e["ph"] == "X"
    }
    assert {
        "all-gather blocks.0",
        "reduce-scatter blocks.0",
        "blocks.0 forward",
        "blocks.0 backward",
        "optimizer",
    } <= names
