"""`benchmarks/whole`: who orthogonalizes what, and where a step's time goes; sharded Muon learns as in
one process; and the pages are the results'.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.harness import Run
from benchmarks.whole import __main__ as whole
from benchmarks.whole import learning
from benchmarks.whole.newton_schulz import Spent, in_fp32
from benchmarks.whole.settings import SIDES, Setting
from fork_server import on_the_fork_server
from torch.optim import _muon

from benchmarks import harness, launch

SERVER = "libraries"
COEFFICIENTS = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)


def made_up_run(side: str, number: int, seconds: float, share: float, sent: int) -> Run:
    rank = {
        "losses": [2.0],
        "step_s": [seconds],
        "newton_schulz_s": [share],
        "newton_schulz_calls": [3],
        "peak_mib": 100.0,
        "sent_bytes": sent,
    }
    return Run(side, number, "ok", [rank, {**rank, "newton_schulz_s": [0.0]}])


def test_the_share_of_newton_schulz_is_taken_off_before_a_step_is_compared_with_adamws() -> None:
    runs = [
        made_up_run("onefold-1-adamw", 1, 1.0, 0.0, 600),
        made_up_run("onefold-1-muon", 1, 3.0, 4.0, 900),  # 2 s a rank, of 3
        made_up_run("deepspeed-1-muon", 1, 3.0, 4.0, 900),
        made_up_run("onefold-1-adamw", 2, 2.0, 0.0, 600),
        made_up_run("onefold-1-muon", 2, 6.0, 4.0, 900),
    ]
    _, ours, theirs = whole.rows(Setting(steps=1), runs)
    assert (ours["ratio_low"], ours["ratio"], ours["ratio_high"]) == (1.0, 1.5, 2.0), ours
    assert (ours["newton_schulz_s"], ours["busiest_s"], ours["calls"]) == (2.0, 4.0, 6), ours
    assert (ours["rest_s"], ours["more_bytes"]) == (2.5, 300), ours
    assert theirs["ratio"] is None and theirs["more_bytes"] is None, "nothing to compare it with"


def test_newton_schulz_in_fp32_is_torchs_up_to_rounding() -> None:
    source = torch.Generator().manual_seed(0)
    for shape in ((24, 8), (8, 24), (16, 16)):
        matrix = torch.randn(shape, generator=source)
        theirs = _muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, _muon.EPS)
        ours = in_fp32(matrix, COEFFICIENTS, 5, _muon.EPS)
        assert (ours - theirs.float()).norm() < 0.02 * ours.norm(), shape
        once = in_fp32(matrix, COEFFICIENTS, 5, _muon.EPS, iterations=1)
        assert once.equal(in_fp32(matrix, COEFFICIENTS, 1, _muon.EPS)) and not once.equal(ours)


def test_calls_before_the_first_step_are_not_counted() -> None:
    spent = Spent()
    twice = spent.timed(lambda x: 2 * x)
    assert twice(1) == 2
    spent.step()
    assert twice(2) == 4 and twice(3) == 6
    spent.step()
    assert (spent.calls, len(spent.seconds)) == ([2, 0], 2)


def test_owners_orthogonalize_each_matrix_once_and_gathering_everywhere_on_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run_ranks", on_the_fork_server)
    asked = ["--model", "gpt-tiny", "--tokens", "32", "--ranks", "2", "--rounds", "1"]
    asked += ["--sides", "onefold-1-muon", "onefold-3-muon", "fsdp2-muon", "--iterations", "5"]
    asked += ["--name", "tiny", "--output", str(tmp_path)]
    assert whole.main(asked) == 0, (tmp_path / "tiny.md").read_text()
    found = json.loads((tmp_path / "tiny.json").read_text())["comparisons"][0]["rows"]
    rows = {row["side"]: row for row in found}
    calls = {side: row["calls"] for side, row in rows.items()}
    assert calls == {
        "onefold-1-muon": 8,  # two blocks of four matrices
        "onefold-3-muon": 8,
        "fsdp2-muon": 2 * 8,
    }
    for side in ("onefold-3-muon", "fsdp2-muon"):
        assert rows[side]["loss_difference"] < 1e-5, rows[side]


def test_two_ranks_learn_by_muon_as_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run_ranks", on_the_fork_server)
    asked = ["--cases", "scratch", "--model", "llama:tiny", "--steps", "6", "--seq", "32"]
    asked += ["--held-out", "4", "--every", "3", "--name", "tiny", "--output", str(tmp_path)]
    assert learning.main(asked) == 0, (tmp_path / "tiny.md").read_text()
    found = json.loads((tmp_path / "tiny.json").read_text())["cases"]["scratch"]
    alone, sharded, adamw = found["rows"]
    assert sharded["difference"] == 0.0, "another bit than one process has"
    assert adamw["difference"] > 1e-3, "AdamW has another curve"
    assert (alone["calls"], sharded["calls"], adamw["calls"]) == (14, 14, 0), "two blocks of seven"
    assert sharded["final"] < sharded["first"], sharded
    assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(launch, "run_ranks", None)  # all is kept, nothing is measured again
    assert learning.main([*asked, "--resume"]) == 0
    assert learning.main([*asked, "--resume", "--seq", "16"]) == 2, "another case"


def test_a_curve_that_is_another_one_fails_the_command(tmp_path: Path) -> None:
    def told(side: str, loss: float) -> Run:
        rank = {"losses": [loss], "held_out": [[0, 2.0], [1, loss]], "step_s": [0.1]}
        return Run(side, 1, "ok", [rank | {"newton_schulz_s": [0.0], "newton_schulz_calls": [0]}])

    parser = learning.main.parser()  # type: ignore[attr-defined]
    options = harness.parsed(parser, ["--output", str(tmp_path)])
    options.rounds = 1
    case = learning.CASES["scratch"]
    study = learning.Learning(options, [case], list(learning.SIDES))
    study.asked[0].runs = [told("alone", 1.0), told("sharded", 1.0), told("adamw", 0.5)]
    assert not study.failed
    study.asked[0].runs[1] = told("sharded", 1 + 2 * case.limit)
    assert study.failed


def recorded(name: str, command: str) -> dict[str, Any]:
    path = harness.RESULTS / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{path.name} has not been measured: {command}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_recorded_runs_give_the_recorded_rows_and_every_side_took_part() -> None:
    comparisons = recorded(whole.RESULTS, "python -m benchmarks.whole")["comparisons"]
    assert [c["setting"]["ranks"] for c in comparisons] == [2, 4]
    for c in comparisons:
        assert whole.rows(Setting(**c["setting"]), list(map(Run.of, c["runs"]))) == c["rows"]
        assert [row["side"] for row in c["rows"]] == list(SIDES)
        apart = [row["loss_difference"] for row in c["rows"] if row["side"].endswith("muon")]
        assert max(apart) < 1e-4, c["rows"]


def test_the_page_of_figures_says_what_was_recorded() -> None:
    result = recorded(whole.RESULTS, "python -m benchmarks.whole")
    text = whole.PAGE.read_text()
    assert whole.replaced(text, whole.section(result)) == text, (
        "run `python -m benchmarks.whole --page`"
    )


def test_the_page_of_curves_says_what_was_recorded() -> None:
    result = recorded(learning.RESULTS, "python -m benchmarks.whole.learning")
    text = learning.PAGE.read_text()
    assert whole.replaced(text, learning.section(result), learning.HEADING) == text, (
        "run `python -m benchmarks.whole.learning --page`"
    )


def test_a_section_takes_its_place_or_stands_at_the_end() -> None:
    heading = whole.HEADING
    assert whole.replaced("# A\n\na\n", f"{heading}\n\nnew") == f"# A\n\na\n\n{heading}\n\nnew\n"
    last, behind = f"# A\n\n{heading}\n\nold\n", "## B\n\nb\n"
    assert whole.replaced(last, f"{heading}\n\nnew") == f"# A\n\n{heading}\n\nnew\n"
    found = whole.replaced(f"{last}\n{behind}", f"{heading}\n\nnew")
    assert found == f"# A\n\n{heading}\n\nnew\n\n{behind}"
