"""Signs of progress, for the ranks that wait for this one in a save or a load.

A rank may write or read for longer than the recipe's `stall_timeout`. While it moves bytes, it counts
up a number in the ranks' store, which the ranks that wait look at. A rank that is stopped moves none,
and neither does one whose disk has gone.
"""

from __future__ import annotations

import contextlib
import time
import weakref

from onefold.comm.pending import default_store, within


class Signs:
    """The signs of the ranks that share a communicator.

    Attributes:
        every: seconds between two signs of a rank, and between two looks of a rank that waits.
    """

    def __init__(self, name: str, timeout: float) -> None:
        # A save under way at the end of a script outlives the process group
        self._store, self._key = default_store(), f"onefold/signs/{name}"
        self.every = min(timeout / 10, 5.0)
        self._told = time.monotonic()
        _all.add(self)

    def tell(self) -> None:
        """Give a sign, if the last one is long enough ago."""
        if time.monotonic() - self._told > self.every:
            self._told = time.monotonic()
            self._count(1, self.every)

    def seen(self, seconds: float) -> int | None:
        """Return how many signs all ranks have given; None if the store does not say so in time."""
        return self._count(0, seconds)

    def _count(self, more: int, seconds: float) -> int | None:
        with contextlib.suppress(RuntimeError):
            return within(seconds, lambda: self._store.add(self._key, more), self._store)
        return None


_all: weakref.WeakSet[Signs] = weakref.WeakSet()


def moved() -> None:
    """Called when some bytes of a checkpoint have been written or read."""
    for signs in tuple(_all):
        signs.tell()
