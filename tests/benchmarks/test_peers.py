"""`benchmarks/peers` and `benchmarks/gpu.py`: the smallest configuration runs, agrees and leaves
nothing behind.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fork_server import on_the_fork_server

ROOT = Path(__file__).parents[2]
from benchmarks.harness import Run
from benchmarks.peers import __main__ as peers
from benchmarks.peers import model
from benchmarks.peers.settings import PEERS, Setting, matrix
from benchmarks.study import take_over
from benchmarks.worker import overlap

from benchmarks import harness, launch, pages, probes

PATIENT = argparse.Namespace(timeout=600.0, deepspeed_python=sys.executable)
TINY = Setting(model="gpt-tiny", tokens=32, warmup=1, steps=2)


def command(*arguments: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run a command of the repository in its root."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def folders_of_runs() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("ranks-")}


def made_up_run(peer: str, number: int, seconds: float, loss: float = 2.0) -> Run:
    """A run of two ranks, two steps after one of warm-up; the second rank is a tenth slower."""
    ranks: list[dict[str, Any]] = [
        {
            "rank": rank,
            "losses": [loss, loss, loss],
            "step_s": [seconds * (1 + rank / 10)] * 2,
            "cpu_s": 2 * seconds,
            "build_s": 0.1,
            "baseline_mib": 100.0,
            "set_up_peak_mib": 10.0,
            "peak_mib": 20.0 + rank,
            "peak_is_of_timed_steps": True,
            "rest_mib": 5.0,
            "sent_bytes": 2_000,
            "ledger_bytes": None,
            "loopback_bytes": 5_000,
        }
        for rank in range(2)
    ]
    return Run(peer, number, "ok", ranks)


def test_a_ratio_is_taken_within_a_round_so_that_drift_cancels() -> None:
    runs = [
        made_up_run("ddp", 1, 1.0),
        made_up_run("fsdp2", 1, 1.5),
        made_up_run("ddp", 2, 10.0),
        made_up_run("fsdp2", 2, 15.0, loss=2.002),
    ]
    reference, row = peers.rows(TINY, runs, missing=["deepspeed-1"])[:2]
    assert reference["ratio"] == 1.0
    assert row["ratio"] == pytest.approx(1.5)
    assert row["step_s"] == pytest.approx((1.65 + 16.5) / 2), (
        "a step lasts until its slowest rank is done"
    )
    assert row["peak_mib"] == 21.0 and row["sent_bytes"] == 1_000 and row["ledger_bytes"] is None
    assert row["loss_difference"] == pytest.approx(1e-3)


def test_a_peer_that_is_not_installed_or_failed_keeps_its_row() -> None:
    failed = Run("onefold-3", 1, "failed", error="rank 1 ended with status 1: boom")
    rows = peers.rows(TINY, [made_up_run("ddp", 1, 1.0), failed], missing=["deepspeed-2"])
    assert [row["status"] for row in rows] == ["ok", "failed", "not installed"]
    text = pages.table(peers.columns(TINY), rows)
    assert "not installed" in text and "boom" in text


@pytest.mark.parametrize(("full", "expected"), [(True, 16), (False, 5)])
def test_the_matrix_covers_every_combination_or_each_respect_once(
    full: bool, expected: int
) -> None:
    settings = matrix(
        ["communication", "compute"],
        ["fp32", "bf16"],
        [2, 4],
        [1, 4],
        model="gpt-110m",
        full=full,
    )
    assert len(set(settings)) == len(settings) == expected
    assert {s.tokens for s in settings} == {256, 2048}
    assert {s.precision for s in settings} == {"fp32", "bf16"} and {s.ranks for s in settings} == {
        2,
        4,
    }


def test_the_model_has_110_million_parameters_and_the_data_depends_on_its_place_only() -> None:
    assert 105e6 < model.count_parameters("gpt-110m") < 115e6
    ids, labels = model.micro_batch("gpt-tiny", 64, step=3, micro=1, rank=1, ranks=2)
    again, _ = model.micro_batch("gpt-tiny", 64, step=3, micro=1, rank=1, ranks=2)
    other, _ = model.micro_batch("gpt-tiny", 64, step=3, micro=1, rank=0, ranks=2)
    assert ids.shape == labels.shape == (2, 32)
    assert ids.equal(again) and not ids.equal(other)
    assert ids[:, 1:].equal(labels[:, :-1])


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the kernel's counters are Linux's"
)
def test_the_socket_counter_counts_payload_to_the_byte() -> None:
    import socket

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
    ):
        receiver, _ = server.accept()
        with receiver:
            before = probes.socket_bytes_sent()
            sender.sendall(b"x" * 100_000)
            got = 0
            while got < 100_000:
                got += len(receiver.recv(65_536))
            assert probes.difference(probes.socket_bytes_sent(), before) == 100_000


def test_an_unknown_peer_is_a_wrong_command_line() -> None:
    found = command("-m", "benchmarks.peers", "--peers", "fsdp3")
    assert found.returncode == 2
    assert "fsdp3" in found.stderr and "fsdp2" in found.stderr


def test_a_failing_rank_ends_the_run_with_its_own_words_and_no_process() -> None:
    found = launch.run_side("no-such-peer", TINY, PATIENT)
    assert found["status"] == "failed"
    assert "There is no peer 'no-such-peer'" in found["error"]


def test_a_rank_leaves_what_it_measured_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A place of its own: tests beside this one make such folders too
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = folders_of_runs()
    found = launch.run_side("onefold-3", replace(TINY, ranks=1), PATIENT)
    assert found["status"] == "ok", found["error"]
    (rank,) = found["ranks"]
    assert len(rank["losses"]) == 3 and len(rank["step_s"]) == 2
    assert folders_of_runs() <= before, "a temporary folder was left behind"


def test_the_smallest_comparison_runs_and_losses_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "run_ranks", on_the_fork_server)
    # The other ones differ by a line of their adapter
    asked = ["ddp", "fsdp2", "onefold-1", "onefold-3"]
    arguments = [
        "--quick",
        "--model",
        "gpt-tiny",
        "--tokens",
        "64",
        "--name",
        "tiny",
        "--output",
        str(tmp_path),
        "--peers",
        *asked,
    ]
    status, said = peers.main(arguments), capsys.readouterr()
    assert status == 0, said
    document = json.loads((tmp_path / "tiny.json").read_text())
    assert document["schema"] == peers.Peers.schema and document["finished"] is True
    assert set(document) == {
        *(
            "schema",
            "command",
            "date",
            "finished",
            "machine",
            "versions",
            "models",
            "notes",
            "comparisons",
        )
    }
    (comparison,) = document["comparisons"]
    assert Setting(**comparison["setting"]).ranks == 2
    rows = {row["peer"]: row for row in comparison["rows"]}
    assert list(rows) == [
        p for p in TINY.those(PEERS) if p in asked or p.partition("-")[0] in asked
    ]
    elements = model.count_parameters("gpt-tiny")
    for peer, row in rows.items():
        assert row["status"] == "ok", f"{peer}: {row['error']}"
        assert row["step_s"] and row["ratio"] and row["tokens_a_second"]
        assert row["loss_difference"] is not None and row["loss_difference"] < 1e-5, (
            f"{peer}: losses differ: {row}"
        )
    if sys.platform.startswith("linux"):
        sent = rows["ddp"]["sent_bytes"]
        assert sent == pytest.approx(4 * elements, rel=0.02), (
            f"DDP sent {sent} bytes a step, an all-reduce is {4 * elements}"
        )
    assert {"rank", "losses", "step_s", "peak_mib", "sent_bytes"} <= set(
        comparison["runs"][0]["ranks"][0]
    )
    assert "ddp" in said.out and (tmp_path / "tiny.md").read_text().count("\n| ") >= len(rows)
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "tiny.png").stat().st_size > 1_000


def test_the_gpu_benchmark_says_that_there_is_no_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    found = command("benchmarks/gpu.py")
    assert found.returncode == 0 and "no CUDA device" in found.stdout


def test_overlap_is_the_time_that_both_kinds_of_work_share() -> None:
    seen = overlap([(0, 10), (5, 20)], [(15, 30), (40, 50)])
    expected = {"comm_s": 20, "compute_s": 25, "both_s": 5, "idle_s": 10}
    assert {name: round(1e6 * value) for name, value in seen.items()} == expected


def test_recorded_runs_give_the_rows_that_were_recorded() -> None:
    recorded = json.loads((harness.RESULTS / "peers_fp32.json").read_text())["comparisons"]
    known = [(Setting(**c["setting"]), c["runs"]) for c in recorded]
    for found, c in zip(
        take_over([], known, made=partial(Run.of, key="peer")), recorded, strict=True
    ):
        assert peers.rows(found.setting, found.runs) == c["rows"]
