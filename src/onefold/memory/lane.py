"""Copies between the device and the host, behind whatever else runs.

    on CUDA   a stream of its own; pinned host memory; an event tells when a copy is done, and keeps its source alive until then
    on a CPU  the host is the device's own memory: a copy is a copy, done when the call returns

The engine enters every copy in a traffic ledger of its own, as move "up" (to the device) or "down" (to the host).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from onefold.memory.pool import empty


def host_empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A fresh one-dimensional host buffer with undefined contents; pinned if it serves a CUDA device."""
    if device.type == "cuda":
        return torch.empty(numel, dtype=dtype, pin_memory=True)
    return empty(numel, dtype, torch.device("cpu"))


def _done() -> bool:
    return True


class Lane:
    """One direction-less lane of copies of one device. Copies in it keep their order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._flying: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
        self._lock = threading.Lock()  # steps behind the backward pass copy from a thread of their own

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> Callable[[], bool]:
        """Start copying `source` into `into` (same number of elements, any dtypes) after what the current stream has been given.

        Returns: what tells whether the copy is done.
        """
        if self._stream is None:
            into.copy_(source)
            return _done
        with self._lock:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                into.copy_(source, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._stream)
            while self._flying and self._flying[0][0].query():
                self._flying.popleft()
            self._flying.append((event, into, source))  # neither may be reused before the copy is done
            return lambda: bool(event.query())

    def join(self) -> None:
        """Work given to the current stream from here on comes after the copies so far. The host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def wait(self) -> None:
        """The host waits until every copy so far is done."""
        if self._stream is not None:
            with self._lock:
                self._stream.synchronize()
                self._flying.clear()
