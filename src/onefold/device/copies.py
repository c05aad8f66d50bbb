"""Copies between one device and the host on a stream of their own.

    computing    f0     f1     f2 ...             the host waits only in `wait`, or beyond HOST_WINDOWS
    copies          [c0 ]  [c1 ]

[Note: nothing is freed under a copy] torch's allocator reuses freed device memory in the order of
the stream on which it was allocated, and knows nothing of the copy stream. So the copy holds its
device tensor until the host has seen that the copy is done, or until the computing stream waits for
the copy: work that gets the memory next then runs after it. At most `window` bytes are held like
this, or twice the largest copy in flight, whichever is more. Beyond them the computing stream, not
the host, waits for the oldest copy. Host memory has no stream order, so the host tensor is held
until the copy is done.

[Note: two of the largest] With a bound below two copies the computing stream would wait for the
copy that has just begun, and nothing would overlap with it. With two, a copy runs while the source
of the next one is computed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onefold.device.pinned import host_empty
from onefold.device.streams import (
    current_stream,
    has_streams,
    new_stream,
    use_stream,
)

#: Bytes of device memory that copies in flight may hold before the computing stream waits for the
#: oldest: some milliseconds of transfer. `within` says what holds for larger copies.
WINDOW = 128 << 20
#: Windows of host memory that copies in flight may hold before the host waits for the oldest.
HOST_WINDOWS = 8
#: The same in copies of the largest size so far, if fewer of them fill the windows.
HOST_COPIES = 4


def within(window: int, held: int, sizes: Iterable[int]) -> bool:
    """Return whether copies in flight may hold `held` bytes of device memory.

    Args:
        window: bytes. 0 holds nothing: the computing stream waits for every copy.
        sizes: the bytes of each copy in flight. See [Note: two of the largest].
    """
    return held <= window or (window > 0 and held <= 2 * max(sizes, default=0))


@dataclass(eq=False, slots=True)
class _Flying:
    """A copy in flight.

    Attributes:
        ticket: an event behind it.
        stream: the computing stream from which it was started.
        tensors: what it reads and writes. Once the device's memory is let go of, those on the host.
        done: called then.
    """

    ticket: Any
    stream: Any
    tensors: tuple[torch.Tensor, ...]
    done: Callable[[], None] | None
    nbytes: int
    holding: bool = True

    def let_go(self) -> None:
        """Release the device's tensors, and call `done`."""
        self.holding, self.tensors = False, tuple(t for t in self.tensors if t.is_cpu)
        done, self.done = self.done, None
        if done is not None:
            done()


