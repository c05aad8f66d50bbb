"""Run one function on N ranks, each a process of one thread, and bring back what every rank
returned or raised.

The ranks are forked from a fork server that has imported torch once, so a test pays some 20 ms for
a process instead of the seconds of an import, and still gets fresh processes: nothing a test does
(a killed rank, a hung collective, a patched function, a leaked buffer) is seen by the next one.

    pytest ── starts once ──► fork server (torch imported, no thread of its own)
       │                          ├── fork ──► rank 0 ┐  rendezvous through a FileStore in a temporary folder,
       │                          └── fork ──► rank 1 ┘  gloo over the loopback interface
       └◄──────── one pipe a rank: value, or exception and traceback

There are several fork servers, by what they have imported (`SERVERS`). A test takes "core" unless
its module says `SERVER = "libraries"`, or its call says `server=`. Each is started when it is first
needed; pytest-xdist's workers share those of the process that has started them (`start_shared`).

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, resource_tracker
from typing import Any

#: Imported once, by every fork server. A name that cannot be imported is passed over there and met
#: again in the rank.
PRELOADED = [
    "pytest", "torch", "torch.distributed", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo",
    "torch.nn.parallel", "torch.distributed.pipelining", "torch.utils.checkpoint", "onefold.sharding", "onefold.checkpoint",
    "onefold.offload", "onefold.offload.activations", "onefold.offload.step", "onefold.plan",
    "zoo", "ranks",
]  # fmt: skip
#: {name of a fork server: what it imports before that}
SERVERS: dict[str, tuple[str, ...]] = {
    "core": (),
    "libraries": ("libraries",),
    "served": ("served_libraries",),
}
#: The folder of the sockets of fork servers that are shared, in the environment.
SHARED = "ONEFOLD_TEST_FORK_SERVERS"
#: The device on which models and batches of ranks are made, in the environment: "cuda", where the
#: ranks share one GPU and gloo carries its tensors through the host. The CPU if it is not set.
DEVICE = "ONEFOLD_TEST_DEVICE"
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


#: The one that ranks are forked from where nothing else is said; conftest.py sets it by each test's
#: module.
server_of_test = "core"
_servers: dict[tuple[str, ...], forkserver.ForkServer] = {}


class _SharedServer(forkserver.ForkServer):
    """One that another process has started, and will end."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._forkserver_address = address
        # What a rank would hold on to, lest its server ends before it
        self._forkserver_alive_fd = os.pipe()[1]

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()


def start_shared(names: Iterable[str], folder: str) -> None:
    """Start these fork servers, to be found in `folder` by processes that have its name in their
    environment as `SHARED`. They end with this process.
    """
    for name in names:
        found = connection.arbitrary_address
        connection.arbitrary_address = lambda family, name=name: f"{folder}/{name}"  # type: ignore
        try:
            _context(name)
        finally:
            connection.arbitrary_address = found


def preload(*modules: str) -> None:
    """Have the fork servers that start from now on import `modules` too, for a program whose ranks
    all need the same slow import.
    """
    PRELOADED.extend(name for name in modules if name not in PRELOADED)


def stop_fork_servers() -> None:
    """End them and wait for it: they would by themselves, some seconds after this process."""
    for server in _servers.values():
        pid = server._forkserver_pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            server._stop()
    _servers.clear()


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
    server: str = "",
    **kwargs: Any,
) -> list[Any]:
    """Return [function(*args, **kwargs) on rank 0, on rank 1, ...].

    Args:
        fresh: in processes that have imported nothing before, also nothing of what tests preload.
        server: one of `SERVERS`, if it is not to be the one of the test's module.

    Raises:
        RankFailure: A rank raised, died or took longer than `timeout` seconds.
    """
    outcomes = outcomes_of(
        world_size,
        function,
        *args,
        timeout=timeout,
        grace=GRACE,
        fresh=fresh,
        server=server,
        **kwargs,
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
    server: str = "",
    **kwargs: Any,
) -> list[Outcome]:
    """What became of each rank, failures included. With `grace`, ranks are killed that long after
    the first failure.
    """
    context: Any = (
        multiprocessing.get_context("spawn") if fresh else _context(server or server_of_test)
    )
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
    if DEVICE in os.environ:
        torch.set_default_device(os.environ[DEVICE])
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
    shown = [f for f in frames if f"-packages{os.sep}torch{os.sep}" not in f.filename]
    return "\n".join(f"    {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in shown or frames)


def _context(name: str = "core") -> Any:
    """multiprocessing's, which from now on forks from the server `name`, which runs."""
    modules = ("uncollected", *SERVERS[name], *PRELOADED, "frozen")
    if modules not in _servers:
        shared = os.path.join(os.environ.get(SHARED, ""), name)
        started = os.environ.get(SHARED) and os.path.exists(shared)
        _servers[modules] = _SharedServer(shared) if started else forkserver.ForkServer()
        _servers[modules].set_forkserver_preload(list(modules))
    # It knows of one server only, by these names
    one = forkserver._forkserver = _servers[modules]
    forkserver.connect_to_new_process = one.connect_to_new_process
    forkserver.ensure_running = one.ensure_running
    with _importable_path():
        one.ensure_running()
    return multiprocessing.get_context("forkserver")


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
        "CUDA_VISIBLE_DEVICES": "0" if os.environ.get(DEVICE, "").startswith("cuda") else "",
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
