"""What a device is, which one is this rank's, its streams, and the host's threads."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from onefold.cores import physical_cores

# -- facts -----------------------------------------------------------------------------------------
#
# Allocated and free bytes of a device, and which devices there are.


class MemoryFigures(NamedTuple):
    """Bytes of torch's allocator: of tensors, and reserved; now and at peak."""

    allocated: int
    allocated_peak: int
    reserved: int
    reserved_peak: int


def memory_figures(device: torch.device) -> MemoryFigures | None:
    """Return the allocator's counters, without synchronizing; None on a CPU."""
    if device.type in ("cpu", "meta"):
        return None
    where = with_index(device)
    a = torch.accelerator
    return MemoryFigures(
        a.memory_allocated(where),
        a.max_memory_allocated(where),
        a.memory_reserved(where),
        a.max_memory_reserved(where),
    )


def free_memory(device: torch.device | None = None) -> int:
    """Return the free bytes of an accelerator's memory: of `device`, or of the current one.

    Raises:
        RuntimeError: there is no accelerator.
    """
    return int(torch.accelerator.get_memory_info(device)[0])


def device_count() -> int:
    """Return the number of accelerators that torch can use."""
    return torch.accelerator.device_count() if available() else 0


def device_names() -> tuple[str, ...]:
    """Return the name of each accelerator."""
    found = torch.accelerator.current_accelerator() if available() else None
    if found is None:
        return ()
    module = torch.get_device_module(found)
    named = getattr(module, "get_device_name", None)
    return tuple(
        str(named(i)) if named is not None else f"{found.type}:{i}" for i in range(device_count())
    )


# -- a rank's device -------------------------------------------------------------------------------
#
# The device: its index, the current device of a thread, and its random state.


#: Devices whose tensors are in host memory, or have none.
_HOSTS = ("cpu", "meta")


def available() -> bool:
    """Whether torch has an accelerator that it can use."""
    return bool(torch.accelerator.is_available())


def default_device() -> torch.device:
    """Return this thread's current accelerator, with its index; the CPU if there is none."""
    found = torch.accelerator.current_accelerator() if available() else None
    return (
        torch.device("cpu")
        if found is None
        else torch.device(found.type, torch.accelerator.current_device_index())
    )


def with_index(device: torch.device | str) -> torch.device:
    """Return `device` with an index. "cuda" becomes this thread's current device, and so means the
    same device in every other thread.

    Raises:
        ValueError: there is no such device.
    """
    device = torch.device(device)
    if device.index is not None or device.type in _HOSTS:
        return device
    if (found := default_device()).type == device.type:
        return found
    try:
        return torch.empty(0, device=device).device  # such as mps
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"device={str(device)!r}: torch finds no such device here"
            f" ({str(error).splitlines()[0]}; accelerators: {', '.join(device_names()) or 'none'})."
            " Give a device that is there, or 'cpu'."
        ) from None


def of_local_rank(kind: str, local_rank: int) -> torch.device:
    """Return the accelerator of the rank with this number on its host.

    Launchers either show every device to every rank, or one to each (srun --gpus-per-task=1). With
    one device the index is 0 for every rank, hence the remainder.
    """
    return torch.device(kind, local_rank % max(1, torch.accelerator.device_count()))


def device_identity(device: torch.device) -> str:
    """Return what tells this device from all others, the same in every process: its UUID; "" if
    torch does not say, and on a CPU.
    """
    if device.type in _HOSTS:
        return ""
    try:
        found = torch.get_device_module(device).get_device_properties(device)
    except (AttributeError, NotImplementedError):
        return ""
    uuid = getattr(found, "uuid", None)
    # A process sees one part of a divided GPU (MIG), by its name
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    part = visible if visible.startswith("MIG-") else ""
    return "" if uuid is None else f"{uuid}{part}"


def guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make `device` this thread's current one inside the context."""
    if device.type in _HOSTS or device.index is None:
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


def set_default(device: torch.device) -> None:
    """Make `device` this thread's current one from now on."""
    if device.type not in _HOSTS and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def backend_name(device: torch.device | str) -> str:
    """Return torch's default backend for tensors of this device: "nccl", "gloo", ..."""
    kind = torch.device(device).type
    known = getattr(torch.distributed.Backend, "default_device_backend_map", {})
    return str(known.get(kind, "gloo"))


