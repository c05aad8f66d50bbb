"""The traffic ledger: bytes that this rank sent, by move and by unit, and the time that it waited.

Bytes are exact, and counted when a move is launched. A move is also recorded as an event with its
start, its end and its *exposed* seconds: those in which the rank waited for it and did nothing
else. Measuring adds no synchronization. On gloo the engine's own waits are timed; on CUDA two
timing events on the compute stream, before and after the wait, are read once both are done.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: The moves of a step that are counted on the wire.
MOVES = ("all-gather", "reduce-scatter", "all-reduce")
#: Pieces of matrices that one rank steps whole, to it and back (optim/whole.py).
OWNERS = "owners"
#: All moves that a step may have.
STEP_MOVES = (*MOVES, OWNERS)


@dataclass(slots=True)
class TrafficEvent:
    """One move of one unit.

    Attributes:
        move: one of `STEP_MOVES`, "control" or "state"; between tiers "up", "down", "read" or
            "written".
        nbytes: payload bytes sent by this rank.
        peers: the number of ranks in the group.
        dtype: the dtype on the wire, such as "float32".
        phase, step: when the engine launched it.
        group: the ranks in the group, such as "0-7" or "0,8".
        between: of `nbytes`, those to ranks on other nodes (`Group.borders`).
        plain: the bytes that `nbytes` were encoded from; 0 if the move was not encoded.
        launched, landed: seconds of `time.perf_counter`. `landed` is when the move was complete on
            this rank; infinite while it is in flight.
        exposed: seconds in which the rank waited for it.
    """

    move: str
    unit: str
    nbytes: int
    peers: int = 0
    dtype: str = ""
    phase: str = ""
    step: int = 0
    group: str = ""
    between: int = 0
    plain: int = 0
    launched: float = field(default_factory=time.perf_counter)
    landed: float = math.inf
    exposed: float = 0.0


class Sent(NamedTuple):
    """Payload bytes of moves.

    Attributes:
        nbytes, between: bytes sent, and those of them to ranks on other nodes.
        plain: the bytes that would be sent without codecs.
    """

    nbytes: int = 0
    between: int = 0
    plain: int = 0


def _together(some: Iterable[Sent]) -> Sent:
    return Sent(*map(sum, zip(*some, strict=True)))


class TrafficLedger:
    """Counts payload bytes sent by this rank. Bytes of `control` messages (a few hundred a step)
    are counted apart from the payload.

    Bytes and exposed seconds are always counted. Events are kept only while `wanted()` is True,
    which is while a recording runs.
    """

    def __init__(self) -> None:
        # Called at each move: whether to keep its event. The default, bool(), is False
        self.wanted: Callable[[], bool] = bool
        self.events: list[TrafficEvent] = []
        self._marks: deque[tuple[Any, Any, TrafficEvent | None]] = deque()
        self.reset()

    def reset(self) -> None:
        self.by_move_and_unit: dict[tuple[str, str], Sent] = {}
        self.control_bytes = 0
        self._exposed = 0.0
        self.events.clear()
        self._marks.clear()

    def record(self, event: TrafficEvent) -> TrafficEvent:
        """Record a move that is about to start. `waited` or `marked` completes the event."""
        key, sent = (
            (event.move, event.unit),
            Sent(event.nbytes, event.between, event.plain or event.nbytes),
        )
        self.by_move_and_unit[key] = _together((self.by_move_and_unit.get(key, Sent()), sent))
        if self.wanted():
            self.events.append(event)
        return event

    def waited(self, event: TrafficEvent | None, since: float) -> None:
        """Record that this rank waited for `event` from `since` until now, and has it complete."""
        now = time.perf_counter()
        self._exposed += now - since
        if event is not None:
            event.landed, event.exposed = now, event.exposed + now - since

    def marked(self, event: TrafficEvent | None, start: Any, end: Any) -> None:
        """Record a wait of the computing stream, between two timing events."""
        if event is not None:
            event.landed = time.perf_counter()  # when the wait was queued, as an estimate
        self._marks.append((start, end, event))
        self.settle()

    def settle(self) -> None:
        """Read the timing events that are done, without waiting for the others."""
        while self._marks and self._marks[0][1].query():
            start, end, event = self._marks.popleft()
            seconds = start.elapsed_time(end) / 1000
            self._exposed += seconds
            if event is not None:
                event.exposed += seconds

    @property
    def exposed(self) -> float:
        """Seconds since the last reset in which this rank waited for others."""
        self.settle()
        return self._exposed

    def sent(self) -> Sent:
        """Return the payload bytes sent since the last reset."""
        return _together(self.by_move_and_unit.values())

    def by_move_in_full(self) -> dict[str, Sent]:
        """Return bytes by move with those between nodes, and the same without codecs."""
        out: dict[str, Sent] = {}
        for (move, _), sent in self.by_move_and_unit.items():
            out[move] = _together((out.get(move, Sent()), sent))
        return out

    def by_move(self) -> dict[str, int]:
        """Return bytes by move; 'state' are those of saves, loads and full_params."""
        return {move: sent.nbytes for move, sent in self.by_move_in_full().items()}
