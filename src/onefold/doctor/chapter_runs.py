"""How the chapters run: on which devices and until when; start ranks for one measurement, watch and
end them.

    run_ranks ──► rank 0    python -m MODULE FOLDER 0
             └──► rank 1    python -m MODULE FOLDER 1      ...

FOLDER is temporary. It holds the job, the file through which the ranks find each other, and the
figures that each rank leaves.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from onefold.doctor.ranks import INTERVAL, Children, Stopped
from onefold.processes.host import LAUNCHED, child_environment
from onefold.processes.signals import end_with_parent, noted_signals, quiet_third_parties

#: What is measured, in this order. See `chapters`.
CHAPTERS = ("block", "exchange", "copies", "communicators", "lost", "compile", "sums")
JOB, STORE = "job.json", "store"
#: How a run ended.
DONE, FAILED, TIMEOUT = "ok", "failed", "timeout"
#: How a run ended that says nothing about Onefold: the device is too small; the time of all was up.
MEMORY, CUT_OFF = "out of memory", "cut off"
#: Seconds that the ranks of one run get, so that no chapter takes the time of those behind it.
LIMIT = 120.0
#: Seconds after which the whole of `onefold doctor --check` should have ended.
WHOLE = 570.0
#: Seconds that the other ranks get to finish once one has failed.
GRACE = 3.0
RANK_MODULE = "onefold.doctor.chapter_rank"


@dataclass(frozen=True)
class Scope:
    """Where the chapters run, and until when.

    Attributes:
        device: "cuda", or "cpu" for a rehearsal.
        gpus: how many there are. In a rehearsal on a CPU, how many ranks stand for them.
        gpu, capacity: name and bytes of memory of the first one; "" and 0 on a CPU.
        tiny: with models, messages and waits so small that a CPU does it in seconds.
        steps: timed optimizer steps of a training.
        deadline: the moment (of time.monotonic) at which everything has to end.
        limit: seconds that one start of ranks gets.
        say: called with what was started, and how it ended.
    """

    device: str
    gpus: int
    gpu: str = ""
    capacity: int = 0
    tiny: bool = False
    steps: int = 4
    deadline: float = float("inf")
    limit: float = LIMIT
    say: Callable[[str], None] = lambda text: None

    def seconds(self) -> float:
        """How long ranks that start now may run."""
        return max(0.0, min(self.limit, self.deadline - time.monotonic()))


def scope_of(
    found: Mapping[str, Any],
    ranks: int | None,
    rehearse: bool,
    begun: float,
    say: Callable[[str], None],
) -> Scope | None:
    """Return how the chapters run on this machine, None if it has no GPU and nothing is rehearsed.

    Args:
        found: the result of `facts.facts`. ranks: how many at most; None chooses.
        rehearse: run everything tiny, also on a CPU, where two ranks stand for GPUs.
        begun: when the whole call began, by time.monotonic.
    """
    device, gpus = str(found["device"]), found["gpus"]
    if device == "cpu" and not rehearse:
        return None
    on_gpus: dict[str, Any] = {}
    if device != "cpu":
        on_gpus = {"gpu": str(gpus[0]["name"]), "capacity": int(gpus[0]["total"])}
    return Scope(
        device,
        min(len(gpus), ranks or len(gpus)) if on_gpus else ranks or 2,
        **on_gpus,
        tiny=rehearse,
        steps=2 if rehearse else 4,
        deadline=begun + WHOLE,
        say=say,
    )


@dataclass
class RanksRun:
    """One start of ranks.

    Attributes:
        status: DONE, FAILED, TIMEOUT, MEMORY or CUT_OFF. error: "" for none.
        ranks: the figures of each rank.
    """

    name: str
    status: str
    ranks: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `RanksRun(**d)` takes."""
        return asdict(self)