class CopyStream:
    """Copies of one device, in order. On a device without streams a copy is done when the call
    returns, and its ticket is None. A ticket is an event of the copy stream.

    Attributes:
        asynchronous: whether copies run on a stream of their own.
        stream: that stream; None without streams.
    """

    def __init__(
        self,
        device: torch.device,
        window: int = WINDOW,
        urgent: bool = False,
    ) -> None:
        """
        Args:
            window: bytes; 0 holds nothing. See [Note: nothing is freed under a copy].
            urgent: as of `new_stream`.
        """
        self.device, self.window = device, window
        self.asynchronous = has_streams(device)
        self.stream = new_stream(device, urgent)
        # In the order of their start: those at the front may hold host memory only
        self._flying: deque[_Flying] = deque()
        self._largest = 0
        # Copies begun so far, and how many of them `wait` has seen done
        self._begun = self._finished = 0
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

        Returns: a ticket, or None if the copy is done.
        """
        if self.stream is None:
            into.copy_(source)
            return None
        return self._launch(lambda: into.copy_(source, non_blocking=True))

    def _launch(self, work: Callable[[], object]) -> Any:
        with self._lock:
            self._begun += 1
            self.stream.wait_stream(self.current())
            with use_stream(self.stream):
                work()
                return self.stream.record_event()

    def copy(
        self, into: torch.Tensor, source: torch.Tensor, done: Callable[[], None] | None = None
    ) -> Any:
        """Start a copy, and hold both tensors as [Note: nothing is freed under a copy] says. `done`
        is called when the device's tensor is released. Returns: a ticket, or None.
        """
        return self.run(lambda: into.copy_(source, non_blocking=True), (into, source), done)

    def run(
        self,
        work: Callable[[], object],
        tensors: tuple[torch.Tensor, ...],
        done: Callable[[], None] | None = None,
    ) -> Any:
        """As `copy`, for other `work` on `tensors`, queued while the stream is current."""
        if self.stream is None:
            work()
            if done is not None:
                done()
            return None
        with self._lock:
            ticket = self._launch(work)
            nbytes = max(t.numel() * t.element_size() for t in tensors)
            self._largest = max(self._largest, nbytes)
            stream = self.current()
            self._flying.append(_Flying(ticket, stream, tensors, done, nbytes))
            too_early = self._let_go(self.window)
        if too_early is not None:
            too_early.synchronize()
            with self._lock:
                self._let_go(self.window)
        return ticket

    def release(self) -> None:
        """Release the device memory of all copies; the computing stream waits for them."""
        with self._lock:
            self._let_go(0)

    def _let_go(self, window: int) -> Any:
        """Release the memory of copies that are done, and device memory of the oldest ones beyond the
        window, for which the computing stream waits. Returns the ticket of the copy that the host has
        to wait for, because copies in flight hold too much of its memory; None for no wait.
        """
        while self._flying and self._flying[0].ticket.query():
            self._flying.popleft().let_go()
        holding = [flying for flying in self._flying if flying.holding]
        while not within(window, sum(f.nbytes for f in holding), (f.nbytes for f in holding)):
            first = holding.pop(0)
            first.stream.wait_event(first.ticket)
            first.let_go()
        on_host = [flying for flying in self._flying if flying.holding or flying.tensors]
        beyond = sum(flying.nbytes for flying in on_host)
        beyond -= max(HOST_WINDOWS * self.window, HOST_COPIES * self._largest)
        ticket = None
        for flying in on_host if beyond > 0 else ():
            ticket, beyond = flying.ticket, beyond - flying.nbytes
            if beyond <= 0:
                break
        return ticket

    def order(self, ticket: Any, stream: Any = None) -> None:
        """Make `stream` (None: the current one), not the host, wait for the copy."""
        if ticket is not None:
            (self.current() if stream is None else stream).wait_event(ticket)

    def on_stream(self) -> Any:
        """Return a context whose work goes to the copy stream, after all queued so far."""
        if self.stream is not None:
            self.stream.wait_stream(self.current())
        return use_stream(self.stream)

    def mark(self) -> Any:
        """Return a ticket for all work queued on the copy stream so far; None without streams."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self) -> None:
        """Wait on the host until every copy begun so far is done."""
        with self._lock:
            begun = self._begun
            if begun == self._finished:
                return
            ticket = self.stream.record_event()
        # Another thread may begin copies meanwhile
        ticket.synchronize()
        with self._lock:
            self._finished = max(self._finished, begun)
            self._let_go(self.window)


def reading(*numbers: torch.Tensor) -> Callable[[], list[float]]:
    """Start to copy numbers on a device to the host, behind all work queued so far. Returns a function
    that returns them: the host waits for them there, but not for work queued later.

    Args:
        numbers: tensors of one element, all of one dtype and device.
    """
    here = torch.stack([number.detach().reshape(()) for number in numbers])
    host, event = here, None
    if has_streams(here.device):
        host = host_empty(len(numbers), here.dtype, here.device)
        host.copy_(here, non_blocking=True)
        event = current_stream(here.device).record_event()

    def read() -> list[float]:
        if event is not None:
            event.synchronize()
        return [float(number) for number in host]

    return read


