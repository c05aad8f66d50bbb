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
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist

from onefold.comm.communicators import Communicators
from onefold.comm.ledger import TrafficEvent, TrafficLedger
from onefold.comm.pending import Chains, CollectiveContext, RunAhead, StallError, stall_error
from onefold.comm.wire import FAKE, Wire
from onefold.device import current_stream, has_streams, new_event

_KINDS = {
    "owners": 0,
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
        updates: what clipping and optimizers did since the ranks last compared it: each a name, and
            items in words (runtime/updates.py).
        broken: the error that this rank has failed with, or None.
        chains, relay: see [Note: chains go on in order] in comm/pending.py.
        summing: the stream on which parts are added up; None without streams. See [Note: sums
            beside the computation] in runtime/reduce_paths.py.
        run_ahead: bounds how far the host runs ahead of the device; None where nothing needs it.
    """

    # A bit of the tags: 0 for messages among all ranks, 1 for messages on a level. The two levels
    # need no bit of their own: no two ranks are together on both levels
    _level: ClassVar[int] = 0
    # Goes into the counts in tags: messages among some ranks of a mesh are never taken for messages
    # among all of them
    _salt: int = 0
    # Whether lengths go into checksums of launches. Parts of a mesh have buffers of different lengths
    _sized: bool = True

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
    updates: list[tuple[str, ...]]
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
    def stands_for_all(self) -> bool:
        """Whether the other ranks are not there (torch's "fake" backend): nothing of theirs arrives."""
        return self.wire is FAKE

    @property
    def alone(self) -> bool:
        """Whether no other rank answers: there is none, or this one stands for all, and what the
        others would say is what it says itself.
        """
        return self.size == 1 or self.stands_for_all

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
        ranks, places = self.everyone
        among = f", among ranks {self.name}" if len(ranks) > self.size else ""
        if among and places:
            along = self.axes_of(self.ranks)
            among += f" (along {' and '.join(along)})"
        context = replace(context, after=tuple(name for name, *_ in self.updates))
        self.broken = stall_error(
            context, waited, error, name, self.ranks[self.rank], ranks, self.heard, among, places
        )
        self.give_up()
        return self.broken

    @property
    def everyone(self) -> tuple[list[int], dict[int, str]]:
        """The global ranks of the model, and the place of each in its mesh, in words: "dp 1, tp 0".
        No places if the mesh has one axis.
        """
        return self.ranks, {}

    def axes_of(self, ranks: Sequence[int]) -> list[str]:
        """Return the axes of the mesh along which some ranks are apart."""
        return []

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
        self, which: int, move: str, number: int, about: int | tuple[int, int] = 0
    ) -> None:
        about = about if self._sized else 0
        self._launched[which] = zlib.crc32(
            f"{move} {number} {about}".encode(), self._launched[which]
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

    def tag(self, move: str, number: int, addresses: tuple[int, int] | None = None) -> int:
        count = self._counts[move, number] = self._counts.get((move, number), 0) + 1
        if addresses is not None:
            count ^= hash(addresses)
        count ^= self._salt
        return self._level << 30 | _KINDS[move] << 27 | (number & 0x7FFF) << 12 | (count & 0xFFF)


# -- small messages --------------------------------------------------------------------------------
#
# Small messages between ranks. What the host reads goes over gloo, on any backend.


#: Bytes of numbers that travel together with the digest of what they are.
_INSIDE = 40
#: Bytes of words that tell other ranks what was asked for here.
_WORDS = 256


class Messages(Peers):
    """The small messages of a group."""

    def exchange_control(
        self, payload: torch.Tensor, context: CollectiveContext, kind: str = "control"
    ) -> list[torch.Tensor]:
        """Gather every rank's small uint8 payload ([n], the same length on all ranks, on the host),
        in rank order. Waits.

        Takes log2(ranks) rounds: in each, a rank passes on all payloads that it has (Bruck et al.
        1997). The messages go over gloo on any backend, because the host reads them.

        Args:
            kind: messages of different kinds are never taken for each other ("call": a collective
                that the user calls, at any time).
        """
        if self.alone:
            return [payload] * self.size
        # Row i is of the rank i positions after this one
        have = torch.empty((self.size, payload.numel()), dtype=torch.uint8, device="cpu")
        have[0] = payload
        step = 1
        while step < self.size:
            more = min(step, self.size - step)
            self._round(
                have[:more],
                (self.rank - step) % self.size,
                have[step : step + more],
                (self.rank + step) % self.size,
                context,
                kind,
                payload.numel(),
            )
            step *= 2
        return list(have.roll(self.rank, 0).unbind())

    def tell(
        self, text: str, limit: int, context: CollectiveContext, kind: str = "control"
    ) -> list[str]:
        """Return every rank's text, in rank order: the first `limit` bytes of it."""
        if self.alone:  # a simulation has no values in its tensors
            return [text] * self.size
        sent = bytearray(text.encode()[:limit].ljust(limit, b"\0"))
        told = self.exchange_control(torch.frombuffer(sent, dtype=torch.uint8), context, kind)
        return [bytes(t.tolist()).rstrip(b"\0").decode(errors="ignore") for t in told]

    def any_of(self, bits: bytes, context: CollectiveContext) -> bytes:
        """Return the bitwise or of `bits` over all ranks, which give equally many. Waits.

        Takes log2(ranks) rounds of one message, over gloo on any backend. With `both` and `alike`
        it also tells whether all ranks gave the same bits.
        """
        if self.alone:
            return bits
        mine = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
        step = 1
        # Bits that arrive twice change nothing, so the number of ranks need not be a power of 2
        while step < self.size:
            theirs = torch.empty_like(mine)
            self._round(
                mine,
                (self.rank + step) % self.size,
                theirs,
                (self.rank - step) % self.size,
                context,
                "agreement",
                len(bits),
            )
            mine = mine | theirs
            step *= 2
        return mine.numpy().tobytes()

    def _round(
        self,
        sent: torch.Tensor,
        to: int,
        received: torch.Tensor,
        source: int,
        context: CollectiveContext,
        kind: str,
        length: int,
    ) -> None:
        """Send to one rank and receive from another, on the host. Messages of different `length`
        have different tags, so they are never taken for each other.
        """
        tag = self.tag(kind, length)
        self.ledger.control_bytes += sent.numel()
        with self.launching(context):
            works = [
                dist.irecv(
                    received, group=self.control_group, group_src=self._at_control[source], tag=tag
                ),
                dist.isend(sent, group=self.control_group, group_dst=self._at_control[to], tag=tag),
            ]
        self._wait(works, context, None, on_host=True)

    def gather_asked(
        self, value: torch.Tensor, digest: int, asked: str, context: CollectiveContext
    ) -> torch.Tensor:
        """`gather_values` of numbers that the user's code asks for, after a check that every rank
        asks for the same.

        A few numbers travel in the message that is compared. More of them follow in one of their
        own, and on native backends all of them: there the host waits for the other hosts, and not
        for the device.

        Args:
            digest: 32 bits that tell what is asked for from anything else.
            asked: the same in words, for the message: "the norm of 'head.weight'".

        Raises:
            RuntimeError: on every rank, if another rank asks for something else.
        """
        if self.alone:
            return self.gather_values(value, context)
        mine, shape = b"", (self.size, *value.shape)
        if not self.native:
            mine = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        head = struct.pack("<II", digest, len(mine) if not self.native else value.numel())
        inside = len(mine) <= _INSIDE
        sent = bytearray((head + (mine if inside else b"")).ljust(len(head) + _INSIDE, b"\0"))
        told = self.exchange_control(torch.frombuffer(sent, dtype=torch.uint8), context, "call")
        found = torch.stack(told)
        if found[:, : len(head)].numpy().tobytes() != head * self.size:
            self._refuse_others(asked, context)
        if self.native or not inside:
            return self.gather_values(value, context)
        numbers = found[:, len(head) : len(head) + len(mine)].contiguous()
        return numbers.view(value.dtype).view(shape).to(value.device)

    def _refuse_others(self, asked: str, context: CollectiveContext) -> NoReturn:
        """Tell each other what was asked for, where it differs, and raise on every rank."""
        words = self.tell(asked, _WORDS, context, "call")
        by_rank = sorted(zip(self.ranks, words, strict=True))
        other, theirs = next(
            ((rank, said) for rank, said in by_rank if said != asked),
            ("another", "it for other elements of it, or for other tensors beside it"),
        )
        raise RuntimeError(
            f"rank {self.ranks[self.rank]} called {asked} while rank {other} called {theirs}: every"
            " rank must call the same, in the same order."
        )

    def gather_values(self, value: torch.Tensor, context: CollectiveContext) -> torch.Tensor:
        """Gather a few numbers of every rank: [...] becomes [size, ...], in rank order. On native
        backends the host does not wait.
        """
        shape = (self.size, *value.shape)
        if self.alone:
            return value.expand(shape)
        if not self.native:
            payload = value.detach().cpu().reshape(-1).view(torch.uint8)
            return (
                torch.cat(self.exchange_control(payload, context))
                .view(value.dtype)
                .view(shape)
                .to(value.device)
            )
        out = torch.empty(shape, dtype=value.dtype, device=value.device)
        self.ledger.control_bytes += value.numel() * value.element_size() * (self.size - 1)
        self.note_launch(1, "control", 0, value.numel())
        with self.launching(context):
            work = dist.all_gather_single(
                out.view(-1), value.reshape(-1).contiguous(), group=self.reduce_group, async_op=True
            )
        self.wait([work], context)
        if self.ordered:
            return out
        if self._row_of is None:  # copied to the device once
            self._row_of = torch.tensor(self.at, device="cpu").to(value.device)
        return out.index_select(0, self._row_of)


def both(bits: bytes) -> bytes:
    """Return `bits` followed by their complement: the input of `any_of` whose result `alike` can
    read.
    """
    return bits + bytes(b ^ 0xFF for b in bits)


def alike(found: bytes) -> bool:
    """Whether all ranks gave the same bits to `both`; `found` is the result of `any_of` on it."""
    half = len(found) // 2
    return not any(a & b for a, b in zip(found[:half], found[half:], strict=True))
