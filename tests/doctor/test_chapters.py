"""The chapters of `onefold doctor --check`: what is expected of them, what each row says, and what
becomes of ranks that fail.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onefold.doctor import chapter_runs, chapters
from onefold.doctor.chapter_expected import (
    expected_reduction,
    expected_step,
    kind_of,
    machine_of,
    numel_of,
)
from onefold.doctor.chapter_rank import seconds_by_kind
from onefold.doctor.chapter_runs import (
    CHAPTERS,
    CUT_OFF,
    DONE,
    FAILED,
    LIMIT,
    MEMORY,
    TIMEOUT,
    WHOLE,
    RanksRun,
    Scope,
    run_ranks,
    scope_of,
)
from onefold.doctor.chapters import CHAPTER, LLAMA_8B, SEVERAL, Chapter, measure_chapters
from onefold.doctor.checks import LEFT_OUT, OK, WRONG
from onefold.doctor.ranks import Stopped
from onefold.plan import hardware
from ranks import absolute_path

H100 = {"device": "cuda", "gpus": 8 * [{"name": "NVIDIA H100 80GB HBM3", "total": 80 << 30}]}
REHEARSAL = Scope("cpu", 2, tiny=True, steps=2)


def quiet(text: str) -> None:
    """Say nothing."""


def machine(ranks: int) -> Any:
    return hardware.machine(ranks, ranks, "h100-80")


# -- what is expected ------------------------------------------------------------------------------


def test_what_is_expected_of_a_block_is_what_its_bytes_take() -> None:
    """Of Llama 3 8B on eight H100, by hand: 218.1M parameters, 436 MB in 16 bits."""
    numel = numel_of(LLAMA_8B)
    assert numel == 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 == 218_103_808
    wanted = expected_step(machine(8), LLAMA_8B, 8192)
    ring = 2 * numel * 7 / 8 / (450e9 * 0.8) + 7 * 7e-6  # of the plan's links and hops
    exchange = 2 * numel * 7 / 8 / (450e9 * 0.8) + 7e-6
    added = expected_reduction(machine(8), 2 * numel, "ordered") - exchange
    assert 1e-4 < added < 4e-4  # (436 MB + 4 bytes a sum) of memory
    assert wanted["comm_s"] == pytest.approx(7 * ring + 4 * (exchange + added))
    assert wanted["exposed_s"] == pytest.approx(ring)  # 8,192 tokens hide the rest
    short = expected_step(machine(8), LLAMA_8B, 256)
    assert short["exposed_s"] > 5 * ring
    alone = expected_step(machine(1), LLAMA_8B, 2048)
    assert alone["comm_s"] == alone["exposed_s"] == 0.0 < alone["compute_s"]


def test_what_is_expected_is_for_the_gpu_that_is_here() -> None:
    here = machine_of(Scope("cuda", 2, "NVIDIA A100-SXM4-80GB", 85 << 30), 2)
    assert here.ranks == 2 and here.gpu == hardware.machine(2, 2, "a100-80").gpu
    assert machine_of(Scope("cuda", 2), 2).gpu == machine(2).gpu


@pytest.mark.parametrize(
    ("name", "gib", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-80"),
        ("NVIDIA A100 80GB PCIe", 80, "a100-80-pcie"),
        ("NVIDIA H100 80GB HBM3", 80, "h100-80"),
        ("NVIDIA H100 PCIe", 80, "h100-80-pcie"),
        ("NVIDIA H200", 140, "h200"),
        ("NVIDIA L4", 22, "l4"),
        ("NVIDIA L40S", 44, "l40s"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        ("Abacus 3000", 1, "h100-80"),
        ("", 0, "h100-80"),
    ],
)
def test_a_gpu_is_known_by_the_name_that_its_driver_gives_it(
    name: str, gib: int, kind: str
) -> None:
    assert kind in hardware.builtin().gpus
    assert kind_of(name, gib << 30) == kind


# -- what each row says ----------------------------------------------------------------------------


def test_growth_is_told_beside_what_torchs_allocator_has() -> None:
    rows = [
        {"driver_mib": 500.0, "reserved_mib": 0.0},
        {"driver_mib": 1200.0, "reserved_mib": 100.0},
        {"driver_mib": 1900.0, "reserved_mib": 600.0},
        {"driver_mib": None, "reserved_mib": None},
    ]
    assert chapters.growth(rows) == [None, 600.0, 200.0, None]
    assert chapters.growth(rows[:1]) == [None]


def event(name: str, start: float, end: float, device: str = "CUDA", named: bool = False) -> Any:
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=SimpleNamespace(name=device),
        is_user_annotation=named,
    )


def test_a_trace_says_how_much_of_communication_or_copies_had_computing_beside_it() -> None:
    events = [
        event("ncclDevKernel_AllGather", 0, 1e6), event("ampere_sgemm", 0.5e6, 3e6),
        event("Memcpy HtoD (Pinned -> Device)", 2e6, 4e6), event("Memcpy DtoH (Device -> Pageable)", 4e6, 4.5e6),
        event("aten::mm", 0, 9e6, "CPU"), event("Optimizer.step", 0, 9e6, named=True),
    ]  # fmt: skip
    found = seconds_by_kind(events, "comm")
    assert found == {
        "comm_s": 1.0, "compute_s": 4.0, "both_s": 0.5, "exposed_s": 0.5, "pinned_s": 2.0, "pageable_s": 0.5,
    }  # fmt: skip
    copies = seconds_by_kind(events, "copies")
    assert (copies["copies_s"], copies["both_s"], copies["exposed_s"]) == (2.5, 1.0, 1.5)


#: What one rank of every chapter could have left.
RANK = {
    "backend": "gloo", "step_s": 0.1, "first_s": 1.0, "waits_s": 0.0, "peak_mib": 1.0, "losses": [2.0, 1.0], "victim": False,
    "seconds": 0.4, "kind": "StallError", "text": "rank 0 waited",
    "rows": [{"after": "the context", "reserved_mib": 2.0, "driver_mib": 600.0}],
    "trace": {"comm_s": 0.0, "copies_s": 0.2, "compute_s": 0.1, "both_s": 0.15, "exposed_s": 0.05, "pinned_s": 0.2, "pageable_s": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("name", CHAPTERS)
def test_rows_that_need_several_gpus_say_so_on_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def run(what: str, scope: Scope, ranks: int, *job: Any) -> RanksRun:
        started.append(ranks)
        last = [RANK | {"victim": True}] if ranks > 1 else []
        return RanksRun(what, DONE, [RANK, *last], seconds=1.0)

    monkeypatch.setattr(chapters, "run_ranks", run)
    monkeypatch.setattr(chapters, "free_host_memory", lambda: 1 << 40)
    found = CHAPTER[name](Scope("cuda", 1, "NVIDIA H100 80GB HBM3"))
    assert found.name == name and all(len(row) == len(found.columns) for row in found.rows)
    alone = name in ("exchange", "sums")
    assert found.status == (LEFT_OUT if alone else OK) and found.said == (SEVERAL if alone else "")
    said = [row for row in found.rows if SEVERAL in row]
    assert bool(said) == (name not in ("copies", "compile")), found.rows
    # Two ranks share the GPU over gloo to lose one another; the others run alone or not at all
    assert set(started) == (set() if alone else {2} if name == "lost" else {1})
    if name == "copies":
        first = dict(zip(found.columns, found.rows[0], strict=True))
        assert (first["copies ms"], first["hidden"], first["exposed ms"]) == (
            "200.00",
            "75%",
            "50.00",
        )
        assert first["pinned"] == "100%" and first["expected"] == "90% or more"


def test_offload_is_not_measured_where_the_host_has_too_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chapters, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setattr(chapters, "free_host_memory", lambda: 8 << 30)
    found = chapters.copies(Scope("cuda", 1))
    assert found.status == LEFT_OUT and "of host memory" in found.said and "free" in found.said


def test_a_peer_that_is_lost_without_our_own_words_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = {"victim": False, "kind": "", "text": "the watchdog ended this process", "ended": -6}
    run = lambda what, *_: RanksRun(what, DONE, [silent, {"victim": True}])  # noqa: E731
    monkeypatch.setattr(chapters, "run_ranks", run)
    found = chapters.lost(REHEARSAL)
    assert [row[2] for row in found.rows] == ["never", "never"]
    assert [run.status for run in found.runs] == [FAILED, FAILED] and found.status == WRONG
    assert "lost: killed: failed" in found.said and "watchdog" in found.said


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        ([DONE, DONE], OK),
        ([DONE, FAILED], WRONG),
        ([TIMEOUT, MEMORY], WRONG),
        ([DONE, MEMORY], LEFT_OUT),
        ([CUT_OFF], LEFT_OUT),
    ],
)
def test_a_chapter_is_wrong_if_ranks_fail_and_left_out_if_the_machine_is_too_small(
    ended: list[str], status: str
) -> None:
    runs = [RanksRun(f"number {n}", how, error=f"Error: {how}") for n, how in enumerate(ended)]
    found = Chapter("block", "Blocks", ("a",), [["1"]], [*runs])
    assert found.status == status
    wrong = [run for run in runs if run.status != DONE]
    assert all(f"{run.name}: {run.status}: Error: {run.status}" in found.said for run in wrong)
    written = json.loads(json.dumps(found.to_json()))
    assert (written["name"], written["status"], written["rows"]) == ("block", status, [["1"]])
    assert [run["status"] for run in written["runs"]] == ended


# -- which chapters run, and until when ------------------------------------------------------------


def test_chapters_are_measured_in_their_order() -> None:
    assert tuple(CHAPTER) == CHAPTERS
    assert CHAPTERS == ("block", "exchange", "copies", "communicators", "lost", "compile", "sums")


def test_chapters_run_on_all_gpus_and_on_a_cpu_in_a_rehearsal_only() -> None:
    def scope(found: dict[str, Any], ranks: int | None, rehearse: bool) -> Scope:
        made = scope_of(found, ranks, rehearse, 100.0, quiet)
        assert made is not None and made.deadline == 100.0 + WHOLE < 100.0 + 600
        return made

    on_gpus = scope(H100, None, False)
    assert (on_gpus.device, on_gpus.gpus, on_gpus.tiny) == ("cuda", 8, False)
    assert "H100" in on_gpus.gpu and scope(H100, 2, False).gpus == 2
    assert scope({**H100, "gpus": H100["gpus"][:1]}, 2, False).gpus == 1  # 2 ranks that share it
    assert scope(H100, None, True).tiny
    cpu = {"device": "cpu", "gpus": []}
    assert scope_of(cpu, None, False, 0.0, quiet) is None
    assert scope_of({**H100, "device": "cpu"}, None, False, 0.0, quiet) is None
    rehearsed = scope(cpu, None, True)
    assert (rehearsed.device, rehearsed.gpus, rehearsed.tiny) == ("cpu", 2, True)


def test_no_chapter_begins_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chapters, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    over = Scope("cpu", 2, tiny=True, deadline=time.monotonic() + 5)
    found = list(measure_chapters(over))
    assert [chapter.name for chapter in found] == list(CHAPTERS)
    assert all(c.status == LEFT_OUT and "before its turn" in c.said for c in found)


def test_ranks_get_no_longer_than_what_is_left_for_all() -> None:
    assert Scope("cpu", 2).seconds() == LIMIT
    assert 0 < Scope("cpu", 2, deadline=time.monotonic() + 20).seconds() <= 20
    assert Scope("cpu", 2, deadline=time.monotonic() - 1).seconds() == 0


# -- ranks that fail -------------------------------------------------------------------------------


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where temporary folders are made."""
    monkeypatch.setenv("PYTHONPATH", absolute_path())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def nothing_left(place: Path) -> bool:
    running = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            running.append(command.read_bytes())
        except OSError:
            continue
    return not list(place.iterdir()) and not any(str(place).encode() in one for one in running)


