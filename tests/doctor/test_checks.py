"""`onefold doctor --check`: where something is really broken, the check of it says so; where a rank
dies or stands still, a row does.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from broken_doctor import BREAKINGS
from onefold.doctor import check_device, checks, coordinator
from onefold.doctor.check_numbers import MADE, is_ordered_mean, near, numels, ordered, values
from onefold.doctor.checks import (
    CHECKS,
    LEFT_OUT,
    OK,
    WHERE,
    WRONG,
    Check,
    Findings,
    Here,
    Outcome,
    answer,
    merge,
)
from onefold.doctor.coordinator import casts_of, check_here, report_of
from onefold.doctor.ranks import Stopped
from ranks import absolute_path, run_ranks

KNOWN = {check.name: check for check in CHECKS}
CPU = {"device": "cpu", "gpus": [], "cuda": None}


@contextmanager
def here(per_node: int = 0) -> Iterator[Here]:
    """This rank of a test, with a folder that all of them see while it lasts."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        if world > 1:
            dist.broadcast_object_list(names)
        yield Here(rank, world, torch.device("cpu"), "gloo", per_node or world, names[0])
        if world > 1:
            dist.barrier()


def answers(checks: list[str], broken: str = "", per_node: int = 0) -> list[Outcome]:
    """On a rank: outcomes of the checks, `broken` being broken."""
    if broken:
        BREAKINGS[broken]()
    with here(per_node) as there:
        return [answer(KNOWN[name], there) for name in checks]


def rows(world: int, checks: list[str], broken: str = "", per_node: int = 0) -> list[Outcome]:
    """The same of all ranks, merged as the command does it."""
    found = run_ranks(world, answers, checks, broken, per_node)
    return [
        merge(KNOWN[name], {rank: outcomes[i] for rank, outcomes in enumerate(found)})
        for i, name in enumerate(checks)
    ]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", absolute_path())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# -- each check ------------------------------------------------------------------------------------

ON_TWO_RANKS = [
    "collectives",
    "ordered sums",
    "native sums",
    "stages",
    "offload",
    "save and reload",
    "memory at rest",
    "overlap",
]


def test_where_nothing_is_broken_every_check_is_ok(sample: Any) -> None:
    for row in rows(2, sample(ON_TWO_RANKS, 4)):
        assert row.status == OK and row.said and not row.advice and not row.ended, row


def test_what_cannot_run_is_left_out_with_a_reason() -> None:
    two, wait = rows(2, ["two levels", "no synchronization"])
    assert two.status == LEFT_OUT and "use 4 ranks" in two.said
    assert wait.status == LEFT_OUT and "a CPU has no streams" in wait.said


@pytest.mark.parametrize(
    ("check", "broken", "said"),
    [
        ("collectives", "all-gather", "all-gather of 1 float32 on gloo brings wrong numbers"),
        ("collectives", "all-to-all", "all-to-all of 1,000 float32 on gloo brings wrong numbers"),
        ("collectives", "reduce-scatter", "reduce-scatter of"),
        ("collectives", "message", "send and receive of"),
        ("ordered sums", "one bit of a sum", "stage 1: the mean gradient of"),
        ("ordered sums", "a gather is not waited for", "the pass computed with other weights"),
        ("native sums", "reduce-scatter", "differs from their sum by more than rounding"),
        ("stages", "one bit of a sum at stage 3", "fp32: stage 3 and stage 0 differ in"),
        ("stages", "sums a hundredth too large", "fp32: stage 0 and DDP: norms by 1.0e-02"),
        (
            "offload",
            "an offloaded step",
            "fp32: stage 2, optimizer on the host and nothing on the host differ",
        ),
        ("offload", "activations", "activations on the host and on the device differ in"),
        ("save and reload", "a torn copy", "weights are not those of the save's moment"),
        ("save and reload", "a wrong load", "after the load"),
        ("kernels", "a kernel", "int4, 64 a block, fp32 64: encoded with"),
        ("kernels", "a sum's kernel", "sums differ: n=16, ranks=2"),
        ("memory at rest", "a buffer stays", "bytes are held, the formula says"),
        ("memory at rest", "a ledger", "bytes without moments, the formula"),
        ("overlap", "no prefetch", "nothing is prefetched"),
    ],
)
def test_what_is_broken_is_wrong(check: str, broken: str, said: str) -> None:
    (row,) = rows(2, [check], broken)
    assert row.status == WRONG, f"{broken} was not noticed: {row}"
    assert said in row.said, row.said
    assert row.advice == KNOWN[check].advice and not row.ended, row


