"""Run one function on N ranks, each a process of one thread, and bring back what every rank
returned or raised.

The ranks are forked from a fork server that has imported torch once, so a test pays some 20 ms for
a process instead of the seconds of an import, and still gets fresh processes: nothing a test does
(a killed rank, a hung collective, a patched function, a leaked buffer) is seen by the next one.

    pytest ── starts once ──► fork server (torch imported, no thread of its own)
       │                          ├── fork ──► rank 0 ┐  rendezvous through a FileStore in a temporary folder,
       │                          └── fork ──► rank 1 ┘  gloo over the loopback interface
       └◄──────── one pipe a rank: value, or exception and traceback

A function to run must be importable (defined at the top of its module) and so must be what it
returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.forkserver import _forkserver as fork_server  # type: ignore[attr-defined]
from typing import Any

#: Imported once, by the fork server. A name that cannot be imported is passed over there and met
#: again in the rank.
PRELOADED = [
    "pytest", "torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "torch.utils.checkpoint", "onefold.shard", "ranks",
    "trials",
]  # fmt: skip
#: Seconds that ranks may take; more than any test needs on a busy machine, since it only bounds a
#: hang.
TIMEOUT = 300.0
#: Seconds that the other ranks get to finish by themselves once one rank has failed.
GRACE = 5.0
#: Seconds that ranks that have answered get to end by themselves. Only a rank that hangs in its
#: exit takes them.
LEAVING = 60.0
PR_SET_PDEATHSIG = 1


def absolute_path() -> str:
    """The search path of this process as a PYTHONPATH for others, whatever their working directory
    is.
    """
    return os.pathsep.join(os.path.abspath(p) for p in sys.path if p)


def preload(*modules: str) -> None:
    """Have the fork server import `modules` too, before the next rank: for tests whose ranks all
    need the same slow import.
    """
    missing = [name for name in modules if name not in PRELOADED]
    if missing:
        PRELOADED.extend(missing)
        stop_fork_server()  # the next rank starts a new one


@contextlib.contextmanager
def preloaded(*modules: str) -> Iterator[None]:
    """Inside, the fork server has imported `modules` too, before all others (which may serve names
    that these look for); afterwards there is a new one without.
    """
    before = list(PRELOADED)
    PRELOADED[:0] = modules
    stop_fork_server()
    try:
        yield
    finally:
        PRELOADED[:] = before
        stop_fork_server()


def stop_fork_server() -> None:
    """End the fork server and wait for it: it would by itself, some seconds after this process."""
    pid = fork_server._forkserver_pid
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        fork_server._stop()


class RankFailure(AssertionError):
    """At least one rank raised, died or did not finish in time; the message holds what happened on
    every rank.
    """


@dataclass(frozen=True)
class Outcome:
    """What became of one rank.

    Attributes:
        rank: Its number.
        value: What the function returned, None if it did not.
        error: The class name of what it raised, "killed" if its time ran out, "died" if it ended
            without a word.
        message: The text of the exception.
        trace: The traceback as text, empty if nothing was raised.
        seconds: Wall time from the start of the function to its end, as the rank measured it.
        exitcode: The exit status of the process, negative for a signal.
    """

    rank: int
    value: Any = None
    error: str = ""
    message: str = ""
    trace: str = ""
    seconds: float = 0.0
    exitcode: int | None = None


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Return [function(*args, **kwargs) on rank 0, on rank 1, ...].

    Args:
        fresh: in processes that have imported nothing before, also nothing of what tests preload.

    Raises:
        RankFailure: A rank raised, died or took longer than `timeout` seconds.
    """
    outcomes = outcomes_of(
        world_size, function, *args, timeout=timeout, grace=GRACE, fresh=fresh, **kwargs
    )
    failed = [o for o in outcomes if o.error]
    if failed:
        parts = [
            f"rank {o.rank}: {o.error}: {o.message} (exit {o.exitcode})\n{o.trace}" for o in failed
        ]
        raise RankFailure(
            f"{len(failed)} of {world_size} ranks failed in {function.__name__}\n"
            + "\n".join(parts)
        )
    return [o.value for o in outcomes]


