"""`benchmarks/checkpoint`: the smallest run measures everything, its figures add up, and nothing is
left behind.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from benchmarks.checkpoint import __main__ as checkpoint
from benchmarks.checkpoint import disk, report, rows
from benchmarks.checkpoint.settings import PEERS, WAYS, Turn, peers_turns
from benchmarks.harness import Run
from fork_server import on_the_fork_server

from benchmarks import probes
from ranks import run_ranks


def smallest(folder: Path, peer: str, *more: str) -> dict[str, Any]:
    """The document of a round of one peer that saves on one rank."""
    arguments = ["--peers", peer, "--ways", "--model", "gpt-tiny", "--tokens", "32", "--ranks", "1"]
    arguments += [
        "--rounds",
        "1",
        "--saves",
        "1",
        "--steps",
        "1",
        "--folder",
        str(folder),
        "--output",
        str(folder / "out"),
        "--name",
        peer,
    ]
    assert checkpoint.main([*arguments, *more], on_the_fork_server) == 0
    document: dict[str, Any] = json.loads((folder / "out" / f"{peer}.json").read_text())
    assert document["schema"] == checkpoint.SCHEMA and document["finished"] is True
    assert str(folder) not in document["command"] and "--folder PATH" in document["command"]
    assert [p.name for p in folder.iterdir()] == ["out"], "a folder of checkpoints was left behind"
    for row in document["behind"]:
        assert 0 < row["stall_s"] <= row["whole_s"], row
    for row in document["loads"]:
        assert row["loss_difference"] < 1e-5, f"trained on with other losses: {row}"
    return document


def test_the_smallest_run_measures_every_turn_and_what_was_loaded_trains_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = smallest(tmp_path, "onefold-3", "--behind", "2")
    assert [(r["peer"], r["ranks"]) for r in ours["saves"]] == [("onefold-3", 1), ("onefold-3", 2)]
    assert [(r["way"], r["count"]) for r in ours["behind"]] == [("default", 2)]
    assert [(r["saved"], r["ranks"]) for r in ours["loads"]] == [(1, 1), (1, 2), (2, 1)]
    for row in ours["loads"]:
        assert row["read_gb"] is None or row["read_gb"] < 1.7 * row["need_gb"], (
            f"read more than its part and the manifest: {row}"
        )
    peaks = [goal["met"] for goal in ours["goals"] if "host peak" in goal["what"]]
    assert peaks == [True] * sum(row["peak_mib"] is not None for row in ours["loads"]), ours[
        "goals"
    ]
    assert len(ours["goals"]) == 8 + len(peaks) + (ours["saves"][0]["direct_gb_s"] is not None)
    text = (tmp_path / "out" / "onefold-3.md").read_text()
    assert (
        "## Goals" in text
        and "1 -> 2" in text
        and "Not measured" not in text
        and text.splitlines()[0] in capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_peer_is_measured_in_each_of_its_ways_and_its_loads_are_proved_too(
    tmp_path: Path,
) -> None:
    theirs = smallest(tmp_path, "fsdp2", "--behind", "1", "--same-ranks")
    assert [(r["way"], r["count"]) for r in theirs["behind"]] == [("default", 1), ("kept", 1)]
    assert [(r["peer"], r["saved"], r["ranks"]) for r in theirs["loads"]] == [("fsdp2", 1, 1)]


def opened_each_way(folder: Path) -> dict[str, dict[str, Any]]:
    """Every way after another, in one process."""
    from benchmarks.checkpoint import pretrained

    nbytes = pretrained.write_folder(folder, "gpt-tiny")
    found = {
        way: pretrained.open_turn(Turn("pretrained", way, 1, 1), folder, folder) for way in WAYS
    }
    return {**found, "folder": {"bytes": nbytes}}


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the folder is transformers'"
)
def test_every_way_to_open_a_hugging_face_folder_gives_the_same_model(tmp_path: Path) -> None:
    (found,) = run_ranks(1, opened_each_way, tmp_path / "weights")
    nbytes = found.pop("folder")["bytes"]
    assert list(found) == list(WAYS)
    losses = {way: result["loss"] for way, result in found.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-5, losses
    runs = [
        Run(Turn("pretrained", way, 1, 1), 1, "ok", [{"rank": 0, **result}])
        for way, result in found.items()
    ]
    found_rows = rows.open_rows(runs, nbytes)
    assert [row["way"] for row in found_rows] == list(WAYS) and all(
        row["shard_mib"] == nbytes / 2**20 for row in found_rows
    )


def made_up_save(number: int, seconds: float, disk_s: float, flush: float = 0.0) -> dict[str, Any]:
    found = {"bytes": 500_000_000, "write_s": disk_s, "read_s": 1.0}
    if number == 0:
        found |= {"alone_bytes": 1_000_000_000, "alone_write_s": 4.0}
    return {
        "seconds": seconds,
        "flush_s": flush,
        "folder_bytes": 1_000_000_000,
        "peak_mib": 1.0,
        "disk": found,
    }


def test_a_rate_is_that_of_the_slowest_rank_beside_the_disk_of_the_same_moment() -> None:
    ranks = [
        {
            "behind": [],
            "saves": [made_up_save(0, 2.0, 1.6), made_up_save(1, 4.0, 4.0, flush=1.0)],
            "proof": [2.0, 1.0],
        },
        {
            "behind": [],
            "saves": [made_up_save(0, 1.0, 1.0), made_up_save(1, 3.0, 3.0)],
            "proof": [2.0, 1.0],
        },
    ]
    (row,) = rows.save_rows([Run(Turn("save", "onefold-3", 2, 2), 1, "ok", ranks)])
    assert (row["seconds"], row["on_disk_s"]) == (3.0, 3.5)
    assert row["rate"] == pytest.approx((1.6 / 2 + 4 / 5) / 2) and row["rate_low"] == pytest.approx(
        0.8
    )
    assert row["alone_rate"] == pytest.approx(4 / 2)
    (goal,) = rows.goals([row], [], [], ranks=2, cores=2)
    assert goal["met"] and goal["value"] == row["rate"]


def made_up_behind(number: int, stall: float, whole: float) -> dict[str, Any]:
    beside = [[stall, stall + 1.5], [stall + 1.5, stall + 2.5]]
    seconds = {"stall_s": stall, "whole_s": whole, "alone_s": [1.0, 1.0], "beside": beside}
    return {"way": "default", "number": number, **seconds, "copy_mib": 8.0}


def test_the_first_stall_stands_apart_and_a_save_costs_its_stall_and_the_delay_of_steps() -> None:
    saves = [made_up_behind(0, 0.5, 2.0), made_up_behind(1, 0.1, 2.5), made_up_behind(2, 0.1, 2.5)]
    theirs = [made_up_behind(number, 0.25, 5.0) for number in range(3)]
    runs = [
        Run(Turn("save", peer, 1, 1), 1, "ok", [{"behind": b, "saves": []}])
        for peer, b in (("onefold-1", saves), ("fsdp2", theirs))
    ]
    found = [
        {"peer": run.side.peer, **rows.behind([[save] for save in run.ranks[0]["behind"]])}
        for run in runs
    ]
    assert (found[0]["first_stall_s"], found[0]["stall_s"], found[0]["whole_s"]) == (0.5, 0.1, 2.5)
    assert found[0]["first_share"] == pytest.approx(0.25) and found[0][
        "stall_share"
    ] == pytest.approx(0.04)
    assert found[0]["lost_s"] == pytest.approx(0.1 + 0.5 + 0.0)
    met = {goal["what"]: goal["met"] for goal in rows.goals([], found, [], ranks=1, cores=2)}
    assert list(met.values()) == [False, True, False, True], met


def test_a_round_saves_once_on_each_size_and_loads_to_both_sides_where_the_peer_can() -> None:
    turns = [(t.kind, t.saved, t.ranks) for t in peers_turns("onefold-3", 2)]
    assert turns == [
        ("save", 2, 2),
        ("load", 2, 2),
        ("load", 2, 4),
        ("load", 2, 1),
        ("save", 4, 4),
        ("load", 4, 2),
    ]
    assert [(t.kind, t.saved, t.ranks) for t in peers_turns("deepspeed-3", 2)] == [
        ("save", 2, 2),
        ("load", 2, 2),
    ]


def test_a_turn_that_failed_is_named_and_the_others_keep_their_rows() -> None:
    def failing(module: str, job: dict[str, Any], ranks: int, **_: Any) -> dict[str, Any]:
        return {
            "status": "failed",
            "error": "rank 0 ended with status 1: ValueError: boom",
            "wall_s": 1.0,
        }

    with tempfile.TemporaryDirectory() as place:
        arguments = [
            "--peers",
            "onefold-3",
            "--ways",
            "--rounds",
            "1",
            "--folder",
            place,
            "--output",
            place,
        ]
        assert checkpoint.main([*arguments, f"--deepspeed-python={sys.executable}"], failing) == 1
        text = Path(place, "checkpoint.md").read_text()
        assert "onefold-3, round 1: failed: " in text and "boom" in text
        assert sys.executable not in Path(place, "checkpoint.json").read_text()


def test_the_disk_is_written_to_the_byte_and_known_by_its_file_system(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    assert disk.write(path, disk.CHUNK + 12_345) > 0
    assert disk.nbytes_of(tmp_path) == disk.CHUNK + 12_345
    disk.evict(tmp_path)
    before = probes.moved_bytes()
    assert disk.read(path) > 0
    if before:
        assert probes.moved_since(before)["read_calls"] >= disk.CHUNK + 12_345
    assert probes.file_system(tmp_path) in Path("/proc/self/mounts").read_text()
    disk.remove(path)
    assert disk.files(tmp_path) == []
    direct = disk.write_direct(path, disk.CHUNK + 12_345)
    assert direct is None or disk.nbytes_of(path) == disk.CHUNK + 12_345 // 4096 * 4096


def test_a_wrong_command_line_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.main(["--ranks", "0"]) == 2
    assert "--ranks" in capsys.readouterr().err
    assert checkpoint.main(["--deepspeed-python", "no-such-python"]) == 2
    assert "no-such-python" in capsys.readouterr().err
    assert set(PEERS) == {"onefold-3", "onefold-1", "fsdp2", "deepspeed-3", "deepspeed-1"}
    assert report.goals_table([]).count("\n") == 2