@pytest.mark.parametrize("broken", ["", "one bit of a sum over groups", "bytes between groups"])
@pytest.mark.parametrize("per_node", [2, 4])
def test_groups_are_checked_as_nodes_where_the_launcher_says_of_some(
    per_node: int, broken: str
) -> None:
    (row,) = rows(4, ["two levels"], broken, per_node)
    expected = {
        "": "to the bit",
        "one bit of a sum over groups": "stage 2 and stage 3 differ in",
        "bytes between groups": "the formula says",
    }
    assert row.status == (WRONG if broken else OK) and expected[broken] in row.said, row
    if not broken:
        assert ("2 nodes" if per_node == 2 else "2 groups on this node") in row.said
        assert row.figures["bytes between groups"] == row.figures["formula"] > 0


class Waiting(TorchDispatchMode):
    """Raises where CUDA would make the host wait, in its words."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("called a synchronizing CUDA operation")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("broken", [False, True])
def test_a_step_that_waits_for_the_device_is_wrong(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_device, "has_streams", lambda device: True)
    monkeypatch.setattr(check_device, "synchronize", lambda device: None)
    monkeypatch.setattr(check_device, "_refusing", Waiting)
    on_cpu = Here(0, 1, torch.device("cpu"), "gloo", 1, "")
    small, batches = check_device.small, check_device.batches
    monkeypatch.setattr(check_device, "small", lambda there: small(on_cpu))
    monkeypatch.setattr(check_device, "batches", lambda there, step: batches(on_cpu, step))
    # Not what a CPU does by itself: torch's loop reads its step counts, and the clip its factor.
    fused = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    monkeypatch.setattr(check_device, "adamw", lambda model: fused(model.parameters()))
    clip = (
        (lambda model, norm: next(model.parameters()).sum().item())
        if broken
        else (lambda model, norm: None)
    )
    monkeypatch.setattr(check_device.onefold, "clip_grad_norm_", clip)
    there = Here(0, 1, torch.device("cuda", 0), "nccl", 1, "")
    row = answer(KNOWN["no synchronization"], there)
    assert row.status == (WRONG if broken else OK), row
    if broken:
        assert (
            "called a synchronizing CUDA operation" in row.said
            and "stage 0, fp32" in row.said
            and row.ended
        )


# -- what is compared with -------------------------------------------------------------------------


def test_a_mean_in_another_order_has_other_bits() -> None:
    parts = [values(5000, rank) for rank in range(6)]
    assert is_ordered_mean(ordered(parts) * (1 / 6), parts)
    assert is_ordered_mean(ordered([part * (1 / 6) for part in parts]), parts)
    assert not is_ordered_mean(ordered(parts[::-1]) * (1 / 6), parts)
    assert not is_ordered_mean(ordered(parts, 3) * (1 / 6), parts) and is_ordered_mean(
        ordered(parts, 3) * (1 / 6), parts, 3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_without_one_rank_is_more_than_rounding(dtype: torch.dtype) -> None:
    parts = [values(1000, rank, dtype) for rank in range(8)]
    backwards = sum(reversed(parts[:-1]), parts[-1])
    assert near(backwards, parts)
    assert not near(sum(parts[1:], torch.zeros(1000, dtype=dtype)), parts)
    assert not near(torch.full((1000,), torch.nan, dtype=dtype), parts)


def test_overlap_on_an_accelerator_is_judged_by_what_is_hidden() -> None:
    def event(
        name: str, start: float, end: float, device: str = "CUDA", named: bool = False
    ) -> Any:
        time_range = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(
            name=name,
            time_range=time_range,
            device_type=SimpleNamespace(name=device),
            is_user_annotation=named,
        )

    moving, computing = check_device.split([
        event("Memcpy HtoD (Pinned -> Device)", 0, 10), event("ncclDevKernel_AllGather", 20, 30), event("ampere_sgemm", 5, 12),
        event("aten::mm", 0, 100, "CPU"), event("Optimizer.step", 0, 100, named=True), event("Memcpy DtoD (Device -> Device)", 21, 22),
    ])  # fmt: skip
    assert moving == [(0, 10), (20, 30)] and computing == [(5, 12), (21, 22)]
    assert check_device.shared(moving, computing) == 6
    for hidden, right in ((0.5, True), (0.1, True), (0.02, False), (0.0, False)):
        findings = Findings()
        check_device.judge(findings, hidden, "of the copies")
        assert (not findings.wrong) == right, hidden


# -- ranks that die, stand still, raise, or never start --------------------------------------------


def check_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str, checks: dict[str, float]
) -> list[Outcome]:
    """Rows of `checks` ({name: limit in seconds}) with two ranks of which BROKEN names what is
    broken.
    """
    chosen = tuple(replace(KNOWN[name], limit=limit) for name, limit in checks.items())
    monkeypatch.setattr(coordinator, "CHECKS", chosen)
    monkeypatch.setattr(coordinator.casts_of, "__defaults__", (chosen,))
    monkeypatch.setenv("BROKEN", broken)
    monkeypatch.setenv("PYTHONPATH", absolute_path())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    begun = time.monotonic()
    found = check_here(CPU, None, lambda name: None, "broken_doctor")
    assert time.monotonic() - begun < 200
    assert not list(tmp_path.iterdir()), "a folder was left behind"
    assert not children(), "a rank was left behind"
    return found


def test_the_check_that_takes_longest_comes_last_so_that_it_leaves_none_out() -> None:
    longest = max(check.limit for check in CHECKS)
    assert [check.name for check in CHECKS if check.limit == longest] == [CHECKS[-1].name]


def children() -> list[str]:
    """Command lines of ranks that this process started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                command = (stat.parent / "cmdline").read_text()
                found += (
                    [command]
                    if "broken_doctor" in command or "onefold.doctor.checks" in command
                    else []
                )
        except (OSError, IndexError):
            continue
    return found


