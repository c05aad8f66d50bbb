"""`onefold doctor --check`: start ranks, run the checks on them one by one, and end the ranks. A
rank that hangs or dies becomes a row of the table.

    without a launcher                    under a launcher of N ranks
    this process ── store, minder         rank 0 ── store (or the launcher's), minder, coordinator
        ├── rank 0                            └── rank 0 of the check
        └── rank 1                        rank 1 ── minder ── rank 1 of the check      ...

Checks run in child processes, which put their outcomes into a store. A generation of child
processes runs one check after another in one process group. If a check raises, exceeds its time
limit, or loses a rank, the generation is ended, and a new one continues with the next check. Under
a launcher, each of its ranks starts one child on its own device for the same reason.

| machine              | ranks for checks that one rank can run                | ranks for checks between ranks    |
|----------------------|-------------------------------------------------------|-----------------------------------|
| no GPU               | 2 ranks on gloo                                       | the same                          |
| one GPU              | 1 rank                                                | 2 ranks on gloo that share it     |
| several GPUs         | one rank per GPU on NCCL                              | the same                          |
| under a launcher     | its ranks                                             | the same                          |

With one GPU the checks between ranks come first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from onefold.doctor.checks import (
    CHECKS,
    LEFT_OUT,
    OK,
    PACKAGE,
    PREFIX,
    START,
    WHERE,
    WRONG,
    Check,
    Outcome,
    Plan,
    key,
    merge,
)
from onefold.doctor.ranks import Children, Stopped
from onefold.machine.calibration import CalibrationError
from onefold.processes.host import child_environment, local_store
from onefold.processes.signals import noted_signals

SCHEMA = "onefold-check/1"
RANK_MODULE = "onefold.doctor.checks"
#: Seconds between two looks at ranks and store.
INTERVAL = 0.05
#: Seconds that the other ranks get to finish once one has raised or ended.
GRACE = 3.0
#: Seconds after which no further check begins.
BUDGET = 110.0
#: With NCCL everything may take so many times as long: the checks make more than a hundred
#: communicators, each in up to a second.
WITH_NCCL = 2.0
#: Seconds that ranks get to write their stacks, and minders to end their children.
LAST_WORDS, ENDING = 0.5, 15.0
#: Prefixes of the environment variables that a report lists.
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
    """A set of ranks, and the names of the checks that they run."""

    ranks: int
    device: str
    backend: str
    checks: tuple[str, ...]


def casts_of(
    device: str, gpus: int, ranks: int | None, checks: Sequence[Check] = CHECKS
) -> list[Cast]:
    """Return which ranks run which checks on this machine, by the module's table.
    `ranks`: None chooses.
    """
    names = tuple(check.name for check in checks)
    if device == "cpu":
        return [Cast(ranks or 2, "cpu", "gloo", names)]
    if gpus > 1 or ranks == 1:
        return [Cast(ranks or gpus, "cuda", "nccl", names)]
    alone = tuple(check.name for check in checks if check.ranks == 1)
    return [
        Cast(ranks or 2, "cuda", "gloo", tuple(n for n in names if n not in alone)),
        Cast(1, "cuda", "nccl", alone),
    ]


def patience_of(cast: Cast) -> float:
    """Return how many times as long as on gloo these ranks may take."""
    return WITH_NCCL if cast.backend == "nccl" and cast.ranks > 1 else 1.0


@dataclass
class Minder(Children):
    """The child processes of this process: one for each of `ranks`, started anew in each
    generation.

    Attributes:
        address: host and port of the store. ranks: None for all ranks of a generation.
        environment: returns a child's environment, given its rank and the number of ranks.
    """

    address: tuple[str, int] = field(kw_only=True)
    ranks: Sequence[int] | None = field(kw_only=True)
    environment: Callable[[int, int], dict[str, str]] = field(kw_only=True)
    module: str = field(default=RANK_MODULE, kw_only=True)

    def start(self, generation: int, world: int) -> None:
        """Start one child for each of `ranks`, or for each rank of `world`."""
        for rank in range(world) if self.ranks is None else self.ranks:
            arguments = (*self.address, generation, rank, os.getpid())
            self.start_one(rank, self.module, arguments, self.environment(rank, world))

    def ended(self) -> dict[int, str]:
        """Return {rank: how it ended} of the children that have ended."""
        return {rank: self.how(rank, " (memory may have run out)") for rank in self.statuses()}

    def stands(self) -> dict[int, str]:
        """Return {rank: current line of its main thread} of the children that still run."""
        running = self.running.keys() - self.statuses().keys()
        for rank in running:
            self.running[rank].send_signal(WHERE)
        time.sleep(LAST_WORDS if running else 0.0)
        return {rank: _line_of(self.said(rank)) for rank in running}


class Checking:
    """The coordinator: runs generations of ranks through the checks, and makes a row per check."""

    def __init__(
        self,
        store: Any,
        minder: Minder,
        folder: str,
        per_node: Callable[[int], int],
        arrived: list[int],
        say: Callable[[str], None],
    ) -> None:
        self.store, self.minder, self.folder = store, minder, folder
        self.per_node, self.arrived, self.said = per_node, arrived, say
        self.generation = 0
        self.budget, self.deadline = BUDGET, float("inf")

    def rows(self, casts: Sequence[Cast]) -> list[Outcome]:
        """Run all checks. Returns a row for each check, in order, after a row for each cast that
        did not start.
        """
        known = {check.name: check for check in CHECKS}
        rows: dict[str, Outcome] = {}
        failed = []
        self.budget = BUDGET * max(map(patience_of, casts))
        self.deadline = time.monotonic() + self.budget

        def leave_out(checks: Iterable[Check], why: str) -> None:
            rows.update({check.name: Outcome(check.name, LEFT_OUT, why) for check in checks})

        for cast in casts:
            waiting = [known[name] for name in cast.checks]
            for check in [check for check in waiting if check.ranks > cast.ranks]:
                why = f"{cast.ranks} rank sends nothing; give it {check.ranks} ranks"
                leave_out([check], why)
                waiting.remove(check)
            while waiting:
                start, done = self._generation(cast, waiting)
                rows |= {row.name: row for row in done}
                waiting = waiting[len(done) :]
                if start.status != OK:
                    failed.append(start)
                    ranks = f"{cast.ranks} on {cast.backend}, {cast.device}"
                    leave_out(waiting, f"the ranks ({ranks}) did not start")
                    break
                if time.monotonic() > self.deadline:
                    leave_out(waiting, f"{self.budget:.0f} seconds were over before its turn")
                    break
        return [*failed, *(rows[check.name] for check in CHECKS if check.name in rows)]

    def _generation(self, cast: Cast, waiting: Sequence[Check]) -> tuple[Outcome, list[Outcome]]:
        """Start ranks and run checks as far as possible. Returns (outcome of the start, rows)."""
        number, self.generation = self.generation, self.generation + 1
        names = tuple(check.name for check in waiting)
        node = self.per_node(cast.ranks)
        plan = Plan(cast.ranks, cast.device, cast.backend, node, names, self.folder)
        self.store.set(f"{number}/plan", plan.encoded())
        self.minder.start(number, cast.ranks)
        done: list[Outcome] = []
        try:
            start = self._row(number, START, cast)
            for check in waiting if start.status == OK else ():
                if time.monotonic() > self.deadline:
                    break
                done.append(self._row(number, check, cast))
                if done[-1].ended:
                    break
            return start, done
        finally:
            self._over(number, cast.ranks, "done")

    def _row(self, number: int, check: Check, cast: Cast) -> Outcome:
        """Wait for all ranks' outcomes of a check, up to its time limit.

        Raises:
            Stopped: a signal arrived.
        """
        self.said(check.name)
        begun, ranks = time.monotonic(), cast.ranks
        deadline = begun + check.limit * patience_of(cast)
        found: dict[int, Outcome] = {}
        lost: dict[int, str] = {}
        while len(found) < ranks and time.monotonic() < deadline:
            if self.arrived:
                raise Stopped(self.arrived[0])
            ended = self._lost(number, ranks)  # before the store: a rank may write, then end
            for rank in range(ranks):
                left = key(number, check.name, rank)
                if rank not in found and self.store.check([left]):
                    found[rank] = Outcome(**json.loads(self.store.get(left)))
            lost = {rank: how for rank, how in ended.items() if rank not in found}
            if lost or any(outcome.ended for outcome in found.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(INTERVAL if len(found) < ranks else 0)
        seconds = time.monotonic() - begun
        missing = [rank for rank in range(ranks) if rank not in found]
        if missing:
            where = self._over(number, ranks, "hung")
            wrong = Outcome(check.name, WRONG, "", check.advice, seconds, ended=True)
            if lost:  # the others raise only because the lost rank's connections closed
                found = {rank: outcome for rank, outcome in found.items() if not outcome.ended}
                found |= {rank: replace(wrong, said=how) for rank, how in lost.items()}
            elif not any(outcome.ended for outcome in found.values()):
                stand = ", ".join(f"rank {rank} in {where.get(rank, '?')}" for rank in missing)
                wrong.said = f"not finished after {seconds:.0f} s: {stand}"
                found |= {rank: replace(wrong, where=where.get(rank, "")) for rank in missing}
        return merge(check, found, ranks)

    def _lost(self, number: int, ranks: int) -> dict[int, str]:
        """Return {rank: how it ended} of ended ranks. For the children of other minders, take what
        those minders wrote into the store.
        """
        lost = self.minder.ended()
        for rank in range(ranks) if self.minder.ranks is not None else ():
            if rank not in lost and self.store.check([f"{number}/ended/{rank}"]):
                lost[rank] = self.store.get(f"{number}/ended/{rank}").decode()
        return lost

    def _over(self, number: int, ranks: int, how: str) -> dict[int, str]:
        """End a generation, unless it has ended. If it hung, return where its ranks were."""
        if self.store.check([f"{number}/over"]):
            return {}
        self.store.set(f"{number}/over", how)
        where = self.minder.stands() if how == "hung" else {}
        mine = set(self.minder.running)
        self.minder.end()
        deadline = time.monotonic() + ENDING
        for rank in set(range(ranks)) - mine:
            while time.monotonic() < deadline and not self.store.check([f"{number}/gone/{rank}"]):
                time.sleep(INTERVAL)
            if self.store.check([f"{number}/stands/{rank}"]):
                where[rank] = self.store.get(f"{number}/stands/{rank}").decode()
        return where


def check_here(
    found: Mapping[str, Any],
    ranks: int | None,
    say: Callable[[str], None],
    module: str = RANK_MODULE,
) -> list[Outcome]:
    """Check this machine with ranks that this process starts.

    Args:
        found: the result of `facts.facts`.
        ranks: how many; None chooses.
        say: called with the name of the next check.

    Raises:
        CalibrationError: each rank needs a GPU, and there are too few.
        Stopped: a signal arrived; every rank is ended.
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
        patience = timedelta(seconds=START.limit)
        store = local_store(patience)

        def environment(rank: int, world: int) -> dict[str, str]:
            here, of = str(rank), str(world)
            placed = {"RANK": here, "WORLD_SIZE": of, "LOCAL_RANK": here, "LOCAL_WORLD_SIZE": of}
            return _environment(folder, device, world) | placed

        address = "127.0.0.1", store.port
        minder = Minder(folder, address=address, ranks=None, environment=environment, module=module)
        board = dist.PrefixStore(PREFIX, store)
        try:
            checking = Checking(board, minder, str(folder), lambda world: world, arrived, say)
            return checking.rows(casts_of(device, gpus, ranks))
        finally:
            minder.end()


