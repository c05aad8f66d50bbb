"""The chapters of the first hour of `benchmarks/gpu.py`: each row has its tiny counterpart on a CPU,
says what was expected, and says so where it needs several GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.on_gpu import first
from benchmarks.peers import launch
from test_gpu_benchmark import options_of, tiny

from benchmarks import gpu
from onefold.plan import hardware


@pytest.mark.slow
@pytest.mark.parametrize("chapter", first.CHAPTERS)
def test_every_row_of_the_first_hour_has_its_tiny_counterpart(chapter: str, tmp_path: Path) -> None:
    (table,) = tiny(tmp_path, "--only", chapter)["tables"]
    rows: list[list[str]] = table["rows"]
    at = {name: number for number, name in enumerate(table["columns"])}
    if chapter == "block":
        assert [row[at["tokens"]] for row in rows] == ["16", "32"]
        assert all(float(row[at["step ms"]]) > 0 and float(row[at["waits ms"]]) > 0 for row in rows)
    elif chapter == "exchange":
        assert [row[1] for row in rows] == ["all-to-all and sum", "reduce-scatter"] * 2
        assert all(float(row[at[n]]) > 0 for row in rows for n in ("alone ms", "both ms"))
    elif chapter == "copies":
        assert [row[0] for row in rows] == ["1", "4"] and all(float(row[1]) > 0 for row in rows)
    elif chapter == "communicators":
        assert [row[0] for row in rows] == ["nothing", *first.expected_memory(machine(2))]
        assert all(float(row[at["driver MiB"]].replace(",", "")) > 0 for row in rows)
    elif chapter == "lost":
        assert [row[0] for row in rows] == ["killed", "stopped"]
        for row, least, most in zip(
            rows, (0.0, first.TINY_PATIENCE - 0.5), (5.0, 15.0), strict=True
        ):
            assert row[at["error"]] == "StallError", row
            assert least <= float(row[at["told after s"]]) < most, row
            assert "rank 0" in row[at["text"]] and row[at["expected"]].endswith("and a step"), row
    elif chapter == "compile":
        assert [row[0] for row in rows] == ["eager", "inductor"]
        assert float(rows[1][at["loss difference"]]) < 1e-2 and float(rows[1][at["step ms"]]) > 0
    else:
        assert [row[0] for row in rows] == ["ordered", "native"] and rows[1][1] == "gloo has none"
        assert float(rows[0][at["step ms"]]) > 0


def machine(ranks: int) -> Any:
    return hardware.machine(ranks, ranks, "h100-80")


def test_the_first_hour_stands_before_the_comparisons_in_its_order() -> None:
    assert gpu.USUAL[:8] == ("check", *first.CHAPTERS) and "ranks" in gpu.USUAL[8:]
    assert list(first.CHAPTER) == list(first.CHAPTERS)


def test_what_is_expected_of_a_block_is_what_its_bytes_take() -> None:
    """Of Llama 3 8B on eight H100, by hand: 218.1M parameters, 436 MB in 16 bits."""
    numel = first.numel_of(first.LLAMA_8B)
    assert numel == 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 == 218_103_808
    wanted = first.expected_step(machine(8), first.LLAMA_8B, 8192)
    ring = 2 * numel * 7 / 8 / (450e9 * 0.8) + 7 * 7e-6  # of the plan's links and hops
    exchange = 2 * numel * 7 / 8 / (450e9 * 0.8) + 7e-6
    added = first.expected_reduction(machine(8), 2 * numel, "ordered") - exchange
    assert 1e-4 < added < 4e-4  # (436 MB + 4 bytes a sum) of memory
    assert wanted["comm_s"] == pytest.approx(7 * ring + 4 * (exchange + added))
    assert wanted["exposed_s"] == pytest.approx(ring)  # 8,192 tokens hide the rest
    short = first.expected_step(machine(8), first.LLAMA_8B, 256)
    assert short["exposed_s"] > 5 * ring
    alone = first.expected_step(machine(1), first.LLAMA_8B, 2048)
    assert alone["comm_s"] == alone["exposed_s"] == 0.0 < alone["compute_s"]


def test_growth_is_told_beside_what_torchs_allocator_has() -> None:
    rows = [
        {"driver_mib": 500.0, "reserved_mib": 0.0},
        {"driver_mib": 1200.0, "reserved_mib": 100.0},
        {"driver_mib": 1900.0, "reserved_mib": 600.0},
        {"driver_mib": None, "reserved_mib": None},
    ]
    assert first.growth(rows) == [None, 600.0, 200.0, None]
    assert first.growth(rows[:1]) == [None]


def test_rows_that_need_several_gpus_say_so_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    rank = {
        "backend": "gloo", "step_s": 0.1, "trace": None, "waits_s": 0.0, "victim": False, "seconds": 0.4, "kind": "StallError",
        "text": "rank 0 waited", "rows": [{"after": "the context", "reserved_mib": 2.0, "driver_mib": 600.0}],
    }  # fmt: skip
    started: list[int] = []

    def run_ranks(module: str, job: dict[str, Any], ranks: int, **how: Any) -> dict[str, Any]:
        started.append(ranks)
        last = [rank | {"victim": True}] if ranks > 1 else []
        return {"status": "ok", "ranks": [rank, *last], "wall_s": 1.0}

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    options = options_of("--device", "cuda")
    for chapter in ("block", "exchange", "communicators", "lost", "sums"):
        table, outcomes = first.CHAPTER[chapter](options)
        said = [row for row in table.rows if first.SEVERAL in row]
        assert said and all(len(row) == len(table.columns) for row in table.rows), table.rows
        assert all(outcome["status"] == "ok" for outcome in outcomes)
        # Two ranks share the GPU over gloo to lose one another; the others run alone or not at all
        assert set(started) <= ({2} if chapter == "lost" else {1}), chapter
        started.clear()


def test_a_peer_that_is_lost_without_our_own_words_fails_the_chapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = {"victim": False, "kind": "", "text": "the watchdog ended this process", "ended": -6}

    def run_ranks(module: str, job: dict[str, Any], ranks: int, **how: Any) -> dict[str, Any]:
        return {"status": "ok", "ranks": [silent, {"victim": True}], "wall_s": 1.0}

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    options = options_of("--device", "cpu")
    options.tiny = True
    table, outcomes = first.lost(options)
    assert [row[2] for row in table.rows] == ["never", "never"]
    assert all("watchdog" in outcome["error"] for outcome in outcomes)
    assert [outcome["status"] for outcome in outcomes] == ["failed", "failed"]
