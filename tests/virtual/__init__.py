"""A virtual accelerator for tests: a torch device named "virtual" whose memory is host memory and
whose streams run late and out of order.

Use
    import virtual

    virtual.start(seed=3)                # once a process; later calls change the settings and begin anew, as `reset` does
    model.to("virtual"); ...             # 4 devices: "virtual:0" to "virtual:3"; torch.accelerator speaks of them
    torch.accelerator.synchronize()
    assert virtual.violations() == []    # each says which two uses no wait orders
    virtual.reset(4)                     # the next schedule: all work is finished, then all that was recorded is forgotten

    A process that has started it is marked for good: torch's accelerator is "virtual" there. A test
    starts it in a process of its own: in the function that `ranks.run_ranks` runs, or with

    @virtual.alone                       # runs the test in a process of its own, started with seed 0; skips where it cannot be had;
    def test_copies_are_ordered(): ...   # fails if there are violations at its end

What runs when
    Every operator on virtual tensors is put on the current stream of its device and returns at
    once. Nothing runs until the host waits for something (`.item()`, a copy to the host,
    `synchronize`, ...). Then the operations that are needed run, and others before or between
    them: the order is any order that streams and events allow, chosen by `seed`. The operations run
    torch's CPU kernels. So results are those of the CPU to the bit, in any order, unless a wait is
    missing. `start(seed=None)` runs each operation at once. Random operators take a seed when they
    are enqueued: results do not depend on the order.

What is as on CUDA
    Memory is cached by stream: a freed block goes back at once to the stream that allocated it, and
    the next allocation there gets it (last in, first out); `record_stream` delays that. An
    operation that is still to run holds raw pointers only. Pinned memory is read and written when a
    copy runs, not when it is enqueued; a pinned block that a copy still uses is given to nobody
    else. A copy from or to pageable memory waits. Mixed devices raise. There are 32 streams in a
    device's pool, then the first comes again. `event.query()` may say False for a while.

What is checked (`start(check=True)`)
    `violations()`: pairs of operations on overlapping bytes, one of them a write, that no stream
    order, event or host synchronization orders. Each is a `Violation` with both operations (name,
    stream, Python stack) and `reused`: whether the memory was freed and allocated again between
    them. An allocation counts as a use on its stream: another stream has to wait for what that
    stream did before.
    Host accesses count, too: CPU operators on pinned memory are seen; numpy, `tolist`, files and C
    code are told with `host_access(tensor, write=True)`.
    `with allowing_violations() as found:` gives those of its body and forgets them.

    `synchronizations()`: every time that the host waited (or copied from pageable memory), with
    name and Python stack. `with no_synchronization():` raises at the place instead, in this thread
    and in backward passes that autograd runs. `with no_synchronization(all_threads=True):` in every
    thread.

For stand-ins of libraries (NCCL, kernels of our own)
    enqueue(stream, function, reads=[...], writes=[...], ready=None, name="all_gather")
        `function(*cpu_reads, *cpu_writes)` runs when the stream gets there, with CPU tensors over
        the memory of the given ones. It must not wait for other virtual work or for other ranks.
        `ready()` is asked when all earlier operations of the stream ran, and again until it returns
        True. Other work goes on meanwhile, also while no host waits (a background thread sees to
        that). Its first call may start a transfer.
    cpu_alias(tensor): a CPU tensor over the same memory, at once and unchecked.

Others: `name_stream(stream, name)`, `drain()` (runs all that was enqueued; not counted as a
synchronization), `pending()` (what is still to run, by stream), `executed()`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).parent / "virtual_device.cpp"
BUILD = Path(__file__).parent / ".build"
DEVICES = 4


@dataclass(frozen=True)
class Use:
    """One operation of a violation.

    Attributes:
        kind: "reads", "writes" or "allocates".
        name: the operator, or the name given to `enqueue` or `host_access`.
        stream: the name of its stream, or "the host".
        stack: Python's frames outside torch, innermost first, "file:line function" each; empty in a
            thread without Python frames.
        backward: the autograd node that ran it, or "".
    """

    kind: str
    name: str
    stream: str
    stack: tuple[str, ...]
    backward: str

    def __str__(self) -> str:
        where = f" in {self.backward}" if self.backward else ""
        return f"{self.name} {self.kind} on {self.stream}{where}" + "".join(
            f"\n    {frame}" for frame in self.stack
        )


@dataclass(frozen=True)
class Violation:
    """Two uses of the same bytes that no wait orders. `reused`: between them the memory was freed
    and allocated again.

    Attributes:
        bytes: of the second use's range that overlaps.
        times: how often the same two places met.
    """

    first: Use
    second: Use
    reused: bool
    bytes: int
    times: int

    def __str__(self) -> str:
        reused = (
            "\n  (the memory was freed and allocated again between them)" if self.reused else ""
        )
        return (
            f"no wait orders ({self.times} times)\n  {self.first}\n  and\n  {self.second}{reused}"
        )

    def names(self, *words: str) -> bool:
        """Whether every word stands in the report."""
        return all(word in str(self) for word in words)


@dataclass(frozen=True)
class Synchronization:
    """A place where the host waited for the device, or copied from pageable memory.

    Attributes:
        name, stack, backward: as those of a `Use`.
        thread: as `threading.get_native_id()`.
    """

    name: str
    stack: tuple[str, ...]
    backward: str
    thread: int

    def __str__(self) -> str:
        return (
            self.name
            + (f" in {self.backward}" if self.backward else "")
            + "".join(f"\n    {frame}" for frame in self.stack)
        )


# ---------------------------------------------------------------------------------------------------- building

_library: ctypes.CDLL | None = None
_failure: str | None = None


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def _flags() -> list[str]:
    root = Path(torch.__file__).parent
    include = root / "include"
    return [
        "-std=c++20", "-O1", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden",
        f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}",
    ]  # fmt: skip


def _built() -> Path:
    """Where the library of this source and this torch is, or will be."""
    key = hashlib.sha256(
        SOURCE.read_bytes() + " ".join([torch.__version__, *_flags()]).encode()
    ).hexdigest()[:16]
    return BUILD / f"virtual_device_{key}.so"


def build() -> Path:
    """The compiled library: made once for each source and torch, by one process at a time (some 10
    seconds).

    Raises:
        RuntimeError: there is no compiler, or it failed.
    """
    library, flags = _built(), _flags()
    if library.exists():
        return library
    compiler = _compiler()
    if compiler is None:
        raise RuntimeError(
            "the virtual device needs a C++ compiler (g++ or clang++), and there is none"
        )
    BUILD.mkdir(exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        handle, name = tempfile.mkstemp(suffix=".so", dir=BUILD)
        os.close(handle)
        try:
            done = subprocess.run(
                [compiler, str(SOURCE), "-o", name, *flags],
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(
                    f"the virtual device did not compile with {compiler}:\n{done.stderr[-4000:]}"
                )
            os.replace(name, library)
        finally:
            Path(name).unlink(missing_ok=True)
    for old in BUILD.glob("virtual_device_*.so"):
        if old != library:
            old.unlink(missing_ok=True)
    return library


def available() -> bool:
    """Whether the device can be had here: a compiler is there (or the library was compiled before)
    and torch has no other accelerator.
    """
    global _failure
    if _library is not None:
        return True
    if _failure is None:
        _failure = ""
        other = torch.accelerator.current_accelerator()
        if sys.platform != "linux":
            _failure = "the virtual device is written for Linux"
        elif other is not None:
            _failure = f"this torch has an accelerator already: {other}"
        elif _compiler() is None and not _built().exists():
            _failure = "the virtual device needs a C++ compiler (g++ or clang++), and there is none"
    return not _failure


def why_not() -> str:
    """The reason why `available()` is False, as a sentence; "" if it is True."""
    available()
    return _failure or ""


# ---------------------------------------------------------------------------------------------------- tests in processes of their own


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """The test in a process of its own, with the device started (seed 0). Violations at its end
    fail it; without a device it is skipped.
    """
    import functools

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        import pytest

        import ranks

        if not available():
            pytest.skip(why_not())
        ranks.run_ranks(1, _run_alone, test.__module__, test.__qualname__, args, kwargs)

    return run


def _run_alone(module: str, name: str, args: Any, kwargs: Any) -> None:
    import importlib

    start(seed=0)
    getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)
    drain()
    found = violations()
    assert not found, "\n".join(map(str, found))


# ---------------------------------------------------------------------------------------------------- Python functions on streams

_functions: dict[int, tuple[Callable[[], Any], Callable[[], bool] | None]] = {}
_next_function = 0
_functions_lock = threading.Lock()
_raised: list[BaseException] = []


def _called(handle: int, question: int) -> int:
    try:
        function, ready = _functions[handle]
        if question == 1:
            return int(ready is None or bool(ready()))
        del _functions[handle]
        function()
        return 1
    except BaseException as error:
        _raised.append(error)
        if question == 0:
            return 0
        _functions[handle] = (_raise_again, None)  # what `ready` raised is the operation's error
        return 1


def _raise_again() -> None:
    raise _raised.pop()


_callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int)(_called)


# ---------------------------------------------------------------------------------------------------- start, reset, control


def _load() -> ctypes.CDLL:
    global _library
    if _library is not None:
        return _library
    library = ctypes.CDLL(str(build()))
    for name in ("load", "drain", "violations", "synchronizations", "pending"):
        getattr(library, "virtual_" + name).restype = ctypes.c_char_p
    library.virtual_executed.restype = ctypes.c_uint64
    library.virtual_rng.restype = ctypes.c_uint64
    library.virtual_set_rng.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64]
    library.virtual_configure.argtypes = [
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_double,
    ]
    library.virtual_reset.argtypes = [ctypes.c_uint64]
    library.virtual_name_stream.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_char_p]
    torch.utils.rename_privateuse1_backend("virtual")
    error = library.virtual_load().decode()
    if error:
        raise RuntimeError(f"the virtual device could not be registered: {error}")
    library.virtual_set_callback(_callback)
    _library = library
    torch._register_device_module("virtual", _device_module())
    torch.utils.generate_methods_for_privateuse1_backend()
    atexit.register(_exit)
    return library


def _exit() -> None:
    assert _library is not None
    _library.virtual_configure(0, 0, 0, 0, 5.0)
    _library.virtual_drain()
    # autograd's threads let go of the last backward pass: torch aborts where one does so while
    # Python ends
    time.sleep(0.05)
    _library.virtual_stop()


def start(
    seed: int | None = 0,
    *,
    check: bool = True,
    timeout: float = 120,
) -> None:
    """Loads the device if it isn't there, and begins anew with these settings.

    Args:
        seed: of the order in which operations run; None runs each at once.
        check: record who touches which bytes (`violations`).
        timeout: seconds after which a wait raises if nothing ran at all.

    Raises:
        RuntimeError: the device isn't `available`, it does not compile, or an operation of before
            failed.
    """
    if not available():
        raise RuntimeError(why_not())
    library = _load()
    library.virtual_configure(0, int(check), 1, 1, timeout)
    error = library.virtual_drain().decode()
    library.virtual_configure(int(seed is None), int(check), 1, 1, timeout)
    library.virtual_reset(seed or 0)
    if error:
        _fail(error)


def _fail(error: str) -> None:
    cause = _raised[-1] if _raised else None
    _raised.clear()
    raise RuntimeError(error) from cause


def reset(seed: int = 0) -> None:
    """Finishes all work, then forgets violations, synchronizations and uses of memory, and takes
    the next schedule.

    Raises:
        RuntimeError: an operation failed when it ran.
    """
    library = _load()
    error = library.virtual_drain().decode()
    library.virtual_reset(seed)
    if error:
        _fail(error)


def drain() -> None:
    """Runs all that was enqueued. It isn't counted as a synchronization, but orders as one.

    Raises:
        RuntimeError: an operation failed when it ran.
    """
    error = _load().virtual_drain().decode()
    if error:
        _fail(error)


def pending() -> str:
    """One line for each stream that has operations to run."""
    text: str = _load().virtual_pending().decode()
    return text


def executed() -> int:
    """Operations, waits and events that ran since the start or reset."""
    return int(_load().virtual_executed())


def _use(record: dict[str, Any]) -> Use:
    return Use(
        record["kind"],
        record["name"],
        record["stream"],
        tuple(record["stack"].splitlines()),
        record["backward"],
    )


def _violations(forget_from: int = -1) -> list[Violation]:
    records = json.loads(_load().virtual_violations(forget_from).decode())
    return [
        Violation(_use(r["first"]), _use(r["second"]), r["reused"], r["bytes"], r["times"])
        for r in records
    ]


def violations() -> list[Violation]:
    """The pairs of uses, found so far, that no wait orders."""
    return _violations()


@contextmanager
def allowing_violations() -> Iterator[list[Violation]]:
    """Gives a list that holds, after the body, the violations of its body; they are forgotten."""
    before = len(_violations())
    found: list[Violation] = []
    try:
        yield found
    finally:
        found.extend(_violations(before)[before:])


def synchronizations() -> list[Synchronization]:
    """Every host synchronization since the start or reset, in order."""
    records = json.loads(_load().virtual_synchronizations().decode())
    return [
        Synchronization(r["name"], tuple(r["stack"].splitlines()), r["backward"], r["thread"])
        for r in records
    ]


@contextmanager
def no_synchronization(all_threads: bool = False) -> Iterator[None]:
    """Host synchronizations raise RuntimeError inside: in this thread and in autograd's, or in all
    threads.
    """
    library = _load()
    library.virtual_forbid(int(all_threads), 1)
    try:
        yield
    finally:
        library.virtual_forbid(int(all_threads), -1)


def host_access(tensor: torch.Tensor, write: bool, name: str = "host access") -> None:
    """Says that the host reads or writes a pinned tensor now, in a way that torch doesn't see."""
    _load()
    torch.ops.virtual_device.host_access(tensor.detach(), write, name)


