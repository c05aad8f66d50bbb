"""`benchmarks/gpu.py`: every row of a run on GPUs has its tiny counterpart on a CPU, and what was
measured is written at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
from benchmarks.offload.sides import PLAIN, SIDES
from benchmarks.on_gpu import chapters, turns_worker
from benchmarks.on_gpu.comparison import GOAL, Comparison, compared
from benchmarks.on_gpu.comparison import rows as rows_of
from benchmarks.on_gpu.comparison import table as table_of
from benchmarks.on_gpu.turns import SCHEMA, Report, take_turns
from benchmarks.peers.settings import PEERS, Setting

from benchmarks import gpu, harness, launch
from ranks import absolute_path


def options_of(*arguments: str) -> Any:
    return harness.parsed(gpu.main.parser(), arguments)


def tiny(output: Path, *arguments: str) -> dict[str, Any]:
    """What `python benchmarks/gpu.py --tiny` wrote."""
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--output", str(output), *arguments]
    environment = {**os.environ, "PYTHONPATH": absolute_path(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((output / "gpu.json").read_text())
    assert found["schema"] == SCHEMA and found["finished"] is True
    return found


@pytest.mark.slow
@pytest.mark.parametrize("chapter", [c for c in gpu.USUAL if c not in chapters.CHAPTERS])
def test_every_row_of_the_usual_run_has_its_tiny_counterpart(chapter: str, tmp_path: Path) -> None:
    found = tiny(tmp_path, "--only", chapter)
    text = (tmp_path / "gpu.md").read_text()
    assert found["tables"] and all(f"## {table['title']}" in text for table in found["tables"])
    if chapter in ("check", "codecs"):
        assert len(found["tables"][0]["rows"]) >= 10
        return
    monkey = options_of("--model", "gpt-tiny", "--smaller", "gpt-110m", "--device", "cpu")
    monkey.tiny = True
    expected = compared(monkey)[chapter]
    sides = {side for comparison in expected for side in comparison.sides}
    assert {row[0] for table in found["tables"] for row in table["rows"]} == sides
    deepspeed = launch.interpreter_has(sys.executable, "deepspeed")
    for table in found["tables"]:
        for row in table["rows"]:
            if row[0].startswith("deepspeed") and not deepspeed:
                assert row[1] == "not installed", row
                continue
            step, slower, rate, *_, difference, rounds = row[1:]
            assert (
                float(step) > 0
                and float(slower.rstrip("!")) > 0
                and float(rate.replace(",", "")) > 0
                and int(rounds) == 1
            ), row
            assert float(difference) < (2e-2 if "codecs" in row[0] else 1e-2), (
                f"{table['title']}: {row}"
            )


def test_every_side_can_be_built_and_several_gpus_have_every_chapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    found = compared(options_of())
    sides = {side for part in found.values() for comparison in part for side in comparison.sides}
    assert sides <= {*PEERS, *SIDES, *PLAIN, *turns_worker.FURTHER}
    assert {
        "ddp",
        "plain",
        "fsdp2",
        "deepspeed-2",
        "deepspeed-2-cpu",
        "onefold-3-tiles",
        "onefold-3-activations",
    } <= sides
    assert [c.setting.ranks for c in found["ranks"]] == [8, 8, 8] and [
        c.setting.ranks for c in found["fp32"]
    ] == [8, 1]
    assert [(c.setting.precision, c.setting.model) for c in found["step"]] == [
        ("bf16", "gpt-1b"),
        ("bf16", "gpt-110m"),
        ("fp32", "gpt-110m"),
    ]
    assert all(c.goal == GOAL for c in found["step"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    alone = compared(options_of())
    assert not alone["ranks"] and [c.setting.ranks for c in alone["fp32"]] == [1]
    assert gpu.USUAL[0] == "check" and set(found) < set(gpu.CHAPTERS)


def turn(
    side: str, number: int, seconds: list[float], peak: float | None = 100.0
) -> dict[str, Any]:
    return {
        "side": side, "round": number, "status": "ok", "step_s": seconds, "peak_mib": peak, "rest_mib": 50.0, "losses": [2.0, 1.0],
        "backend": "none",
    }  # fmt: skip


def test_a_row_is_the_median_of_its_turns_and_a_ratio_that_of_its_rounds() -> None:
    turns = [
        turn("plain", 0, [0.1, 0.1, 0.5]),
        turn("onefold-3", 0, [0.11, 0.11, 0.1]),
        turn("onefold-3", 1, [0.3]),
        turn("plain", 1, [0.2]),
    ]
    turns += [{"side": "fsdp2", "round": 0, "status": "failed", "error": "out of memory"}]
    comparison = Comparison(
        "t",
        Setting(model="gpt-tiny", tokens=64, ranks=1),
        ("plain", "fsdp2", "onefold-3", "deepspeed-1"),
        "plain",
        1.02,
    )
    plain, fsdp2, ours, _ = rows_of(comparison, turns, ["deepspeed-1"])
    assert plain["step_s"] == pytest.approx(0.15) and plain["rounds"] == 2
    assert ours["ratio"] == pytest.approx((0.11 / 0.1 + 0.3 / 0.2) / 2)
    assert (fsdp2["status"], fsdp2["ratio"]) == ("failed", None)
    rows = table_of(comparison, turns, ["deepspeed-1"]).rows
    assert [row[:3] for row in rows] == [
        ["plain", "150.0", "1.000"], ["fsdp2", "failed", "–"], ["onefold-3", "110.0", "1.300!"], ["deepspeed-1", "not installed", "–"],
    ]  # fmt: skip
    assert rows[2][5] == "1.000" and table_of(comparison, [], []).rows[0][1] == "not reached"


def test_a_side_that_ends_its_process_loses_its_own_turns_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And after every turn the files hold what is known by then."""
    options = options_of("--device", "cpu", "--output", str(tmp_path), "--rounds", "1")
    comparison = Comparison(
        "t", Setting(model="gpt-tiny", tokens=64, ranks=1), ("plain", "fsdp2", "onefold-3"), "plain"
    )
    asked: list[list[str]] = []

    def run_ranks(module: str, job: dict[str, Any], ranks: int, **how: Any) -> dict[str, Any]:
        asked.append(job["sides"])
        for side in job["sides"]:
            if side == "fsdp2":
                return {"status": "failed", "error": "rank 0 ended with status -9", "wall_s": 1.0}
            with Path(job["lines"]).open("a") as lines:
                lines.write(json.dumps(turn(side, 0, [0.1])) + "\n" + '{"side": "half a li')
        return {"status": "ok", "ranks": [], "wall_s": 1.0}

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    report = Report(options)
    take_turns(comparison, options, report, "t")
    assert asked == [["plain", "fsdp2", "onefold-3"], ["onefold-3"]]
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [(run["peer"], run["status"]) for run in written["runs"]["t"]] == [
        ("plain", "ok"),
        ("fsdp2", "failed"),
        ("onefold-3", "ok"),
    ]
    assert [row[1] for row in written["tables"][0]["rows"]] == [
        "100.0",
        "failed",
        "100.0",
    ] and written["finished"] is False
    assert "| fsdp2 | failed |" in (tmp_path / "gpu.md").read_text()


def test_no_turn_begins_once_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run_ranks", lambda *_, **__: pytest.fail("a turn began"))
    options = options_of("--device", "cpu", "--output", str(tmp_path), "--seconds", "0")
    report = Report(options)
    take_turns(compared(options)["memory"][0], options, report, "memory 0")
    assert all(row[1] == "not reached" for row in report.tables["memory 0"].rows)


def test_the_chapter_of_the_check_fails_where_a_check_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of("--device", "cpu", "--output", str(tmp_path))
    for status, expected in (("ok", "ok"), ("left out", "ok"), ("wrong", "failed")):
        rows = [{"name": "stages", "status": status, "seconds": 1.0, "said": "as it is"}]

        def run(command: list[str], rows: Any = rows, **how: Any) -> Any:
            assert "--quick" in command  # the chapters are this benchmark's own
            Path(command[-1]).write_text(json.dumps({"checks": rows}))
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(subprocess, "run", run)
        table, (outcome,) = chapters.check(options)
        assert (
            table.rows == [["stages", status, "1.0", "as it is"]] and outcome["status"] == expected
        )