def outcomes_of(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT,
    grace: float | None = None,
    process_group: bool = True,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Outcome]:
    """What became of each rank, failures included. With `grace`, ranks are killed that long after
    the first failure.
    """
    context: Any = multiprocessing.get_context("spawn") if fresh else _context()
    with tempfile.TemporaryDirectory(prefix="onefold-ranks-") as folder:
        readers, processes = [], []
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            target_args = (
                rank,
                world_size,
                folder if process_group else None,
                writer,
                timeout,
                function,
                args,
                kwargs,
            )
            process = context.Process(
                target=_rank_main, args=target_args, daemon=True, name=f"rank-{rank}"
            )
            with _importable_path():
                process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        try:
            return _collect(readers, processes, timeout, grace)
        finally:
            _reap(processes)
            for reader in readers:
                reader.close()


def _collect(
    readers: list[Any], processes: list[Any], timeout: float, grace: float | None
) -> list[Outcome]:
    """Wait for one message of every rank, until the deadline. A rank that ends without one has
    died.
    """
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout
    waiting = dict(enumerate(readers))
    while waiting and (left := deadline - time.monotonic()) > 0:
        for reader in connection.wait(list(waiting.values()), timeout=left):
            rank = next(r for r, candidate in waiting.items() if candidate is reader)
            del waiting[rank]
            try:
                outcomes[rank] = pickle.loads(reader.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                outcomes[rank] = Outcome(
                    rank, error="died", message="the process ended without a result"
                )
            if outcomes[rank].error and grace is not None:
                deadline = min(deadline, time.monotonic() + grace)
    for rank in waiting:
        outcomes[rank] = Outcome(
            rank,
            error="killed",
            message=f"no result within {timeout:.0f} s (or {grace} s after a failure)",
        )
        processes[rank].kill()
    _reap(processes, patience=LEAVING)
    return [_with_exitcode(outcomes[rank], processes[rank].exitcode) for rank in sorted(outcomes)]


def _with_exitcode(outcome: Outcome, exitcode: int | None) -> Outcome:
    return Outcome(**{**outcome.__dict__, "exitcode": exitcode})


def _reap(processes: list[Any], patience: float = 0.0) -> None:
    """Leave no process behind: wait up to `patience` seconds for each to end by itself, then kill
    it.
    """
    deadline = time.monotonic() + patience
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(10.0)


def _rank_main(
    rank: int,
    world_size: int,
    folder: str | None,
    writer: Any,
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """The life of one rank: join, run, answer, leave. The process group is destroyed on a clean
    exit only.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to pytest, which kills the ranks
    import torch
    import torch.distributed as dist

    from products_by_shape import install

    install()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    begin = time.monotonic()
    try:
        if folder is not None:
            store = dist.FileStore(os.path.join(folder, "rendezvous"), world_size)
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            # A rank that was through at once would end while another one still connects to it
            dist.barrier()
        value = function(*args, **kwargs)
        outcome = Outcome(rank, value=value, seconds=time.monotonic() - begin)
        payload = pickle.dumps(outcome)
    except BaseException as error:  # a rank answers whatever happens to it, SystemExit included
        trace = _own_frames(error)
        seconds = time.monotonic() - begin
        payload = pickle.dumps(
            Outcome(
                rank, error=type(error).__name__, message=str(error), trace=trace, seconds=seconds
            )
        )
        writer.send_bytes(payload)
        writer.close()
        os._exit(1)
    writer.send_bytes(payload)
    writer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _own_frames(error: BaseException) -> str:
    """The traceback without torch's own frames, a line for each of the others."""
    frames = traceback.extract_tb(error.__traceback__)
    shown = [f for f in frames if f"{os.sep}torch{os.sep}" not in f.filename] or list(frames)
    return "\n".join(f"    {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in shown)


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "frozen"])
    with _importable_path():
        fork_server.ensure_running()
    return context


@contextlib.contextmanager
def _importable_path() -> Iterator[None]:
    """Give the fork server the search path of this process (it reads PYTHONPATH only), and its
    ranks one thread.
    """
    wanted = {
        "PYTHONPATH": absolute_path(),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # DDP, the reference, warns at each search for unused parameters
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