def test_a_rank_that_dies_stands_still_or_raises_is_a_row_and_the_next_checks_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = "collectives=dies,ordered sums=stands still,offload=raises"
    checks = {
        "collectives": 60.0,
        "ordered sums": 10.0,  # rank 1 comes to where it stands still also on a busy machine
        "native sums": 60.0,
        "offload": 60.0,
        "kernels": 60.0,
    }
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    found = {row.name: row for row in check_broken(monkeypatch, tmp_path, broken, checks)}
    assert list(found) == list(checks)
    assert found["collectives"].status == WRONG
    assert "rank 1: was ended by SIGKILL (memory may have run out)" in found["collectives"].said, (
        found["collectives"]
    )
    hung = found["ordered sums"]
    assert (
        hung.status == WRONG
        and hung.said.startswith("rank 0: not finished after 10 s")
        and "rank 1 in " in hung.said
    ), hung
    assert "broken_doctor.py" in hung.said and "in stands_still" in hung.said, hung
    assert (
        found["offload"].status == WRONG
        and "rank 1: ValueError: a wheel came off" in found["offload"].said
    ), found["offload"]
    # Of a generation of ranks that began after the one that hung
    assert found["native sums"].status == OK, found["native sums"]
    assert found["kernels"].status == LEFT_OUT, found["kernels"]
    assert all(row.advice for row in found.values() if row.status == WRONG)
    assert report_of(CPU, list(found.values()), "onefold doctor --check", 1.0)["ok"] is False


def test_ranks_that_do_not_start_are_a_row_and_the_rest_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start, *others = check_broken(
        monkeypatch, tmp_path, "start=never", {"collectives": 60.0, "stages": 60.0}
    )
    assert (
        (start.name, start.status) == ("start", WRONG)
        and "libnccl.so.2 is not here" in start.said
        and start.advice
    )
    assert [(row.name, row.status) for row in others] == [
        ("collectives", LEFT_OUT),
        ("stages", LEFT_OUT),
    ]
    assert all("did not start" in row.said for row in others)


def test_a_check_whose_turn_never_comes_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(coordinator, "BUDGET", -1.0)
    (row,) = check_broken(monkeypatch, tmp_path, "nothing=broken", {"native sums": 60.0})
    assert row.status == LEFT_OUT and "before its turn" in row.said


# -- rows ------------------------------------------------------------------------------------------


def test_the_rank_that_raised_speaks_and_not_those_that_waited_for_it() -> None:
    check = KNOWN["stages"]
    stalled = Outcome("stages", WRONG, "StallError: rank 0 gave up", check.advice, 9.0, ended=True)
    raised = Outcome(
        "stages", WRONG, "ValueError: a wheel came off", check.advice, 1.0, {"seen": 1}, ended=True
    )
    row = merge(check, {0: stalled, 1: raised, 2: stalled})
    assert (
        row.said == "rank 1: ValueError: a wheel came off"
        and row.ended
        and row.seconds == 9.0
        and row.figures == {"rank 1": {"seen": 1}}
    )


def test_a_row_is_wrong_if_one_rank_is_and_left_out_if_one_was() -> None:
    good, out, bad = (Outcome("x", status, status) for status in (OK, LEFT_OUT, WRONG))
    check = Check("x", 1, "m:f", "do this")
    assert merge(check, {0: good, 1: good}).ranks == {}
    assert merge(check, {0: good, 1: out}).status == LEFT_OUT
    row = merge(check, {0: good, 1: out, 2: bad})
    assert (
        row.status == WRONG
        and row.said == "rank 2: wrong"
        and row.ranks == {"0": OK, "1": LEFT_OUT, "2": WRONG}
    )


