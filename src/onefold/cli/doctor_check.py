"""`onefold doctor --check`: ranks are started, asked check by check, and ended; a rank that stands
still or dies is a row of the table.

    alone                                 under a launcher of N ranks
    this process ── store, minder         rank 0 ── store (or the launcher's), minder, coordinator
        ├── rank 0                            └── rank 0 of the check
        └── rank 1                        rank 1 ── minder ── rank 1 of the check      ...

Checks run in child processes, which leave their outcomes in a store. A generation of them runs one
check after another in one process group. Where a check raised, stood still past its limit, or lost
a rank, the generation is ended and the next one goes on with the check behind it. A launcher's
ranks start one child each, on their own device, for the same reason.

| machine              | generation of checks that any number of ranks can run | of checks between ranks           |
|----------------------|-------------------------------------------------------|-----------------------------------|
| no GPU               | 2 ranks on gloo                                       | the same                          |
| one GPU              | 1 rank                                                | 2 ranks on gloo that share it     |
| several GPUs         | a rank a GPU on NCCL                                  | the same                          |
| under a launcher     | its ranks                                             | the same                          |
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from onefold.cli.doctor_check_rank import PREFIX, WHERE, Plan, key
from onefold.cli.doctor_checks import CHECKS, LEFT_OUT, OK, START, WRONG, Check, Outcome, merge
from onefold.cli.doctor_ranks import Stopped
from onefold.plan.calibrate import CalibrationError
from onefold.train.launch import child_environment, noted_signals

SCHEMA = "onefold-check/1"
RANK_MODULE = "onefold.cli.doctor_check_rank"
#: Seconds between two looks at ranks and store.
INTERVAL = 0.05
#: Seconds that the other ranks get once one has raised or ended.
GRACE = 3.0
#: Seconds after which no further check begins.
BUDGET = 110.0
#: Seconds that ranks get to write down where they stand, and minders to end theirs.
LAST_WORDS, ENDING = 0.5, 15.0
#: Seconds after which a collective of the process group gives up; a check's limit comes first.
STALL = 60.0
#: Environment variables that a report tells of, by how they begin.
TOLD = (
    "NCCL_",
    "TORCH_NCCL_",
    "GLOO_",
    "CUDA_",
    "PYTORCH_",
    "OMP_NUM_THREADS",
    "TRITON_",
    "TORCH_ALLOW_TF32",
)


@dataclass(frozen=True)
class Cast:
    """Ranks that run checks: how many, on what, and the names of the checks."""

    ranks: int
    device: str
    backend: str
    checks: tuple[str, ...]


def casts_of(
    device: str, gpus: int, ranks: int | None, checks: Sequence[Check] = CHECKS
) -> list[Cast]:
    """Who runs what on this machine, by the table of this module. `ranks` None chooses."""
    names = tuple(check.name for check in checks)
    if device == "cpu":
        return [Cast(ranks or 2, "cpu", "gloo", names)]
    if gpus > 1 or ranks == 1:
        return [Cast(ranks or gpus, "cuda", "nccl", names)]
    alone = tuple(check.name for check in checks if check.ranks == 1)
    return [
        Cast(1, "cuda", "nccl", alone),
        Cast(ranks or 2, "cuda", "gloo", tuple(n for n in names if n not in alone)),
    ]


@dataclass
class Minder:
    """The child processes of this process: one for each of `ranks`, started anew for each
    generation.

    Attributes:
        address: host and port of the store. folder: for what they write to standard error.
        environment: what a child finds in its own, by its rank and the number of ranks.
    """

    address: tuple[str, int]
    ranks: Sequence[int] | None
    folder: Path
    environment: Callable[[int, int], dict[str, str]]
    module: str = RANK_MODULE
    children: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, generation: int, world: int) -> None:
        """One child for each rank of mine, or for all of `world`, out of a Ctrl-C's reach."""
        host, port = self.address
        for rank in range(world) if self.ranks is None else self.ranks:
            with self._errors(rank).open("wb") as errors:
                self.children[rank] = subprocess.Popen(
                    [sys.executable, "-m", self.module, host, str(port), str(generation), str(rank), str(os.getpid())],
                    env=self.environment(rank, world),
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
                )  # fmt: skip

    def ended(self) -> dict[int, str]:
        """How those ended that have."""
        return {
            rank: self._how(rank, child.returncode)
            for rank, child in self.children.items()
            if child.poll() is not None
        }

    def stands(self) -> dict[int, str]:
        """Where those stand that still run, on their main thread."""
        running = [rank for rank, child in self.children.items() if child.poll() is None]
        for rank in running:
            self.children[rank].send_signal(WHERE)
        time.sleep(LAST_WORDS if running else 0.0)
        return {rank: _line_of(self._said(rank)) for rank in running}

    def end(self) -> None:
        """Leave no child."""
        for child in self.children.values():
            if child.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(child.pid, signal.SIGKILL)
        for child in self.children.values():
            child.wait()
        self.children = {}

    def _errors(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.err"

    def _said(self, rank: int) -> str:
        return self._errors(rank).read_text(encoding="utf-8", errors="replace")

    def _how(self, rank: int, status: int) -> str:
        lines = self._said(rank).strip().splitlines()
        how = (
            f"was ended by {signal.Signals(-status).name}"
            if status < 0
            else f"ended with status {status}"
        )
        hint = " (memory may have run out)" if -status == signal.SIGKILL else ""
        return f"{how}{hint}: {lines[-1] if lines else 'it said nothing'}"


class Checking:
    """The coordinator: takes generations of ranks through their checks and makes a row of each."""

    def __init__(
        self,
        store: Any,
        minder: Minder,
        folder: str,
        per_node: Callable[[int], int],
        arrived: list[int],
    ) -> None:
        self.store, self.minder, self.folder, self.per_node, self.arrived = (
            store,
            minder,
            folder,
            per_node,
            arrived,
        )
        self.generation = 0
        self.deadline = time.monotonic() + BUDGET
        self.said: Callable[[str], None] = lambda name: None

    def rows(self, casts: Sequence[Cast]) -> list[Outcome]:
        """A row of every check, in order, and one of each cast that did not start."""
        known = {check.name: check for check in CHECKS}
        rows: dict[str, Outcome] = {}
        failed = []
        for cast in casts:
            waiting = [known[name] for name in cast.checks]
            few = [check for check in waiting if check.ranks > cast.ranks]
            for check in few:
                rows[check.name] = Outcome(
                    check.name,
                    LEFT_OUT,
                    f"{cast.ranks} rank sends nothing; give it {check.ranks} ranks",
                )
                waiting.remove(check)
            while waiting:
                start, done = self._generation(cast, waiting)
                rows |= {row.name: row for row in done}
                waiting = waiting[len(done) :]
                if start.status != OK:
                    failed.append(start)
                    rows |= {
                        c.name: Outcome(
                            c.name, LEFT_OUT, f"the ranks ({_words(cast)}) did not start"
                        )
                        for c in waiting
                    }
                    waiting = []
                elif waiting and time.monotonic() > self.deadline:
                    late = f"{BUDGET:.0f} seconds were over before its turn"
                    rows |= {c.name: Outcome(c.name, LEFT_OUT, late) for c in waiting}
                    waiting = []
        return [*failed, *(rows[check.name] for check in CHECKS if check.name in rows)]

    def _generation(self, cast: Cast, waiting: Sequence[Check]) -> tuple[Outcome, list[Outcome]]:
        """Start ranks and take them as far as they get; (how they started, their rows)."""
        number, self.generation = self.generation, self.generation + 1
        names = tuple(check.name for check in waiting)
        plan = Plan(
            cast.ranks,
            cast.device,
            cast.backend,
            self.per_node(cast.ranks),
            names,
            self.folder,
            STALL,
        )
        self.store.set(f"{number}/plan", plan.encoded())
        self.minder.start(number, cast.ranks)
        done: list[Outcome] = []
        try:
            start = self._row(number, START, cast.ranks)
            for check in waiting if start.status == OK else ():
                if time.monotonic() > self.deadline:
                    break
                done.append(self._row(number, check, cast.ranks))
                if done[-1].ended:
                    break
            return start, done
        finally:
            self._over(number, cast.ranks, "done")

    def _row(self, number: int, check: Check, ranks: int) -> Outcome:
        """Wait for all ranks' outcomes of a check, no longer than it may take.

        Raises:
            Stopped: a signal came.
        """
        self.said(check.name)
        begun = time.monotonic()
        deadline = begun + check.limit
        found: dict[int, Outcome] = {}
        lost: dict[int, str] = {}
        while len(found) < ranks and time.monotonic() < deadline:
            if self.arrived:
                raise Stopped(self.arrived[0])
            lost = {
                rank: how for rank, how in self._lost(number, ranks).items() if rank not in found
            }
            for rank in range(ranks):
                if rank not in found and self.store.check([key(number, check.name, rank)]):
                    found[rank] = Outcome(
                        **json.loads(self.store.get(key(number, check.name, rank)))
                    )
                    lost.pop(rank, None)
            if lost or any(outcome.ended for outcome in found.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(INTERVAL if len(found) < ranks else 0)
        seconds = time.monotonic() - begun
        missing = [rank for rank in range(ranks) if rank not in found]
        if missing:
            where = self._over(number, ranks, "hung")
            raised = any(outcome.ended for outcome in found.values())
            if lost:  # what others raise then is that its connections have closed
                found = {rank: outcome for rank, outcome in found.items() if not outcome.ended}
                found |= {
                    rank: Outcome(check.name, WRONG, how, check.advice, seconds, ended=True)
                    for rank, how in lost.items()
                }
            if not lost and not raised:
                said = f"not finished after {seconds:.0f} s: " + ", ".join(
                    f"rank {r} in {where.get(r, '?')}" for r in missing
                )
                found |= {
                    rank: Outcome(
                        check.name,
                        WRONG,
                        said,
                        check.advice,
                        seconds,
                        ended=True,
                        where=where.get(rank, ""),
                    )
                    for rank in missing
                }
        return merge(check, found, ranks)

    def _lost(self, number: int, ranks: int) -> dict[int, str]:
        """Ranks whose process has ended, and how; of others' children what their minders say."""
        lost = self.minder.ended()
        for rank in range(ranks) if self.minder.ranks is not None else ():
            if rank not in lost and self.store.check([f"{number}/ended/{rank}"]):
                lost[rank] = self.store.get(f"{number}/ended/{rank}").decode()
        return lost

    def _over(self, number: int, ranks: int, how: str) -> dict[int, str]:
        """End a generation, once; where those stood that still ran, if it hung."""
        if self.store.check([f"{number}/over"]):
            return {}
        self.store.set(f"{number}/over", how)
        where = self.minder.stands() if how == "hung" else {}
        mine = set(self.minder.children)
        self.minder.end()
        deadline = time.monotonic() + ENDING
        for rank in range(ranks):
            while (
                rank not in mine
                and time.monotonic() < deadline
                and not self.store.check([f"{number}/gone/{rank}"])
            ):
                time.sleep(INTERVAL)
            if rank not in mine and self.store.check([f"{number}/stands/{rank}"]):
                where[rank] = self.store.get(f"{number}/stands/{rank}").decode()
        return where


def check_here(
    found: Mapping[str, Any],
    ranks: int | None,
    say: Callable[[str], None],
    module: str = RANK_MODULE,
) -> list[Outcome]:
    """Check this machine with ranks of its own.

    Args:
        found: what `doctor_facts.facts` says.
        ranks: how many; None chooses.
        say: called with what is checked next.

    Raises:
        CalibrationError: more ranks than GPUs that each take one.
        Stopped: a signal came; every rank is ended.
    """
    import torch.distributed as dist

    device, gpus = str(found["device"]), len(found["gpus"])
    if ranks is not None and ranks < 1:
        raise CalibrationError(f"--ranks {ranks}: expected a number of ranks, 1 or more.")
    if device == "cuda" and ranks is not None and ranks > gpus > 1:
        raise CalibrationError(
            f"--ranks {ranks}: each rank takes a GPU, and {gpus} are here. Or: --device cpu."
        )
    with _at_work() as (arrived, folder):
        store = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=START.limit),
        )

        def environment(rank: int, world: int) -> dict[str, str]:
            placed = {
                "RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": world,
            }
            return {
                **_environment(folder, device, world),
                **{name: str(value) for name, value in placed.items()},
            }

        minder = Minder(("127.0.0.1", store.port), None, folder, environment, module)
        try:
            checking = Checking(
                dist.PrefixStore(PREFIX, store), minder, str(folder), lambda world: world, arrived
            )
            checking.said = say
            return checking.rows(casts_of(device, gpus, ranks))
        finally:
            minder.end()


