"""`benchmarks/axes`: every composition trains alike on both sides, and the page is the result's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.axes import __main__ as axes
from benchmarks.axes import model
from benchmarks.axes.settings import SIDES, Setting
from benchmarks.harness import Run
from fork_server import on_the_fork_server

from benchmarks import harness, launch


def made_up_run(side: str, number: int, seconds: float, peak: float) -> Run:
    rank = {"losses": [2.0], "step_s": [seconds], "peak_mib": peak, "sent_bytes": 600}
    return Run(side, number, "ok", [rank, {**rank, "peak_mib": peak - 1}])


def test_peaks_and_steps_are_set_beside_those_of_fsdp2() -> None:
    runs = [
        made_up_run("fsdp2", 1, 1.0, 100.0),
        made_up_run("onefold-3", 1, 0.5, 60.0),
        made_up_run("fsdp2", 2, 4.0, 100.0),
        made_up_run("onefold-3", 2, 2.0, 60.0),
    ]
    _, ours = axes.rows(Setting(steps=1), runs)
    assert (ours["ratio"], ours["peak_ratio"], ours["sent_bytes"]) == (0.5, 0.6, 600), ours


@pytest.mark.parametrize("cut", ["tp", "ep", "pp"])
def test_each_composition_trains_alike_and_sends_what_it_should(
    cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run_ranks", on_the_fork_server)
    asked = ["--tiny", "--axes", cut, "--sides", "fsdp2", "onefold-3", "--rounds", "1"]
    asked += ["--steps", "2", "--warmup", "2", "--name", "tiny", "--output", str(tmp_path)]
    assert axes.main(asked) == 0, (tmp_path / "tiny.md").read_text()
    document = json.loads((tmp_path / "tiny.json").read_text())
    theirs, ours = document["comparisons"][0]["rows"]
    assert ours["loss_difference"] < 1e-5, f"losses differ: {ours}"
    run = document["comparisons"][0]["runs"][1]
    losses = harness.losses(run["ranks"])
    assert len(set(losses)) == 4, f"nothing was learned from the batches: {losses}"
    if cut == "pp":  # each element is gathered and reduced once: both ranks send half of it
        ledger = sum(rank["ledger_bytes"] for rank in run["ranks"]) / 2  # of a step
        least = 2 * 4 * model.count_parameters("gpt-tiny")
        assert least <= ledger < 1.01 * least, f"a step sent {ledger} bytes, at least {least}"
    if sys.platform.startswith("linux"):
        assert theirs["sent_bytes"] > ours["sent_bytes"] >= ours["ledger_bytes"] > 0
    page = (tmp_path / "tiny.md").read_text()
    assert "| fsdp2 |" in page and "| onefold-3 |" in page


def test_the_whole_model_and_its_stages_have_the_same_weights() -> None:
    whole = dict(model.build("gpt-tiny").named_parameters())
    parts: dict[str, Any] = {}
    for blocks in ([0], [1]):
        parts.update(model.build("gpt-tiny", blocks).named_parameters())
    assert list(map(str, sorted(parts))) == sorted(whole)
    assert all(part.equal(whole[name]) for name, part in parts.items())
    drawn = [p.flatten()[0].item() for p in whole.values() if p.ndim > 1]
    assert len(set(drawn)) == len(drawn), "two weights were drawn alike"


def recorded() -> dict[str, Any]:
    path = harness.RESULTS / f"{axes.RESULTS}.json"
    if not path.exists():
        pytest.skip(f"{path.name} has not been measured: python -m benchmarks.axes")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_recorded_runs_give_the_recorded_rows_and_every_side_took_part() -> None:
    comparisons = recorded()["comparisons"]
    assert [c["setting"]["axes"] for c in comparisons] == ["tp", "ep", "pp"]
    for c in comparisons:
        assert axes.rows(Setting(**c["setting"]), list(map(Run.of, c["runs"]))) == c["rows"]
        assert [row["side"] for row in c["rows"]] == list(SIDES)
        assert all(row["loss_difference"] < 1e-4 for row in c["rows"]), c["rows"]


def test_a_section_takes_the_place_of_the_one_with_its_heading() -> None:
    text = f"# A\n\n{axes.HEADING}\n\nold\n\n| a |\n|---|\n\n## B\n\nb\n"
    assert (
        axes.replaced(text, f"{axes.HEADING}\n\nnew")
        == f"# A\n\n{axes.HEADING}\n\nnew\n\n## B\n\nb\n"
    )
    assert f"\n{axes.HEADING}\n" in axes.PAGE.read_text()


def test_the_page_says_what_was_recorded() -> None:
    text = axes.PAGE.read_text()
    assert axes.replaced(text, axes.section(recorded())) == text, (
        "run `python -m benchmarks.axes --page`"
    )
