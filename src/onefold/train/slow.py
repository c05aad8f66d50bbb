"""A rank that is slower than the others, by name.

In a step every rank takes as long as the slowest: step times look alike. What differs is how long each computes without waiting, so
that is what ranks tell each other:

    rank 0   |compute ████████|waits ░░░░░░░░|
    rank 1   |compute ████████████████       |      the step's length is rank 1's
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
    """Compares the ranks' own seconds over the last `WINDOW` steps.

    Attributes:
        factor: how many times the others' median makes a rank slow; 0 looks at nothing.
        slow: the rank that is slow now, None if none is.
    """

    factor: float
    slow: int | None = None
    _seen: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def look(self, seconds: Sequence[float]) -> str | None:
        """Take in one step: `seconds[r]` is what rank r computed. A sentence when a rank becomes slow or is so no longer."""
        self._seen.append(tuple(seconds))
        if self.factor <= 0 or len(seconds) < 2 or len(self._seen) < WINDOW:
            return None
        own = [statistics.median(column) for column in zip(*self._seen, strict=True)]
        worst = max(range(len(own)), key=own.__getitem__)
        others = statistics.median(own[:worst] + own[worst + 1 :])
        # A rank that was named is let go only well below the factor: near it, noise would say so again and again.
        limit = self.factor if self.slow != worst else 1 + (self.factor - 1) / 2
        lags = own[worst] > limit * others and own[worst] - others > FLOOR
        before, self.slow = self.slow, worst if lags else None
        if self.slow == before:
            return None
        if self.slow is None:
            return f"rank {before} keeps up again"
        return (
            f"rank {worst} is slow: it computes {1000 * own[worst]:.0f} ms a step, the others {1000 * others:.0f} ms "
            f"(medians of {WINDOW} steps), {own[worst] / max(others, 1e-9):.1f} times as long, and all wait for it"
        )
