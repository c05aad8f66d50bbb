"""A rank that is slower than the others, by name.

In a step every rank takes as long as the slowest: step times look alike. What differs is how long
each computes without waiting, so that is what ranks tell each other:

    rank 0   |compute ████████|waits ░░░░░░░░|
    rank 1   |compute ████████████████       |      the step's length is rank 1's

[Note: an alert does not flap] Near the limit noise crosses it again and again, and on a busy
machine now this rank is slow, now that one.

    none named ── above `factor` for a while ──► named ── well below `factor` for WINDOW steps on end ──► none named

A named rank stays the named one until it keeps up, whoever else is slow. "A while" is one look at
first; then it doubles, from WINDOW steps on, with each alert, so that a run of n steps has some log
n of them.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

#: Steps that are looked at together: one hiccup is no slow rank.
WINDOW = 20
#: Seconds below which a lag is not worth a word.
FLOOR = 0.005


@dataclass
class Pace:
    """Compares the ranks' own seconds over the last `WINDOW` steps. See [Note: an alert does not
    flap].

    Attributes:
        factor: how many times the others' median makes a rank slow; 0 looks at nothing.
        slow: the rank that is slow now, None if none is.
    """

    factor: float
    slow: int | None = None
    _seen: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _alerts: int = 0
    #: The rank that may be named next, and for how many looks on end it, or the end of the alert,
    #: has been due.
    _next: int | None = None
    _due: int = 0

    def look(self, seconds: Sequence[float]) -> str | None:
        """Take in one step: `seconds[r]` is what rank r computed. A sentence when a rank becomes
        slow or is so no longer.
        """
        self._seen.append(tuple(seconds))
        if self.factor <= 0 or len(seconds) < 2 or len(self._seen) < WINDOW:
            return None
        own = [statistics.median(column) for column in zip(*self._seen, strict=True)]
        return self._name(own) if self.slow is None else self._let_go(own, self.slow)

    def _name(self, own: list[float]) -> str | None:
        worst = max(range(len(own)), key=own.__getitem__)
        others = _median_of_others(own, worst)
        if own[worst] <= self.factor * others or own[worst] - others <= FLOOR:
            self._due = 0
            return None
        self._due = self._due + 1 if worst == self._next else 1
        self._next = worst
        if self._due < (WINDOW << (self._alerts - 1) if self._alerts else 1):
            return None
        self.slow, self._due, self._alerts = worst, 0, self._alerts + 1
        return (
            f"rank {worst} is slow: it computes {1000 * own[worst]:.0f} ms a step, the others"
            f" {1000 * others:.0f} ms (medians of {WINDOW} steps),"
            f" {own[worst] / max(others, 1e-9):.1f} times as long, and all wait for it"
        )

    def _let_go(self, own: list[float], named: int) -> str | None:
        others = _median_of_others(own, named)
        keeps_up = (
            own[named] <= (1 + (self.factor - 1) / 2) * others or own[named] - others <= FLOOR / 2
        )
        self._due = self._due + 1 if keeps_up else 0
        if self._due < WINDOW:
            return None
        self.slow, self._next, self._due = None, None, 0
        return f"rank {named} keeps up again"


def _median_of_others(own: list[float], rank: int) -> float:
    return statistics.median(own[:rank] + own[rank + 1 :])
