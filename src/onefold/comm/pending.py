"""Messages under way, and moves that wait for moves."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from onefold.comm.ledger import TrafficEvent
from onefold.comm.stall import CollectiveContext
from onefold.device import use_stream

if TYPE_CHECKING:
    from onefold.comm.standing import Standing


class Pending:
    """Messages under way. `wait` returns when this rank's buffers are complete (on CUDA: in the
    order of the current stream).
    """

    __slots__ = ("_after", "_group", "_keep", "_works", "context", "event")

    def __init__(
        self,
        group: Standing,
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
        """Do `act` too, once the messages have come."""
        self._after = (*self._after, act)
        return self


class Chain(Pending):
    """A move after a move that brings what it sends. On CUDA the second waits on a stream of its
    own.

    [Note: chains go on in order] On gloo nobody can ask whether the first move is done, so the
    second begins when this rank waits for it,
    or for anything behind it: every wait begins the second moves of the chains before it, in the
    order that they were made, which is the same on all ranks; that of a reduction those up to its
    unit. So a rank that took part in a gather and went on without using it does not keep the others
    waiting.
    """

    __slots__ = ("_first", "_second", "_then")

    def __init__(self, group: Standing, first: Pending, then: Callable[[], Pending]) -> None:
        self._group = group
        self._first: Pending | None = first
        self._then: Callable[[], Pending] | None = then
        self._second: Pending | None = None
        self.context, self.event = first.context, first.event
        # The relay waits for the first move, the compute stream for the second only
        if group.relay is not None:
            # And for nothing else: what the second move reads was there, or was on its way, when
            # the first was launched.
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
            with self._group.chains.held():  # what is behind this one may take its time
                second.wait()


class Chains:
    """The chains of a group whose second moves have not begun, in the order that they were made.
    See [Note: chains go on in order].
    """

    def __init__(self) -> None:
        self._waiting: deque[Chain] = deque()
        self._held = False

    def append(self, chain: Chain) -> None:
        self._waiting.append(chain)

    def clear(self) -> None:
        self._waiting.clear()

    def relay(self, last: Chain | None = None) -> None:
        """Begin the second moves of all, or of those up to `last`."""
        if self._held or (last is not None and last not in self._waiting):
            return
        with self.held():
            while self._waiting:
                chain = self._waiting.popleft()
                chain.begin()
                if chain is last:
                    break

    def relay_before(self, context: CollectiveContext) -> None:
        """Begin those that others may wait for before they do what is about to be waited for
        here.
        """
        if context.move not in ("reduce-scatter", "all-reduce"):
            self.relay()
        elif own := [chain for chain in self._waiting if chain.context.unit == context.unit]:
            # What is gathered behind the unit others may begin to gather once they have this
            # reduction
            self.relay(own[-1])

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, waits begin no second moves."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before
