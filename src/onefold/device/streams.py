"""Streams and events of a device.

[Note: streams and threads] A stream is current in one thread. A new thread begins on the device's
default stream, whatever its maker
computed on: a thread that works on tensors of another is given that one's stream
(`use_stream(stream)`), or orders itself by an event.

[Note: simulated streams] Inside `clocked(clock)` streams and events are the clock's, on any device:
simulation/clock.py times a step with them in which nothing is computed. The code that asks for streams
and waits on them is the same.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch

_streamless: dict[str, bool] = {"cpu": True, "meta": True}


class Stream(Protocol):
    """What is used of a torch.Stream."""

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool: ...


class Clock(Protocol):
    """Streams and events of a simulation. See [Note: simulated streams]."""

    def current_stream(self) -> Any: ...
    def new_stream(self, name: str) -> Any: ...
    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]: ...
    def new_event(self) -> Any: ...
    def synchronize(self) -> None: ...

    def kernel(
        self, name: str, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]
    ) -> None:
        """One kernel on the current stream, of the engine's own: one that adds up parts."""
        ...

    def collective(self, event: Any, ranks: list[int], ring: bool, communicator: str) -> Any:
        """A work for a collective that the current stream launches: `event` of the traffic ledger,
        among the global `ranks`.

        Args:
            ring: each rank's bytes enter a node once; else each peer is sent its own part.
            communicator: which of those of these ranks; its collectives follow one another.
        """
        ...


_clock: ContextVar[Clock | None] = ContextVar("onefold's simulated streams", default=None)


@contextlib.contextmanager
def clocked(clock: Clock) -> Iterator[None]:
    """Inside, this thread's streams and events are those of `clock`."""
    before = _clock.set(clock)
    try:
        yield
    finally:
        _clock.reset(before)


def simulated() -> Clock | None:
    """The clock that stands in for this thread's streams; None in every run that computes."""
    return _clock.get()


def has_streams(device: torch.device) -> bool:
    """Whether work for `device` is put into streams, and the host goes on. False on a CPU."""
    if _clock.get() is not None:
        return True
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
    """The stream that this thread computes on; None where the device has none."""
    if (clock := _clock.get()) is not None:
        return clock.current_stream()
    return torch.accelerator.current_stream(device) if has_streams(device) else None


def new_stream(device: torch.device, name: str = "") -> Any:
    """A stream beside the computation; None where the device has none. `name`: what a simulation
    calls it.
    """
    if (clock := _clock.get()) is not None:
        return clock.new_stream(name)
    return torch.Stream(device=device) if has_streams(device) else None


def use_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, this thread's work for the stream's device goes to `stream` (None changes
    nothing).
    """
    if stream is not None and (clock := _clock.get()) is not None:
        return clock.use_stream(stream)
    return contextlib.nullcontext() if stream is None else _Using(stream)


class _Using:
    """`with stream:`, without keeping the stream's state in the stream itself: several threads may
    use one at a time.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = torch.accelerator.current_stream(self.stream.device)
        self.guard = torch.accelerator.device_index(self.stream.device.index)
        self.guard.__enter__()
        torch.accelerator.set_stream(self.stream)

    def __exit__(self, *raised: object) -> None:
        torch.accelerator.set_stream(self.before)
        self.guard.__exit__(*raised)


def new_event(device: torch.device, timing: bool = False) -> Any:
    """An event of `device`, not recorded yet. `timing`: for `seconds_between`."""
    if (clock := _clock.get()) is not None:
        return clock.new_event()
    return torch.Event(device=device, enable_timing=timing)


def seconds_between(first: Any, second: Any) -> float:
    """Seconds from one recorded event to another; both were made for timing, and are done."""
    return float(first.elapsed_time(second)) / 1000


def synchronize(device: torch.device) -> None:
    """The host waits until everything that the device was given is done."""
    if (clock := _clock.get()) is not None:
        clock.synchronize()
    elif has_streams(device):
        torch.accelerator.synchronize(device)


def capturing(device: torch.device) -> bool:
    """Whether the current stream records a graph: what is given to it now runs later, again and
    again.
    """
    if not has_streams(device):
        return False
    stream = current_stream(device)
    if hasattr(stream, "is_capturing"):
        return bool(stream.is_capturing())
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())