def name_stream(stream: torch.Stream, name: str) -> None:
    """The name of a stream in reports."""
    _load().virtual_name_stream(stream.device_index, stream.stream_id, name.encode())


def cpu_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory: what is there now, whatever is still to run. It keeps
    nothing alive.
    """
    alias: torch.Tensor = torch.ops.virtual_device.cpu_alias(tensor.detach())
    return alias


def enqueue(
    stream: torch.Stream | None,
    function: Callable[..., Any],
    reads: Sequence[torch.Tensor] = (),
    writes: Sequence[torch.Tensor] = (),
    ready: Callable[[], bool] | None = None,
    name: str | None = None,
) -> None:
    """Puts a Python function on a stream (None: the current one of the first tensor's device).

    Args:
        function: called as `function(*reads, *writes)` with CPU tensors over the same memory. It
            may not use virtual tensors.
        reads, writes: virtual or pinned tensors. One that is read and written stands in both.
        ready: asked when the earlier work of the stream ran, until it gives True. Other work runs
            meanwhile.
        name: in reports; the function's name by default.
    """
    global _next_function
    _load()
    reads, writes = [t.detach() for t in reads], [t.detach() for t in writes]
    if stream is None:
        on_device = [t for t in (*reads, *writes) if t.device.type == "virtual"]
        stream = torch.accelerator.current_stream(on_device[0].device if on_device else None)
    tensors = [cpu_alias(t) for t in (*reads, *writes)]
    with _functions_lock:
        _next_function += 1
        handle = _next_function
        _functions[handle] = (lambda: function(*tensors), ready)
    name = name or getattr(function, "__name__", "function")
    torch.ops.virtual_device.enqueue(
        reads, writes, handle, ready is not None, name, stream.device_index, stream.stream_id
    )


# ---------------------------------------------------------------------------------------------------- torch.virtual


def _index(device: Any) -> int:
    if device is None:
        return int(torch.accelerator.current_device_index())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(torch.accelerator.current_device_index()) if index is None else index


class _DeviceContext:
    """`with torch.virtual.device(1):`"""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.previous = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self.previous)


def _device_module() -> types.ModuleType:
    """What torch expects of `torch.virtual`."""
    assert _library is not None
    library = _library
    module = types.ModuleType("torch.virtual")

    def get_rng_state(device: Any = None) -> torch.Tensor:
        index = _index(device)
        words = [library.virtual_rng(index, 0), library.virtual_rng(index, 1)]
        return torch.frombuffer(
            bytearray(b"".join(w.to_bytes(8, "little") for w in words)), dtype=torch.uint8
        )

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        data = bytes(state.tolist())
        library.virtual_set_rng(
            _index(device), int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")
        )

    def manual_seed(seed: int) -> None:
        library.virtual_set_rng(_index(None), seed % 2**64, 0)

    def manual_seed_all(seed: int) -> None:
        for index in range(DEVICES):
            library.virtual_set_rng(index, seed % 2**64, 0)

    def stream(of: torch.Stream | None) -> Any:
        return nullcontext() if of is None else of

    values: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "is_bf16_supported": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "device": _DeviceContext,
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
        "set_stream": torch.accelerator.set_stream,
        "stream": stream,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [get_rng_state(i) for i in range(DEVICES)],
        "set_rng_state_all": lambda states: [set_rng_state(s, i) for i, s in enumerate(states)],
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "initial_seed": lambda: library.virtual_rng(_index(None), 0),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16, torch.float32],
        "empty_cache": torch.accelerator.empty_cache,
        "memory_allocated": torch.accelerator.memory_allocated,
        "max_memory_allocated": torch.accelerator.max_memory_allocated,
        "memory_reserved": torch.accelerator.memory_reserved,
        "max_memory_reserved": torch.accelerator.max_memory_reserved,
        "reset_peak_memory_stats": torch.accelerator.reset_peak_memory_stats,
        "memory_stats": torch.accelerator.memory_stats,
    }
    for name, value in values.items():
        setattr(module, name, value)
    return module
