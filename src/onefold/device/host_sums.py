"""Sums in pinned host memory that grow by sums on the device.

copies up     [h0 ][h1 ]      [h2 ]         chunks of the host's sum, in two buffers in turn
copies down        [+][v0 ]   [+][v1 ]      added on the device, and copied down again
computing     f0     f1     f2     f3       waits for none of it; nor does the host
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onefold.device.copies import CopyStream
from onefold.device.streams import new_stream, use_stream

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
        taken: Callable[[int], None] | None = None,
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
    ) -> Any:
        """Start to add to host sums. See `CopyStream.copy` for `done` and the result.

        Args:
            parts: (one-dimensional sum in pinned memory, what is added to it: as many elements of
                `whole`). If both have the same dtype, the new sum is in `whole` too.
            whole: a tensor on the device. It is held until the work is done.
            then: queues more work that reads `whole`, on the stream of the copies down.
        """
        return self._run(parts, whole, True, then, done)

    def cast(
        self, into: torch.Tensor, source: torch.Tensor, done: Callable[[], None] | None = None
    ) -> Any:
        """Start a copy of `source`, on the device, into pinned memory of another dtype."""
        return self._run([(into, source)], source, False, None, done)

    def _run(
        self,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
        whole: torch.Tensor,
        adds: bool,
        then: Callable[[], object] | None,
        done: Callable[[], None] | None,
    ) -> Any:
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
                    if adds:
                        self._bring(buffer, low, free[turn])
                    if not adds:
                        buffer.copy_(part)
                    elif part.dtype == low.dtype:
                        buffer = part.add_(buffer)
                    else:
                        buffer.add_(part)
                    low.copy_(buffer, non_blocking=True)
                    free[turn] = self._down.stream.record_event()
                    turn = 1 - turn
            if then is not None:
                then()

        return self._down.run(work, (whole, *(into for into, _ in parts)), done)

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
            self._up = new_stream(device, "sums up")
        if self._buffers is None:
            first, second = (
                torch.empty(self.chunk, dtype=torch.uint8, device=device) for _ in range(2)
            )
            self._buffers = first, second
            if self._taken is not None:
                self._taken(2 * self.chunk)
        return self._buffers

    def release(self) -> None:
        """Release the buffers. The caller has waited for the copies down."""
        if self._buffers is not None:
            self._buffers = None
            if self._taken is not None:
                self._taken(-2 * self.chunk)
