"""Moves in flight, and chains of two moves."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from onefold.comm.ledger import TrafficEvent
from onefold.comm.stall import CollectiveContext
from onefold.device import use_stream

if TYPE_CHECKING:
    from onefold.comm.peers import Peers


class Pending:
    """A move in flight. `wait` returns when this rank's buffers are complete (on CUDA: complete for
    work queued later on the current stream).
    """

    __slots__ = ("_after", "_group", "_keep", "_works", "context", "event")

    def __init__(
        self,
        group: Peers,
        works: list[Any],
        context: CollectiveContext,
        event: TrafficEvent | None = None,
        keep: Any = None,
        after: Sequence[Callable[[], object]] = (),
    ) -> None:
        self._group, self._works, self.context, self.event, self._keep, self._after = (
            group,
            works,
            context,
            event,
            keep,
            after,
        )

    def wait(self) -> None:
        if self._works:
            works, self._works = self._works, []
            self._group.wait(works, self.context, self.event)
        for act in self._after:
            act()
        self._keep, self._after = None, ()

    def then(self, act: Callable[[], object]) -> Pending:
        """Call `act` at the end of `wait`, when the messages have arrived."""
        self._after = (*self._after, act)
        return self


class Chain(Pending):
    """Two moves, of which the second sends what the first has received. On CUDA the second waits
    for the first on a stream of its own.

    [Note: chains go on in order] gloo cannot tell whether a move is done, so no callback can start
    the second move. Instead, every wait of this rank first begins second moves, in the order in
    which the chains were made. That order is the same on all ranks. A wait for a reduction begins
    the second moves of all gathers that were launched up to the reduction's unit. Any other wait
    begins all of them. So a rank that took part in a gather and did not use the result does not
    keep the others waiting.
    """

    __slots__ = ("_first", "_second", "_then")

    def __init__(self, group: Peers, first: Pending, then: Callable[[], Pending]) -> None:
        self._group = group
        self._first: Pending | None = first
        self._then: Callable[[], Pending] | None = then
        self._second: Pending | None = None
        self.context, self.event = first.context, first.event
        # The relay stream waits for the first move, the compute stream for the second only
        if group.relay is not None:
            # The relay has nothing else to wait for. The second move reads what the first receives,
            # and this rank's own part, which was there (or is ordered before it) at the launch.
            with use_stream(group.relay):
                self.begin()
        else:
            group.chains.append(self)

    def begin(self) -> None:
        """Wait for the first move, and start the second."""
        first, then, self._first, self._then = self._first, self._then, None, None
        if first is not None and then is not None:
            first.wait()
            self._second = then()

    def wait(self) -> None:
        if self._group.broken is not None:  # the second move may never have begun
            raise self._group.broken
        self._group.chains.relay(self)
        second, self._second = self._second, None
        if second is not None:
            with self._group.chains.held():  # this wait must not begin the chains after this one
                second.wait()


class Chains:
    """The chains of a group whose second moves have not begun, in the order in which they were
    made. See [Note: chains go on in order].
    """

    def __init__(self) -> None:
        self._waiting: deque[Chain] = deque()
        self._held = False

    def append(self, chain: Chain) -> None:
        self._waiting.append(chain)

    def clear(self) -> None:
        self._waiting.clear()

    def relay(self, last: Chain | None = None) -> None:
        """Begin the second moves of all chains, or of those up to `last`."""
        if self._held or (last is not None and last not in self._waiting):
            return
        with self.held():
            while self._waiting:
                chain = self._waiting.popleft()
                chain.begin()
                if chain is last:
                    break

    def relay_before(self, context: CollectiveContext) -> None:
        """Begin the second moves that other ranks may need before they can do their part of
        `context`, which this rank is about to wait for.
        """
        if context.move not in ("reduce-scatter", "all-reduce"):
            self.relay()
        elif own := [chain for chain in self._waiting if chain.context.unit == context.unit]:
            # Gathers after this unit can stay: other ranks may only begin them once they have this
            # reduction
            self.relay(own[-1])

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Context in which waits begin no second moves."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before