@pytest.mark.parametrize(
    ("how", "status", "error"),
    [
        ("well", DONE, ""),
        ("raises", FAILED, "rank 1 ended with status 1: "),
        ("dies", FAILED, "rank 1 was ended by SIGKILL"),
        ("has no memory", MEMORY, "CUDA out of memory. Tried 20 GiB"),
    ],
)
def test_how_ranks_end_is_told_and_nothing_is_left(
    how: str, status: str, error: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chapter_runs, "GRACE", 0.5)
    # As a launcher of another run would have left them
    monkeypatch.setenv("WORLD_SIZE", "64")
    said: list[str] = []
    scope = Scope("cpu", 2, say=said.append)
    found = run_ranks("trial", scope, 2, {"how": how}, "broken_chapter")
    assert found.status == status and error in found.error, found
    assert said[-1].startswith(f"trial: {status} in ") and nothing_left(place)
    if how == "well":
        assert [(rank["rank"], rank["world"]) for rank in found.ranks] == [(0, "2"), (1, "2")]
    if how == "raises":
        assert chapters.essence(found.error) == "RuntimeError: a wheel came off"


@pytest.mark.parametrize(("whole", "status"), [(float("inf"), TIMEOUT), (3.0, CUT_OFF)])
def test_ranks_that_stand_still_are_ended_at_their_time_or_at_that_of_all(
    whole: float, status: str, place: Path
) -> None:
    scope = Scope("cpu", 2, deadline=time.monotonic() + whole, limit=4.0)
    found = run_ranks("trial", scope, 2, {"how": "stands still"}, "broken_chapter")
    assert found.status == status and "not finished after" in found.error, found
    assert found.seconds < 60 and nothing_left(place)


def test_a_signal_ends_the_ranks_of_a_chapter(place: Path) -> None:
    def start(rank: int, *_: Any) -> None:
        real(rank, *_)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    made = chapter_runs.Children
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped, match="SIGTERM"):
        children: list[Any] = []

        def of(folder: Path) -> Any:
            nonlocal real
            children.append(made(folder))
            real = children[0].start_one
            children[0].start_one = start
            return children[0]

        real: Any = None
        patch.setattr(chapter_runs, "Children", of)
        run_ranks("trial", Scope("cpu", 2), 2, {"how": "stands still"}, "broken_chapter")
    assert nothing_left(place)
