"""How far the host runs ahead of the device.

    host      queues unit 2 | unit 3   asks for the beginning of unit 2 before it queues unit 4
    device    ... unit 1    | waits for the gather of unit 2
    peer      hangs

[Note: two units ahead] The host queues work without waiting for it. If a peer hangs, the device
waits in a collective, the host fills the device's queue of launches and blocks in a launch, where
no timeout of its own applies. So before the host queues unit i, the device must have come to the
beginning of unit i - 2. Two units are the device's work meanwhile, and the host never waits for what
it has just queued: a device that keeps up finds its next work queued, and the host finds the event
done. If the event does not come within the stall timeout, and the device is in a wait for a
collective, the rank raises a `StallError` that names this collective.

Only native backends on devices with streams need this: gloo's waits are the host's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from onefold.comm.stall import CollectiveContext
from onefold.device import capturing, current_stream, reached

#: Units that may be queued, and not begun by the device, when another one is queued.
AHEAD = 2

#: A wait of the device: (what for, an event before it, an event behind it).
_Wait = tuple[CollectiveContext, Any, Any]


class RunAhead:
    """The marks before the units that a rank has queued. See [Note: two units ahead].

    Attributes:
        polls: how often the host had to wait for the device.
    """

    def __init__(
        self,
        device: torch.device,
        timeout: float,
        lost: Callable[[CollectiveContext, float], Exception],
    ) -> None:
        """
        Args:
            timeout: seconds that the device may be in one wait.
            lost: returns the error of a rank that has waited in vain: (for what, seconds).
        """
        self.device, self.timeout, self.lost = device, timeout, lost
        self.polls = 0
        self._gave_up = False  # the group is broken: its next move raises
        # (event, the device's waits that were queued before it and after the event before)
        self._marks: deque[tuple[Any, list[_Wait]]] = deque()
        self._waits: list[_Wait] = []
        self._last: tuple[int, str] | None = None

    def waits(self, context: CollectiveContext, before: Any, behind: Any) -> None:
        """Note that the device will wait for a collective, between two events."""
        self._waits.append((context, before, behind))

    def comes(self, unit: int, phase: str, again: bool = False) -> None:
        """Called before a unit is queued: wait until the device has begun the last but one.

        Several calls for one unit, one after another, count once in a phase, unless `again` is
        True.

        Raises:
            StallError: the device waits for a collective for longer than the timeout.
        """
        if self._gave_up or ((unit, phase) == self._last and not again):
            return
        self._last = unit, phase
        if capturing(self.device):  # the work runs at each replay, and nobody may ask for it now
            return
        waits, self._waits = self._waits, []
        self._marks.append((current_stream(self.device).record_event(), waits))
        while len(self._marks) > AHEAD:
            self._reach(*self._marks[0])
            self._marks.popleft()

    def _reach(self, mark: Any, waits: list[_Wait]) -> None:
        if mark.query():
            return
        self.polls += 1
        while not reached(mark, self.timeout):
            for context, before, behind in waits:
                if before.query() and not behind.query():
                    self._gave_up = True
                    raise self.lost(context, self.timeout)
            # Else the device computes, however long: no other rank is late
