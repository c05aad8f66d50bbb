"""The traffic ledger: what this rank sent, by move and by unit, and how long it stood still for it.

Bytes are exact and counted where a move is launched. A move is also entered as an event with its
start, its end and the seconds that were
*exposed*: during which the rank waited for it and did nothing else. No synchronization is added: on
gloo the engine's own waits are timed, on CUDA a pair of events on the compute stream around the
wait is read after both have passed.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: The moves of a step that are counted on the wire.
MOVES = ("all-gather", "reduce-scatter", "all-reduce")
#: Events kept: some steps of a large model.
WINDOW = 8192


@dataclass(slots=True)
class TrafficEvent:
    """One move of one unit.

    Attributes:
        move: "all-gather", "reduce-scatter", "all-reduce", "control" or "state". nbytes: payload
            bytes sent by this rank.
        peers: ranks of the group. group: which they are, such as "0-7" or "0,8". dtype: on the
            wire, such as "float32".
        step, phase: when the engine launched it.
        launched, landed: seconds of `time.perf_counter`; landed is when this rank had what it
            needed, None while under way.
        exposed: seconds in which the rank waited for it.
        between: of `nbytes`, those to ranks on other nodes (`Group.borders`).
        plain, plain_between: what `nbytes` and `between` were encoded from; 0 where they travelled
            as they are.
    """

    move: str
    unit: str
    nbytes: int
    peers: int
    dtype: str
    phase: str
    step: int
    launched: float
    landed: float | None = None
    exposed: float = 0.0
    group: str = ""
    between: int = 0
    plain: int = 0
    plain_between: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """Payload bytes of moves.

    Attributes:
        nbytes, between: as they travelled, and those of them to ranks on other nodes.
        plain, plain_between: as they would have travelled by the same recipe without codecs.
    """

    nbytes: int = 0
    between: int = 0
    plain: int = 0
    plain_between: int = 0

    @classmethod
    def of(cls, event: Any) -> Sent:
        """What an event carried."""
        if not event.plain:
            return cls(event.nbytes, event.between, event.nbytes, event.between)
        return cls(event.nbytes, event.between, event.plain, event.plain_between)

    def __add__(self, other: Sent) -> Sent:
        return Sent(
            self.nbytes + other.nbytes,
            self.between + other.between,
            self.plain + other.plain,
            self.plain_between + other.plain_between,
        )

    def __floordiv__(self, steps: int) -> Sent:
        return Sent(
            self.nbytes // steps,
            self.between // steps,
            self.plain // steps,
            self.plain_between // steps,
        )

    @property
    def encoded(self) -> bool:
        """Whether codecs changed anything."""
        return self.plain != self.nbytes


class TrafficLedger:
    """Counts payload bytes sent by this rank. `control` messages (a few hundred bytes a step) are
    kept apart from the payload.

    Bytes and exposed seconds are counted always; single events are kept only while somebody records
    (`wanted`).
    """

    def __init__(self) -> None:
        # Whether events are kept, asked at each move; bool() is False
        self.wanted: Callable[[], bool] = bool
        self.events: deque[TrafficEvent] = deque(maxlen=WINDOW)
        self._marks: deque[tuple[Any, Any, TrafficEvent | None]] = deque()
        self.reset()

    def reset(self) -> None:
        self._moves: Counter[tuple[str, str]] = Counter()
        self._sent: dict[str, Sent] = {}
        self.control_bytes = 0
        self._exposed = 0.0
        self.events.clear()
        self._marks.clear()

    def record(
        self,
        move: str,
        unit: str,
        nbytes: int,
        peers: int = 0,
        dtype: str = "",
        phase: str = "",
        step: int = 0,
        group: str = "",
        between: int = 0,
        plain: int = 0,
        plain_between: int = 0,
    ) -> TrafficEvent:
        """Enter a move that is about to start; the event is completed by `waited`."""
        self._moves[move, unit] += nbytes
        event = TrafficEvent(
            move,
            unit,
            nbytes,
            peers,
            dtype,
            phase,
            step,
            time.perf_counter(),
            None,
            0.0,
            group,
            between,
            plain,
            plain_between,
        )
        self._sent[move] = self._sent.get(move, Sent()) + Sent.of(event)
        if self.wanted():
            self.events.append(event)
        return event

    def waited(self, event: TrafficEvent | None, since: float) -> None:
        """This rank waited from `since` until now, and has what it waited for."""
        now = time.perf_counter()
        self._exposed += now - since
        if event is not None:
            event.landed, event.exposed = now, event.exposed + now - since

    def marked(self, event: TrafficEvent | None, start: Any, end: Any) -> None:
        """The same on CUDA: `start` and `end` are timing events on the compute stream around its
        wait.
        """
        if event is not None:
            event.landed = time.perf_counter()  # refined when the marks have passed
        self._marks.append((start, end, event))
        self.settle()

    def settle(self) -> None:
        """Read the marks that have passed, without waiting for those that have not."""
        while self._marks and self._marks[0][1].query():
            start, end, event = self._marks.popleft()
            seconds = start.elapsed_time(end) / 1000
            self._exposed += seconds
            if event is not None:
                event.exposed += seconds

    @property
    def exposed(self) -> float:
        """Seconds since the last reset in which this rank waited for others: payload and control
        messages.
        """
        if self._marks:
            self.settle()
        return self._exposed

    def total(self) -> int:
        """Payload bytes sent since the last reset."""
        return sum(self._moves.values())

    def by_move(self) -> dict[str, int]:
        """Bytes by move: 'all-gather', 'reduce-scatter', 'all-reduce', and 'state' (saving,
        loading, full_params).
        """
        out: Counter[str] = Counter()
        for (move, _), nbytes in self._moves.items():
            out[move] += nbytes
        return dict(out)

    def by_link(self) -> dict[str, int]:
        """Bytes to ranks of the own node ("inside") and of others ("between")."""
        between = sum(sent.between for sent in self._sent.values())
        return {"inside": self.total() - between, "between": between}

    def by_move_in_full(self) -> dict[str, Sent]:
        """Bytes by move: those between nodes, and what they would have been without codecs."""
        return dict(self._sent)

    def plain(self) -> int:
        """Payload bytes that would have been sent without codecs."""
        return sum(sent.plain for sent in self._sent.values())

    def between_by_move(self) -> dict[str, int]:
        """Bytes to ranks of other nodes, by move."""
        return {move: sent.between for move, sent in self._sent.items() if sent.between}

    def by_unit(self) -> dict[str, dict[str, int]]:
        """Bytes by unit, then by move."""
        out: dict[str, dict[str, int]] = {}
        for (move, unit), nbytes in self._moves.items():
            out.setdefault(unit, {})[move] = nbytes
        return out
