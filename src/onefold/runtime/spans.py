"""What a rank computed when, unit by unit. Collected only while the memory ledger records."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """When a unit computed (on CUDA: when its work was handed to the device), in seconds of
    `time.perf_counter`.

    kind is "compute"; phase is "forward" or "backward". The forward span of a unit contains those
    of the units inside it. A backward span ends when the last gradient of the unit has come and
    begins where the previous one ended: autograd does not say more.
    """

    kind: str
    unit: str
    phase: str
    start: float
    end: float


class Spans:
    """Collects spans into `done`."""

    def __init__(self, done: deque[Span]) -> None:
        self.done = done
        self._open: list[float] = []
        self._mark = 0.0

    def enter(self) -> None:
        self._open.append(time.perf_counter())

    def leave(self, unit: str, phase: str, keep: bool) -> None:
        start = self._open.pop() if self._open else 0.0
        if keep and start:
            self.done.append(Span("compute", unit, phase, start, time.perf_counter()))

    def begin_backward(self) -> None:
        self._open.clear()
        self._mark = time.perf_counter()

    def came(self, unit: str) -> None:
        """Note that the last gradient of `unit` has come: its backward span ends."""
        now = time.perf_counter()
        self.done.append(Span("compute", unit, "backward", self._mark, now))
        self._mark = now