def test_many_findings_are_told_by_the_first_and_their_number() -> None:
    class Ten(Check):
        @property
        def function(self) -> Any:
            return lambda there, findings: (
                [findings.expect(False, f"number {i}") for i in range(10)] and "never said"
            )

    with here() as there:
        row = answer(Ten("ten", 1, "", "do this"), there)
    assert (
        row.said == "number 0; number 1; number 2; number 3; and 6 more"
        and row.status == WRONG
        and row.advice == "do this"
    )


def test_a_check_that_raises_names_its_own_line() -> None:
    with here() as there:
        row = answer(Check("none", 1, "check_nowhere:none", "do this"), there)
    assert (
        row.status == WRONG
        and row.ended
        and "ModuleNotFoundError" in row.said
        and "doctor/checks.py:" in row.said
    )


@pytest.mark.parametrize(
    ("device", "gpus", "ranks", "expected"),
    [
        ("cpu", 0, None, [(2, "gloo", 11)]),
        ("cpu", 0, 4, [(4, "gloo", 11)]),
        ("cuda", 1, None, [(2, "gloo", 5), (1, "nccl", 6)]),
        ("cuda", 8, None, [(8, "nccl", 11)]),
        ("cuda", 8, 2, [(2, "nccl", 11)]),
        ("cuda", 8, 1, [(1, "nccl", 11)]),
    ],
)
def test_who_runs_what(
    device: str, gpus: int, ranks: int | None, expected: list[tuple[int, str, int]]
) -> None:
    casts = casts_of(device, gpus, ranks)
    assert [(cast.ranks, cast.backend, len(cast.checks)) for cast in casts] == expected
    assert sorted(name for cast in casts for name in cast.checks) == sorted(KNOWN)
    assert casts[-1].checks[-1] == "kernels", "what takes longest leaves nothing out"


def test_ranks_on_nccl_get_more_time_because_they_make_communicators() -> None:
    class Board:
        def check(self, keys: list[str]) -> bool:
            return False

        def set(self, key: str, value: str) -> None:
            pass

    minder = SimpleNamespace(
        ended=dict, ranks=None, running={0: None, 1: None}, stands=dict, end=lambda: None
    )
    check = replace(KNOWN["stages"], limit=0.2)
    seconds = []
    for backend in ("gloo", "nccl"):
        cast = coordinator.Cast(2, "cuda", backend, (check.name,))
        found: Any = coordinator.Checking(Board(), minder, "", int, [], lambda name: None)
        minder.running.clear()
        row = found._row(0, check, cast)
        assert row.status == WRONG and row.ended
        seconds.append(row.seconds)
    assert seconds[0] >= 0.2 and seconds[1] >= 0.2 * coordinator.WITH_NCCL


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_the_numbers_of_all_ranks_are_made_in_seconds_however_many_there_are(ranks: int) -> None:
    sizes = numels("nccl", ranks)
    # Each rank makes every rank's numbers, which are as many for each of them
    assert max(sizes) * ranks**2 <= MADE
    assert max(sizes) * ranks * 2 >= 1 << 20, "NCCL sends 1 MiB by its algorithms for large data"
    assert 1 in sizes and len(set(sizes)) == 3


# -- the command's ranks ----------------------------------------------------------------------------


def raises_in_a_library(where: Path) -> ValueError:
    """What an environment in a folder called onefold raises: Onefold's own line calls torch's."""
    own = Path(checks.__file__).parents[1] / "comm" / "moves.py"
    library = where / "onefold" / "lib" / "python3.11" / "site-packages" / "torch" / "nn.py"
    names: dict[str, Any] = {}
    exec(compile("def inner(): raise ValueError('no such sum')", str(library), "exec"), names)
    exec(compile("def outer(): inner()", str(own), "exec"), names)
    with pytest.raises(ValueError) as raised:
        names["outer"]()
    return raised.value


def test_the_line_that_is_named_is_onefolds_wherever_the_environment_is(tmp_path: Path) -> None:
    error = raises_in_a_library(tmp_path)
    assert checks._told(error) == "ValueError: no such sum (comm/moves.py:1 in outer)"
    frames = reversed(traceback.extract_tb(error.__traceback__))
    stacks = "".join(f'  File "{f.filename}", line {f.lineno} in {f.name}\n' for f in frames)
    said = coordinator._line_of(f"Current thread 0x01 (most recent call first):\n{stacks}")
    assert said == "comm/moves.py:1 in outer"


def test_a_signal_ends_it_with_every_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def say(name: str) -> None:
        if name == "collectives":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(Stopped, match="SIGTERM"):
        check_here(CPU, None, say)
    assert not children() and not list(tmp_path.iterdir())


def test_the_signal_that_asks_where_a_rank_stands_is_no_schedulers_here() -> None:
    """A check's ranks get it from their minder only: they lead sessions of their own."""
    assert WHERE == signal.SIGUSR1
