"""Copies between one device and the host on a stream of their own.

    computing    f0     f1     f2 ...             the host waits only in `wait`, or beyond HOST_WINDOWS
    copies          [c0 ]  [c1 ]

[Note: nothing is freed under a copy] torch's allocator reuses freed device memory in the order of
the stream on which it was allocated, and knows nothing of the copy stream. So the copy holds its
device tensor until the host has seen that the copy is done, or until the computing stream waits for
the copy: work that gets the memory next then runs after it. At most `window` bytes are held like
this; beyond them the computing stream, not the host, waits for the oldest copy. Host memory has no
stream order, so the host tensor is held until the copy is done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from onefold.device.pinned import host_empty
from onefold.device.streams import current_stream, has_streams, new_stream, use_stream

#: Bytes of device memory that copies in flight may hold before the computing stream waits for the
#: oldest: some milliseconds of transfer.
WINDOW = 128 << 20
#: Windows of host memory that copies in flight may hold before the host waits for the oldest.
HOST_WINDOWS = 8


class Ticket(Protocol):
    """A copy in flight: an event of the copy stream."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class _Flying:
    """A copy in flight. `here` are its tensors on the device, `host` those on the host. `stream` is
    the computing stream from which it was started.
    """

    __slots__ = ("done", "here", "host", "nbytes", "stream", "ticket")

    def __init__(
        self,
        ticket: Any,
        ends: tuple[torch.Tensor, ...],
        stream: Any,
        done: Callable[[], None] | None,
    ) -> None:
        self.ticket, self.stream, self.done = ticket, stream, done
        self.here: tuple[torch.Tensor, ...] = tuple(t for t in ends if t.device.type != "cpu")
        self.host: tuple[torch.Tensor, ...] = tuple(t for t in ends if t.device.type == "cpu")
        self.nbytes = max(t.numel() * t.element_size() for t in ends)

    def let_go(self) -> None:
        """Release the device's tensors, and call `done`."""
        self.here = ()
        done, self.done = self.done, None
        if done is not None:
            done()


class CopyStream:
    """Copies of one device, in order. On a device without streams a copy is done when the call
    returns, and its ticket is None.

    Attributes:
        asynchronous: whether copies run on a stream of their own.
        stream: that stream; None without streams.
    """

    def __init__(
        self,
        device: torch.device,
        window: int = WINDOW,
        name: str = "copies",
        urgent: bool = False,
    ) -> None:
        """
        Args:
            window: bytes. See [Note: nothing is freed under a copy].
            name: what a simulation calls the stream.
            urgent: as of `new_stream`.
        """
        self.device, self.window = device, window
        self.asynchronous = has_streams(device)
        self.stream = new_stream(device, name, urgent)
        self._holding: deque[_Flying] = deque()  # copies that hold device memory
        self._landing: deque[_Flying] = deque()  # copies that hold host memory only
        self._held = self._on_host = 0
        self._idle = True
        # Optimizer steps in the backward pass copy from a thread of their own
        self._lock = threading.RLock()

    def current(self) -> Any:
        """Return the computing stream of this thread; None without streams."""
        return current_stream(self.device) if self.asynchronous else None

    def start(self, into: torch.Tensor, source: torch.Tensor) -> Any:
        """Start a copy that runs after all work queued on the current stream so far. The caller
        must keep both tensors alive until it is done.

        Args:
            into, source: the same number of elements, any dtypes; at least one of them on the
                device, the other there or in pinned memory.

        Returns: a Ticket, or None if the copy is done.
        """
        if self.stream is None:
            into.copy_(source)
            return None
        self._idle = False
        self.stream.wait_stream(self.current())
        with use_stream(self.stream):
            into.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def copy(
        self, into: torch.Tensor, source: torch.Tensor, done: Callable[[], None] | None = None
    ) -> Any:
        """Start a copy, and hold both tensors as [Note: nothing is freed under a copy] says. `done`
        is called when the device's tensor is released. Returns: a Ticket, or None.
        """
        with self._lock:
            ticket = self.start(into, source)
            if ticket is None:
                if done is not None:
                    done()
                return None
            flying = _Flying(ticket, (into, source), self.current(), done)
            self._holding.append(flying)
            self._held += flying.nbytes
            self._on_host += flying.nbytes
            self._let_go()
        return ticket

    def _let_go(self) -> None:
        while self._holding and (self._held > self.window or self._holding[0].ticket.query()):
            first = self._holding.popleft()
            first.stream.wait_event(first.ticket)  # free if the copy is done
            self._held -= first.nbytes
            first.let_go()
            self._landing.append(first)
        while self._landing:
            first = self._landing[0]
            if not first.ticket.query():
                if self._on_host <= HOST_WINDOWS * self.window:
                    break
                first.ticket.synchronize()
            self._on_host -= self._landing.popleft().nbytes

    def order(self, ticket: Any, stream: Any = None) -> None:
        """Make `stream` (None: the current one) wait for the copy before it runs later work. The
        host does not wait.
        """
        if ticket is not None:
            (self.current() if stream is None else stream).wait_event(ticket)

    def beside(self) -> Any:
        """Return a context in which this thread's work goes to the copy stream, after all work
        queued on the current stream so far.
        """
        if self.stream is not None:
            self.stream.wait_stream(self.current())
        return use_stream(self.stream)

    def mark(self) -> Any:
        """Return a Ticket for all work queued on the copy stream so far; None without streams."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self) -> None:
        """Wait on the host until every copy so far is done. Returns at once if there was none since
        the last call.
        """
        if self._idle:
            return
        with self._lock:
            self.stream.synchronize()
            self._idle = True
            holding = list(self._holding)
            self._held = self._on_host = 0
            self._holding.clear()
            self._landing.clear()
        for each in holding:
            each.let_go()


class Reading:
    """Numbers on a device that are being copied to the host, after all work queued on the current
    stream so far.
    """

    def __init__(self, *numbers: torch.Tensor) -> None:
        """
        Args:
            numbers: tensors of one element, all of one dtype and device. On a device without
                streams they are read at once.
        """
        here = torch.stack([number.detach().reshape(()) for number in numbers])
        self._event: Any = None
        self._host = here
        if has_streams(here.device):
            self._host = host_empty(len(numbers), here.dtype, here.device)
            self._host.copy_(here, non_blocking=True)
            self._event = current_stream(here.device).record_event()

    @property
    def arrived(self) -> bool:
        """Whether `numbers()` would return without waiting."""
        return self._event is None or bool(self._event.query())

    def numbers(self) -> list[float]:
        """Return the numbers. The host waits for them, but not for work queued later."""
        if self._event is not None:
            self._event.synchronize()
        return [float(number) for number in self._host]
