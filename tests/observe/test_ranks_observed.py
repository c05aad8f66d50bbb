"""What two real ranks record makes one report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import onefold
from onefold.observe.runfile import write_observed
from onefold.observe.trace import measured, record
from ranks import run_ranks
from zoo import TinyMLP, features_of


def rank_of_a_run(folder: str) -> None:
    torch.manual_seed(0)
    model = onefold.shard(TinyMLP(width=64, depth=4), onefold.Recipe.zero(3))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = onefold.engine_of(model)

    def step(seed: int) -> None:
        model(features_of(seed, 4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    with record(model, optimizer, activations=True) as seen:
        step(1)
    for move in seen.moves:  # within the window, waits included
        assert seen.start <= move.launched <= move.landed <= seen.end
        assert move.exposed <= move.landed - move.launched + 1e-6
    account = measured(model, optimizer, seen)
    rank, world = engine.rank, engine.world_size
    facts = {"recipe": engine.recipe.describe()}
    write_observed(folder, rank, world, account, facts=facts, step=seen)


def test_the_ranks_files_make_one_report(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    from onefold.observe.report import sections

    run_ranks(2, rank_of_a_run, str(tmp_path))
    found = {title.split()[0]: section for title, section in sections(tmp_path).items()}
    assert list(found) == ["Run", "Memory", "Timeline", "MiB", "Parts", "Recipe"]
    traffic: Any = found["MiB"]
    assert {trace["name"] for trace in traffic["data"]} == {"all-gather", "reduce-scatter"}
    timeline: Any = found["Timeline"]
    names = {said.partition(",")[0] for bar in timeline["data"] for said in bar["hovertext"]}
    assert {"all-gather blocks.0", "reduce-scatter blocks.0"} <= names