def check_with_launcher(
    found: Mapping[str, Any], say: Callable[[str], None], module: str = RANK_MODULE
) -> list[Outcome]:
    """Check with the ranks that torchrun or another launcher has started, one of which is this
    process. Returns the rows on rank 0, [] on the others.

    Raises:
        Stopped: a signal arrived; this rank's child is ended.
    """
    import torch.distributed as dist

    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=START.limit)))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device, gpus = str(found["device"]), len(found["gpus"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    board = dist.PrefixStore(PREFIX, store)
    with _at_work() as (arrived, folder), contextlib.ExitStack() as stack:
        environment = _environment(folder, device, local)
        minder = Minder(
            folder, address=address, ranks=[rank], environment=lambda *_: environment, module=module
        )
        stack.callback(minder.end)
        if rank != 0:
            _mind(board, minder, rank, arrived)
            return []
        try:
            shared = _folder_of_all(stack) if local < world else str(folder)
            checking = Checking(board, minder, shared, lambda _: local, arrived, say)
            backend = "nccl" if device == "cuda" and local <= gpus else "gloo"
            names = tuple(check.name for check in CHECKS)
            return checking.rows([Cast(world, device, backend, names)])
        finally:
            board.set("end", "")
            # Wait for the other ranks: the store may end with this process
            deadline = time.monotonic() + ENDING
            while time.monotonic() < deadline and not all(
                board.check([f"left/{r}"]) for r in range(1, world)
            ):
                time.sleep(INTERVAL)


def _mind(board: Any, minder: Minder, rank: int, arrived: list[int]) -> None:
    """Run one child per generation on a launcher's rank other than 0, until rank 0 says to end."""
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
                for how in minder.ended().values():
                    board.set(f"{number}/ended/{rank}", how)
                time.sleep(INTERVAL)
            if board.get(f"{number}/over") == b"hung":
                for where in minder.stands().values():
                    board.set(f"{number}/stands/{rank}", where)
            minder.end()
            board.set(f"{number}/gone/{rank}", "")
            number += 1
    finally:
        with contextlib.suppress(Exception):  # rank 0 may be gone, and the store with it
            board.set(f"left/{rank}", "")


@contextlib.contextmanager
def _at_work() -> Iterator[tuple[list[int], Path]]:
    """Yield (signals that arrive inside the context, a temporary folder)."""
    with (
        noted_signals() as arrived,
        tempfile.TemporaryDirectory(prefix="onefold-check-", ignore_cleanup_errors=True) as name,
    ):
        yield arrived, Path(name)


def _folder_of_all(stack: contextlib.ExitStack) -> str:
    """Make a temporary folder in the working folder, which several nodes usually share."""
    made = partial(
        tempfile.TemporaryDirectory, prefix=".onefold-check-", ignore_cleanup_errors=True
    )
    try:
        folder = made(dir=Path.cwd())
    except OSError:
        folder = made()
    return stack.enter_context(folder)


def _environment(folder: Path, device: str, ranks: int) -> dict[str, str]:
    """Return the environment of a training, with settings that make kernels repeatable."""
    ours = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    alone = "RANK" not in os.environ
    return child_environment({**ours, **os.environ}, ranks, folder, compiling=False, alone=alone)


def _line_of(said: str) -> str:
    """Return the current thread's innermost line outside libraries, from faulthandler's output."""
    current = said.rpartition("Current thread")[2]
    frames = re.findall(r'File "(.*?)", line (\d+) in (\S+)', current)
    library = re.compile(r"/(site|dist)-packages/|/lib/python3")
    own = [f for f in frames if f[0].startswith(PACKAGE) or not library.search(f[0])] or frames
    if not own:
        return "a place it could not name"
    file, line, function = own[0]
    return f"{file.removeprefix(PACKAGE)}:{line} in {function}"


def report_of(
    found: Mapping[str, Any], rows: Sequence[Outcome], command: str, seconds: float
) -> dict[str, Any]:
    """Return the report for the JSON."""
    import torch

    nccl = torch.cuda.nccl.version() if found["cuda"] and torch.cuda.is_available() else None
    return {
        "schema": SCHEMA,
        "ok": not any(row.status == WRONG for row in rows),
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
