"""A rank's position among others, how it waits for them, and how messages are told apart.

[Note: tags instead of order] A pairwise message carries a tag made of the move, the unit, a count,
the addresses that are reduced, and the length. If two ranks disagree on what comes next, their
messages do not match: both wait, and the wait ends in a `StallError`. Neither takes the other's
bytes for something else.

[Note: order instead of tags] A native backend matches operations by the order in which each rank
launches them. It takes one unit's bytes for another's if they have the same size. So every launch
goes into a checksum of its communicator (`launched`), and the ranks compare the checksums at the
end of every backward pass, before the optimizer step. Gathers and reductions have a communicator
each, because the order between a gather and a reduction may differ from rank to rank.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch

from onefold.comm.communicators import Communicators
from onefold.comm.ledger import TrafficEvent, TrafficLedger
from onefold.comm.pending import Chains
from onefold.comm.run_ahead import RunAhead
from onefold.comm.stall import CollectiveContext, StallError, stall_error
from onefold.comm.wire import FAKE, Wire
from onefold.device import current_stream, has_streams, new_event

_KINDS = {
    "all-gather": 1,
    "reduce-scatter": 2,
    "all-reduce": 3,
    "control": 4,
    "state": 5,
    "call": 6,
    "agreement": 7,
}


class Peers:
    """The base of `Group`: a set of ranks, with this one among them. `Group` documents the other
    attributes.

    Attributes:
        control_group: gloo's communicator, for messages that the host reads.
        gather_group, reduce_group: the backend's communicators.
        at: each position's number in these two.
        heard: the last step at whose end all ranks agreed.
        broken: the error that this rank has failed with, or None.
        chains, relay: see [Note: chains go on in order] in comm/pending.py.
        summing: the stream on which parts are added up; None without streams. See [Note: sums
            beside the computation] in runtime/native_reductions.py.
        run_ahead: bounds how far the host runs ahead of the device; None where nothing needs it.
    """

    # A bit of the tags: 0 for messages among all ranks, 1 for messages on a level. The two levels
    # need no bit of their own: no two ranks are together on both levels
    _level: ClassVar[int] = 0

    timeout: float
    device: torch.device
    ledger: TrafficLedger
    wire: Wire
    backend: str
    communicators: Communicators
    control_group: Any
    gather_group: Any
    reduce_group: Any
    ranks: list[int]
    name: str
    size: int
    rank: int
    heard: int | None
    broken: StallError | None
    chains: Chains
    relay: Any
    summing: Any
    run_ahead: RunAhead | None
    _counts: dict[tuple[str, int], int]
    # Checksums of the launches on the communicators of gathers and of reductions
    _launched: list[int]

    def _set_position(
        self, rank: int, numbers: list[int], control: list[int], nodes: Sequence[int]
    ) -> None:
        """Set this rank's position, and what every move needs. `numbers` and `control` are each
        position's number in the communicators of data and of control messages.
        """
        self.rank, self.at, self._at_control = rank, numbers, control
        self.ordered = numbers == sorted(numbers)
        self._row_of: torch.Tensor | None = None  # the row, by number, of each position
        # Each rank starts with the one after it: no rank is the first peer of all others.
        self.peers = [(rank + i) % self.size for i in range(1, self.size)]
        self._elsewhere = [node != nodes[rank] for node in nodes]
        self._peers_elsewhere = sum(self._elsewhere)

    @property
    def native(self) -> bool:
        """Whether moves are the backend's own operations, on the device."""
        return self.size > 1 and self.wire.native

    @property
    def fake(self) -> bool:
        """Whether this is torch's "fake" backend: one rank stands for all, and nothing arrives."""
        return self.wire is FAKE

    def give_up(self) -> None:
        """Abort the native communicators, when a rank has failed to arrive."""
        self.communicators.give_up()

    # -- waiting -----------------------------------------------------------------------------------

    def wait(
        self, works: list[Any], context: CollectiveContext, event: TrafficEvent | None = None
    ) -> None:
        """Wait for `works`, and record in the ledger how long that took. On a device with streams
        the current stream waits, not the host.
        """
        on_host = self.backend == "gloo" or not has_streams(self.device)
        self._wait(works, context, event, on_host)

    def _wait(
        self,
        works: list[Any],
        context: CollectiveContext,
        event: TrafficEvent | None,
        on_host: bool,
    ) -> None:
        # The connections are closed: raise the same error again instead of waiting
        if self.broken is not None:
            raise self.broken
        self.chains.relay_before(context)
        start = time.perf_counter()
        try:
            if on_host:
                limit = timedelta(seconds=self.timeout)
                for work in works:
                    work.wait(limit)
                self.ledger.waited(event, start)
            else:
                self._wait_on_stream(works, context, event)
        except RuntimeError as error:
            raise self._lost(context, time.perf_counter() - start, error) from None

    def wait_for(
        self, mark: Any, context: CollectiveContext, event: TrafficEvent | None = None
    ) -> None:
        """Make the current stream wait for `mark`, an event behind a move that another stream waits
        for, and record in the ledger how long that took.
        """
        if self.broken is not None:
            raise self.broken
        stream = current_stream(self.device)
        with self._timed(stream, context, event):
            stream.wait_event(mark)

    @contextlib.contextmanager
    def launching(self, context: CollectiveContext) -> Iterator[None]:
        """Context around the launch of moves: raises a `StallError` if the launch fails, as it does
        when a peer has already exited.
        """
        if self.broken is not None:
            raise self.broken
        try:
            yield
        except RuntimeError as error:
            raise self._lost(context, 0.0, error) from None

    def _lost(self, context: CollectiveContext, waited: float, error: Exception) -> StallError:
        name = getattr(self.control_group, "group_name", "")
        self.broken = stall_error(
            context, waited, error, name, self.ranks[self.rank], self.ranks, self.heard
        )
        self.give_up()
        return self.broken

    def _lost_by_device(self, context: CollectiveContext, waited: float) -> StallError:
        cause = RuntimeError(f"the device waits for it, and the host asked for {waited:.0f} s")
        return self._lost(context, waited, cause)

    def _wait_on_stream(
        self, works: list[Any], context: CollectiveContext, event: TrafficEvent | None
    ) -> None:
        stream = current_stream(self.device)
        # On these no computation waits, so there is nothing to time
        beside = stream in (self.relay, self.summing)
        with contextlib.nullcontext() if beside else self._timed(stream, context, event):
            for work in works:
                work.wait()

    @contextlib.contextmanager
    def _timed(
        self, stream: Any, context: CollectiveContext, event: TrafficEvent | None
    ) -> Iterator[None]:
        """Context around a wait of the computing stream: enter in the ledger how long it takes."""
        before, after = new_event(self.device, timing=True), new_event(self.device, timing=True)
        before.record(stream)
        yield
        after.record(stream)
        self.ledger.marked(event, before, after)
        if self.run_ahead is not None:
            self.run_ahead.waits(context, before, after)

    # -- telling messages apart --------------------------------------------------------------------

    def note_launch(
        self, which: int, move: str, unit_index: int, about: int | tuple[int, int] = 0
    ) -> None:
        self._launched[which] = zlib.crc32(
            f"{move} {unit_index} {about}".encode(), self._launched[which]
        )

    def _record(
        self,
        move: str,
        context: CollectiveContext,
        dtype: torch.dtype,
        nbytes: int,
        between: int,
        plain: int = 0,
        plain_between: int = 0,
    ) -> TrafficEvent:
        """Enter a move in the ledger. `nbytes` are sent, `between` of them to other nodes; they
        were encoded from `plain` and `plain_between` bytes, 0 if not encoded.
        """
        on_the_wire = str(dtype).removeprefix("torch.")
        return self.ledger.record(
            move,
            context.unit,
            nbytes,
            self.size,
            on_the_wire,
            context.phase,
            context.step,
            self.name,
            between,
            plain,
            plain_between,
        )

    def tag(self, move: str, unit_index: int, addresses: tuple[int, int] | None = None) -> int:
        count = self._counts[move, unit_index] = self._counts.get((move, unit_index), 0) + 1
        if addresses is not None:
            count ^= hash(addresses)
        return (
            self._level << 30 | _KINDS[move] << 27 | (unit_index & 0x7FFF) << 12 | (count & 0xFFF)
        )