# -- sums on the host, added by the device ---------------------------------------------------------
#
# Sums in pinned host memory that grow by sums on the device.
#
# copies up     [h0 ][h1 ]      [h2 ]         chunks of the host's sum, in two buffers in turn
# copies down        [+][v0 ]   [+][v1 ]      added on the device, and copied down again
# computing     f0     f1     f2     f3       waits for none of it; nor does the host


#: Bytes of a chunk: its transfer takes many times as long as the launch of its work.
CHUNK = 32 << 20
_LINE = 512  # bytes: what chunks are a multiple of


def chunk_for(nbytes: int) -> int:
    """Return the bytes of a chunk, if the largest sum has `nbytes`."""
    return min(CHUNK, -(-nbytes // _LINE) * _LINE)


class HostSums:
    """Adds to host memory, or casts into it, on the device. For a device with streams.

    Attributes:
        chunk: bytes of each of the two buffers on the device.
    """

    def __init__(
        self,
        down: CopyStream,
        taken: Callable[[int], object] = lambda nbytes: None,
        chunk: int = CHUNK,
    ) -> None:
        """
        Args:
            down: the stream of the copies down.
            taken: called with the bytes that the buffers take on the device, and with minus these
                bytes when they are released.
        """
        self.chunk = chunk
        self._down, self._taken = down, taken
        self._up: Any = None
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(
        self,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
        whole: torch.Tensor,
        then: Callable[[], object] | None = None,
        done: Callable[[], None] | None = None,
        adds: bool = True,
    ) -> Any:
        """Start to add to host sums. See `CopyStream.copy` for `done` and the result.

        Args:
            parts: (one-dimensional sum in pinned memory, what is added to it: as many elements of
                `whole`). If both have the same dtype, the new sum is in `whole` too.
            whole: a tensor on the device. It is held until the work is done.
            then: queues more work that reads `whole`, on the stream of the copies down.
            adds: False writes over the sums.
        """
        buffers = self._take(whole.device)

        def work() -> None:
            # What an earlier call has left in the buffers was read, and what it sent to the same
            # host memory has arrived
            self._up.wait_stream(self._down.stream)
            free: list[Any] = [None, None]
            turn = 0
            for into, source in parts:
                step = self.chunk // into.element_size()
                for low, part in zip(into.split(step), source.split(step), strict=True):
                    buffer = buffers[turn][: low.numel() * low.element_size()].view(low.dtype)
                    if not adds:
                        buffer.copy_(part)
                    else:
                        self._bring(buffer, low, free[turn])
                        buffer = part.add_(buffer) if part.dtype == low.dtype else buffer.add_(part)
                    low.copy_(buffer, non_blocking=True)
                    free[turn] = self._down.stream.record_event()
                    turn = 1 - turn
            if then is not None:
                then()

        return self._down.run(work, (whole, *(into for into, _ in parts)), done)

    def cast(
        self, into: torch.Tensor, source: torch.Tensor, done: Callable[[], None] | None = None
    ) -> Any:
        """Start a copy of `source`, on the device, into pinned memory of another dtype."""
        return self.add([(into, source)], source, done=done, adds=False)

    def _bring(self, buffer: torch.Tensor, low: torch.Tensor, free: Any) -> None:
        """Copy a chunk of the host's sum up, as soon as its buffer is `free`."""
        if free is not None:
            self._up.wait_event(free)
        with use_stream(self._up):
            buffer.copy_(low, non_blocking=True)
            arrived = self._up.record_event()
        self._down.stream.wait_event(arrived)

    def _take(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if self._up is None:
            self._up = new_stream(device)
        if self._buffers is None:
            first, second = (
                torch.empty(self.chunk, dtype=torch.uint8, device=device) for _ in range(2)
            )
            self._buffers = first, second
            self._taken(2 * self.chunk)
        return self._buffers

    def release(self) -> None:
        """Release the buffers. The caller has waited for the copies down."""
        if self._buffers is not None:
            self._buffers = None
            self._taken(-2 * self.chunk)