def check_with_launcher(
    found: Mapping[str, Any], say: Callable[[str], None], module: str = RANK_MODULE
) -> list[Outcome]:
    """Check with the ranks that torchrun or another launcher has started; this process is one of
    them. [] on all but rank 0.

    Raises:
        Stopped: a signal came; this rank's child is ended.
    """
    import torch.distributed as dist

    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=START.limit)))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device, gpus = str(found["device"]), len(found["gpus"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    board = dist.PrefixStore(PREFIX, store)
    with _at_work() as (arrived, folder), contextlib.ExitStack() as stack:
        minder = Minder(
            address,
            [rank],
            folder,
            lambda _rank, _world: _environment(folder, device, local),
            module,
        )
        stack.callback(minder.end)
        if rank != 0:
            _mind(board, minder, rank, arrived)
            return []
        try:
            shared = _folder_of_all(stack) if local < world else str(folder)
            checking = Checking(board, minder, shared, lambda _: local, arrived)
            checking.said = say
            backend = "nccl" if device == "cuda" and local <= gpus else "gloo"
            return checking.rows(
                [Cast(world, device, backend, tuple(check.name for check in CHECKS))]
            )
        finally:
            board.set("end", "")
            deadline = time.monotonic() + ENDING  # the store is this process's, or goes with it
            while time.monotonic() < deadline and not all(
                board.check([f"left/{r}"]) for r in range(1, world)
            ):
                time.sleep(INTERVAL)


def _mind(board: Any, minder: Minder, rank: int, arrived: list[int]) -> None:
    """A launcher's rank other than 0: one child for each generation, until rank 0 ends it."""
    number = 0
    try:
        while True:
            while not board.check([f"{number}/plan"]):
                if board.check(["end"]):
                    return
                if arrived:
                    raise Stopped(arrived[0])
                time.sleep(INTERVAL)
            minder.start(number, 0)
            while not board.check([f"{number}/over"]):
                if arrived:
                    raise Stopped(arrived[0])
                for _, how in minder.ended().items():
                    board.set(f"{number}/ended/{rank}", how)
                time.sleep(INTERVAL)
            if board.get(f"{number}/over") == b"hung":
                for _, where in minder.stands().items():
                    board.set(f"{number}/stands/{rank}", where)
            minder.end()
            board.set(f"{number}/gone/{rank}", "")
            number += 1
    finally:
        with contextlib.suppress(Exception):  # rank 0 may be gone, and the store with it
            board.set(f"left/{rank}", "")


@contextlib.contextmanager
def _at_work() -> Iterator[tuple[list[int], Path]]:
    """(signals that arrive inside, a folder that goes afterwards)"""
    with (
        noted_signals() as arrived,
        tempfile.TemporaryDirectory(prefix="onefold-check-", ignore_cleanup_errors=True) as name,
    ):
        yield arrived, Path(name)


def _folder_of_all(stack: contextlib.ExitStack) -> str:
    """A folder in the working folder, which several nodes share as a rule."""
    try:
        folder = tempfile.TemporaryDirectory(
            prefix=".onefold-check-", dir=Path.cwd(), ignore_cleanup_errors=True
        )
    except OSError:
        folder = tempfile.TemporaryDirectory(prefix="onefold-check-", ignore_cleanup_errors=True)
    return stack.enter_context(folder)


def _environment(folder: Path, device: str, ranks: int) -> dict[str, str]:
    """A training's environment, and what makes kernels give the same bits again."""
    ours = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if device == "cpu":
        ours["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    return child_environment({**ours, **os.environ}, ranks, folder, compiling=False)


def _line_of(said: str) -> str:
    """The innermost line of the found thread, libraries left out, as faulthandler wrote it."""
    current = said.rpartition("Current thread")[2]
    frames = re.findall(r'File "(.*?)", line (\d+) in (\S+)', current)
    own = [
        f
        for f in frames
        if "/onefold/" in f[0] or not re.search(r"/(site|dist)-packages/|/lib/python3", f[0])
    ] or frames
    return (
        f"{own[0][0].rpartition('onefold/')[2]}:{own[0][1]} in {own[0][2]}"
        if own
        else "a place it could not name"
    )


def _words(cast: Cast) -> str:
    return f"{cast.ranks} on {cast.backend}, {cast.device}"


def report_of(
    found: Mapping[str, Any], rows: Sequence[Outcome], command: str, seconds: float
) -> dict[str, Any]:
    """What goes into the JSON."""
    import torch

    nccl = torch.cuda.nccl.version() if found["cuda"] and torch.cuda.is_available() else None
    return {
        "schema": SCHEMA,
        "ok": all(row.status != WRONG for row in rows),
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "machine": {**found, "nccl": ".".join(map(str, nccl)) if nccl else None},
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(TOLD)
        },
        "launcher": {
            n: os.environ[n] for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE") if n in os.environ
        },
        "checks": [row.to_json() for row in rows],
    }