def run_ranks(
    name: str, scope: Scope, ranks: int, job: dict[str, Any], module: str = RANK_MODULE
) -> RanksRun:
    """Start `python -m MODULE FOLDER RANK` for each rank, and wait until all have left figures, one
    has failed, or the time is up. No process and no file is left.

    Args:
        job: what the ranks do. They also get the device, their number and this process's id.

    Raises:
        Stopped: a signal arrived; every rank is ended.
    """
    begun, limit = time.monotonic(), scope.seconds()
    with (
        noted_signals() as arrived,
        tempfile.TemporaryDirectory(prefix="onefold-chapter-", ignore_cleanup_errors=True) as made,
    ):
        folder = Path(made)
        whole = {"device": scope.device, "ranks": ranks, "parent": os.getpid(), **job}
        (folder / JOB).write_text(json.dumps(whole), encoding="utf-8")
        children = Children(folder)
        try:
            for rank in range(ranks):
                placed = _environment(folder, rank, ranks)
                children.start_one(rank, module, (folder, rank), placed)
            failed = _wait(children, arrived, begun + limit)
            found = _outcome(name, scope, children, failed, limit)
        finally:
            children.end()
    found.seconds = time.monotonic() - begun
    scope.say(f"{name}: {found.status} in {found.seconds:.0f} s")
    return found


def _environment(folder: Path, rank: int, ranks: int) -> dict[str, str]:
    """The environment of a training that this machine alone takes part in."""
    ours = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform.startswith("linux") else {}
    here = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    placed = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    settings = child_environment({**ours, **here}, ranks, folder, compiling=False, alone=True)
    return settings | placed


def _wait(children: Children, arrived: list[int], deadline: float) -> int | None:
    """Wait for all ranks. Returns the rank that failed first, None if all ended well or the time
    was up. Raises Stopped.
    """
    failed: int | None = None
    while True:
        if arrived:
            raise Stopped(arrived[0])
        statuses = children.statuses()
        if failed is None:
            failed = next((rank for rank, status in sorted(statuses.items()) if status), None)
            if failed is not None:
                deadline = min(deadline, time.monotonic() + GRACE)
        if len(statuses) == len(children.running) or time.monotonic() >= deadline:
            return failed
        time.sleep(INTERVAL)


def _outcome(
    name: str, scope: Scope, children: Children, failed: int | None, limit: float
) -> RanksRun:
    files = [children.folder / f"rank{rank}.json" for rank in children.running]
    if all(file.exists() for file in files):  # a library may still stumble at its exit
        return RanksRun(name, DONE, [json.loads(file.read_text()) for file in files])
    if failed is None:
        error = f"not finished after {limit:.0f} s; rank 0 last said: {_end_of(children.said(0))}"
        return RanksRun(name, TIMEOUT if limit >= scope.limit else CUT_OFF, error=error)
    said = _end_of(children.said(failed))
    short = "out of memory" in said.lower()
    error = f"rank {failed} {children.how(failed).partition(':')[0]}: {said}"
    return RanksRun(name, MEMORY if short else FAILED, error=error)


def _end_of(text: str, characters: int = 1500) -> str:
    return text.strip()[-characters:] or "nothing"


# -- in a rank -------------------------------------------------------------------------------------


def read_job(folder: Path) -> dict[str, Any]:
    """Read the job. From now on this process ends with the one that started it."""
    job: dict[str, Any] = json.loads((folder / JOB).read_text(encoding="utf-8"))
    end_with_parent(job["parent"])
    return job


def put(file: Path, value: Any) -> None:
    """Write a file that is whole at any moment."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.rename(file)


def join(job: dict[str, Any], folder: Path, rank: int) -> str:
    """Take a device and join the other ranks. Returns the backend: NCCL if each rank has a GPU,
    else gloo.
    """
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if job["device"] == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        backend = "nccl" if job["ranks"] <= gpus else "gloo"
    store = dist.FileStore(str(folder / STORE), job["ranks"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=job["ranks"])
    return backend


def as_a_rank(work: Callable[[dict[str, Any], Path, int], dict[str, Any]]) -> NoReturn:
    """Do the job that the command line names, leave its figures, and end this process at once."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    try:
        job = read_job(folder)
        quiet_third_parties()
        put(folder / f"rank{rank}.json", work(job, folder, rank))
        import torch.distributed as dist

        if dist.is_initialized():  # leaving earlier would break the others' connections
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
