"""Messages under way, and moves that wait for moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from onefold.comm.ledger import TrafficEvent
from onefold.comm.stall import Place

if TYPE_CHECKING:
    from onefold.comm.group import Group


class Pending:
    """Messages under way. `wait` returns when this rank's buffers are complete (on CUDA: in the order of the current stream)."""

    __slots__ = ("_after", "_group", "_keep", "_works", "event", "place")

    def __init__(
        self,
        group: Group,
        works: list[Any],
        place: Place,
        event: TrafficEvent | None = None,
        keep: Any = None,
        after: Sequence[Callable[[], object]] = (),
    ) -> None:
        self._group, self._works, self.place, self.event, self._keep, self._after = group, works, place, event, keep, after

    def wait(self) -> None:
        if self._works:
            works, self._works = self._works, []
            self._group.wait(works, self.place, self.event)
        for act in self._after:
            act()
        self._keep, self._after = None, ()


class Chain(Pending):
    """A move after a move that brings what it sends. On gloo the second begins when somebody waits; on CUDA behind the first."""

    __slots__ = ("_first", "_then")

    def __init__(self, first: Pending, then: Callable[[], Pending], device: torch.device) -> None:
        self._first: Pending | None = first
        self._then: Callable[[], Pending] | None = then
        self.place, self.event = first.place, first.event
        if device.type == "cuda":  # the relay waits for the first move, the compute stream for the second only
            relay = torch.cuda.Stream(device)
            relay.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(relay):
                first.wait()
                second = then()
            self._first, self._then = None, lambda: second

    def wait(self) -> None:
        first, then, self._first, self._then = self._first, self._then, None, None
        if first is not None:
            first.wait()
        if then is not None:
            then().wait()
