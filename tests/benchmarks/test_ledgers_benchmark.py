"""`benchmarks/ledgers.py` and `benchmarks/simulate.py`: what they measure is what they say, in
their smallest runs.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import onefold
from benchmarks import ledgers, simulate
from models import TinyGPT, tokens_of
from ranks import run_ranks


def measured(module: str, job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = importlib.import_module(module).measure(job)
    return found


def on_the_fork_server(module: str, job: dict[str, Any], ranks: int, **_: Any) -> dict[str, Any]:
    """In place of `launch.run_ranks`: the same worker, in ranks that need not import torch
    again.
    """
    return {"status": "ok", "ranks": run_ranks(ranks, measured, module, job)}


def test_the_smallest_run_measures_both_ways_and_counts_the_entries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        ledgers.main(
            ["--models", "gpt-tiny", "--pairs", "2", "--output", str(tmp_path)], on_the_fork_server
        )
        == 0
    )
    found = json.loads((tmp_path / "ledgers.json").read_text())
    (row,) = found["rows"]
    assert found["schema"] == ledgers.SCHEMA and {
        name: len(seen) for name, seen in row["steps_s"].items()
    } == {"with": 2, "without": 2}
    # The root and two blocks: each is gathered twice, the root once, and each reduced; every move
    # is entered and waited for
    units = 3
    assert row["entries"] > 2 * (2 * units - 1 + units), row
    assert row["entries_s"] > 0 and row["share"] == row["entries_s"] / row["without_s"]
    assert "gpt-tiny, 32 tokens a rank  " in capsys.readouterr().out


def test_without_entries_a_step_is_the_same_and_the_ledgers_stand_still() -> None:
    def losses(skipped: bool) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = onefold.shard(TinyGPT(), onefold.Recipe.zero(3, precision="bf16"))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ledger, out = onefold.engine_of(model).memory, []
        for step in range(4):
            entered = dict(ledger._units)
            with ledgers.replaced(
                ledgers.nothing if skipped and step % 2 else lambda *found: found[2]
            ):
                loss = model(tokens_of(step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert not (skipped and step % 2) or dict(ledger._units) == entered
            out.append(loss.item())
        return out, ledger.now()

    skipped, kept = losses(True), losses(False)
    assert skipped == kept


def test_an_answer_is_timed_with_the_memory_it_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "plan --params 2e7 --gpus 4 --stage 3 --offload none --simulate --json"
    questions = [
        simulate.Question("small", asked, 60.0, 4 << 30),
        simulate.Question("too small a goal", asked, 60.0, 1.0),
    ]
    real, answers = simulate.ask, dict[str, dict[str, Any]]()

    def once(question: simulate.Question) -> dict[str, Any]:
        """The second question is the first one with another goal."""
        if question.arguments not in answers:
            answers[question.arguments] = real(question)
        return answers[question.arguments]

    monkeypatch.setattr(simulate, "ask", once)
    assert simulate.main(["--rounds", "1", "--output", str(tmp_path)], questions) == 1
    rows = json.loads((tmp_path / "simulate.json").read_text())["rows"]
    assert [row["met"] for row in rows] == [True, False]
    (run,) = rows[0]["runs"]
    assert (
        run["exact"]
        and run["events"] > 0
        and run["parameters"] == 20_000_000
        and run["seconds"] >= run["processor_s"] / 2 > 0
    )
    assert 50 << 20 < rows[0]["largest_bytes"] < 4 << 30
    assert "small: " in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="ended with status 2"):
        real(simulate.Question("wrong", "plan no-such-model --json", 1.0))