def rng_state(device: torch.device) -> torch.Tensor | None:
    """Return the device's random state, uint8 on the host; None on a CPU."""
    if device.type in _HOSTS:
        return None
    found: torch.Tensor = torch.get_device_module(device).get_rng_state(with_index(device))
    return found


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Restore a state that `rng_state` returned."""
    torch.get_device_module(device).set_rng_state(state, with_index(device))


# -- threads of the host ---------------------------------------------------------------------------
#
# How many threads of the host a rank's operators use.


def host_threads(world_size: int) -> int:
    """Return the number of threads for work on state that is stored on the host, at least 1.

    torchrun sets OMP_NUM_THREADS=1 if it starts several ranks and the user has not set it. That suits
    ranks whose host only launches kernels. With the optimizer on the host, one thread steps some 300
    million elements a second, and the other cores of this rank would be idle. So 1 is taken for
    torchrun's own word.

    `world_size`: the ranks of this machine, if no launcher says how many they are.
    """
    ranks, said = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"))
    share = max(1, physical_cores() // max(1, int(ranks) if ranks.isdigit() else world_size))
    now = torch.get_num_threads()  # the script may have set another number
    if not said:
        return min(now, share)
    by_torchrun = said == "1" and now == 1 and "TORCHELASTIC_RUN_ID" in os.environ
    return share if by_torchrun else now


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Let this thread's operators on the host use `count` threads, inside the context."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- streams and events ----------------------------------------------------------------------------
#
# Streams and events of a device.
#
# [Note: streams and threads] Each thread has its own current stream. A new thread begins on the
# device's default stream, whatever stream its creator uses. So a thread that works on tensors of
# another thread must be given that thread's stream (`use_stream(stream)`), or wait for an event.


#: The priority of urgent streams: torch has 0 for normal and -1 for high.
URGENT = -1
#: Seconds between two looks at an event that the host waits for.
POLL = 5e-5
_streamless: dict[str, bool] = {"cpu": True, "meta": True}


def has_streams(device: torch.device) -> bool:
    """Whether work for `device` is queued on streams while the host goes on. False on a CPU."""
    if device.type not in _streamless:
        try:
            torch.Stream(device=device)
            _streamless[device.type] = False
        except (RuntimeError, NotImplementedError, ValueError) as error:
            _streamless[device.type] = True
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            warnings.warn(
                f"torch has no streams for {device.type!r} devices here ({first}): copies and"
                " gathers run in the order of the computation, and nothing overlaps.",
                stacklevel=2,
            )
    return not _streamless[device.type]


def current_stream(device: torch.device) -> Any:
    """Return this thread's current stream; None if the device has no streams."""
    return torch.accelerator.current_stream(device) if has_streams(device) else None


def new_stream(device: torch.device, urgent: bool = False) -> Any:
    """Return a new stream; None if the device has none.

    `urgent`: its kernels go before waiting blocks of those on streams of normal priority. Right for
    short work that a computation will wait for: it would else begin behind a long kernel.
    """
    priority = URGENT if urgent else 0
    return torch.Stream(device=device, priority=priority) if has_streams(device) else None


@contextlib.contextmanager
def use_stream(stream: Any) -> Iterator[None]:
    """Queue this thread's work for the stream's device on `stream`, inside the context. None changes
    nothing.

    In contrast, `with stream:` stores the previous stream in the stream object, so that several threads
    could not use one at the same time.
    """
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    with torch.accelerator.device_index(stream.device.index):
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def new_event(device: torch.device) -> Any:
    """Return a new event of `device`, not recorded yet, with `elapsed_time`."""
    return torch.Event(device=device, enable_timing=True)


def reached(event: Any, seconds: float) -> bool:
    """Wait on the host until a recorded event is done, `seconds` at most; return whether it is. The
    host asks again and again, and so notices a device that is stuck.
    """
    end = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > end:
            return False
        time.sleep(POLL)
    return True


def synchronize(device: torch.device) -> None:
    """Wait on the host until all work queued on the device is done."""
    if has_streams(device):
        torch.accelerator.synchronize(device)


def capturing(device: torch.device) -> bool:
    """Whether the current stream is capturing a graph: work queued now runs at each replay."""
    return has_streams(device) and bool(current_stream(device).is_capturing())
