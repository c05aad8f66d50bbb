"""Copies on a stream of their own whose memory is handed on in stream order: the host never waits for them.

A `Lane` keeps what a copy reads until the host has seen the copy done. The host runs ahead of a device, by a whole forward pass if it can:
what is to be free for the next layer has to be let go of before its copy is done, with the computing stream told to come after it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Ticket(Protocol):
    """A copy under way (a CUDA event is one)."""

    def query(self) -> bool: ...


class SideStream:
    """Copies between one device and the host, in order. Where there are no streams (on a CPU) a copy is done when the call returns.

    Attributes:
        behind: whether copies run behind the computing stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.behind = self._stream is not None

    @property
    def capturing(self) -> bool:
        """The current stream records a graph: what is copied now would be copied again and again."""
        return self._stream is not None and torch.cuda.is_current_stream_capturing()

    def current(self) -> Any:
        """The stream that computes in this thread; None without streams."""
        return None if self._stream is None else torch.cuda.current_stream(self.device)

    def start(self, into: torch.Tensor, source: torch.Tensor) -> Ticket | None:
        """Copy behind what the current stream has been given so far. None: it is done."""
        if self._stream is None:
            into.copy_(source)
            return None
        self._stream.wait_stream(self.current())
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def done(self, ticket: Ticket | None) -> bool:
        return ticket is None or ticket.query()

    def order(self, ticket: Ticket | None, stream: Any) -> None:
        """What `stream` is given from here on comes after the copy."""
        if ticket is not None and not ticket.query():
            stream.wait_event(ticket)

    def readable(self, t: torch.Tensor, ticket: Ticket | None, stream: Any) -> torch.Tensor:
        """`t` for the current stream, which comes after the copy; a clone if its memory belongs to another one."""
        here = self.current()
        self.order(ticket, here)
        if here == stream:
            return t
        clone = t.clone()
        stream.wait_stream(here)
        return clone

    def settle(self) -> None:
        """The host waits for all copies so far."""
        if self._stream is not None:
            self._stream.synchronize()
