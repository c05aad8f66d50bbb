"""How the partial gradients in one buffer become this rank's sums, hop by hop, and reach the other
ranks that hold these sums too.

    stage 1 to 3      whole ── all ──► interval
    stage 0           whole ── all ──► interval ── all ──► whole            (reduce-scatter and all-gather: an all-reduce)
    over groups       whole ── intra-group ──► shard ── inter-group ──► interval
    stage 0           ... ──► interval ── inter-group ──► shard ── intra-group ──► whole
    HSDP, MiCS        whole ── intra-group ──► shard ── inter-group ──► interval ── inter-group ──► shard

One `Reduce` for each hop of each flat buffer, chosen once in `shard()`:

| class              | file                  | parts travel                           | and are added                           |
|--------------------|-----------------------|----------------------------------------|-----------------------------------------|
| `PairwiseReduce`   | here                  | in messages between two ranks (gloo)   | here, in rank order                     |
| `SimulatedReduce`  | here                  | nowhere: one rank stands for all       | as above                                |
| `RowsReduce`       | here                  | in one all_to_all_single (NCCL)        | here, in rank order, by one kernel      |
| `BackendReduce`    | here                  | in a reduce_scatter of the backend     | by the backend, in an order of its own  |
| `BackendAllReduce` | here                  | in an all_reduce of the backend        | by the backend, for every rank          |
| `EncodedReduce`    | quant/reduce_paths.py | encoded (qgZ)                          | here, decoded, in rank order            |

[Note: rounded once] The mean over the ranks is computed in the accumulation dtype and rounded once
to the dtype of the wire. That holds too where the mean stays on this rank (stages 1 to 3). So the second half of stage 0's
all-reduce sends as many bytes as the formula says, and stages 1 to 3 get the same bits as stage 0.

[Note: the mean over ranks] Gradients are divided by the number of ranks once. If they travel in the
accumulation dtype, each rank scales its own gradients while it copies them into the buffer
(`Flat.early_scale`), at no cost. If they travel in 16 bits, scaling early would waste the range of
the dtype. Then the sums are scaled (`Reduce.late_scale`): on each hop by the number of ranks that
it adds up. Only where that is not the number to divide by (experts, layout/holders.py), the rest is
early.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from onefold.comm import Chain, CollectiveContext, Cut, Pending
from onefold.comm.sums import sum_parts
from onefold.device import current_stream, use_stream
from onefold.layout import Adds, Exchange, overlap
from onefold.memory import GRADIENTS, REDUCTION, nbytes_of
from onefold.runtime.flat import Flat
from onefold.runtime.gather_paths import GroupHop
from onefold.runtime.unit import Unit

if TYPE_CHECKING:
    from onefold.runtime.resources import Resources


@dataclass
class Reduction:
    """One run of one flat buffer that is being reduced.

    Attributes:
        run: the addresses that are reduced. filled: which entries got a gradient here.
        buffer: what the next hop sends, over the addresses `span`. at: the index of the hop.
        sending: the hop that is under way.
        total: the sums of a landed hop, over `result_range`. down: they have left the device.
        gathering: the exchange of sums with the other ranks that hold them too.
        sent_bytes: bytes of `span` in the dtype of the wire. They are the same on all ranks, unlike
            those of `buffer`, which is wider where this rank has added up gradients.
    """

    unit: Unit
    flat: Flat
    run: tuple[int, int]
    filled: list[bool]
    buffer: torch.Tensor
    span: tuple[int, int]
    at: int = 0
    sending: Sending | None = None
    total: torch.Tensor | None = None
    result_range: tuple[int, int] = (0, 0)
    gathering: Pending | None = None
    down: bool = False
    sent_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self._count_bytes()

    def _count_bytes(self) -> None:
        self.sent_bytes = (self.span[1] - self.span[0]) * self.flat.dtypes.wire.itemsize

    @property
    def hop(self) -> GroupHop:
        return self.flat.hops[self.at]

    @property
    def own(self) -> tuple[int, int]:
        """The addresses of `span` that this rank sums on this hop."""
        return overlap(self.span, self.hop.own)

    @property
    def mine(self) -> torch.Tensor:
        """This rank's part of `buffer`."""
        a, b = self.own
        return self.buffer[a - self.span[0] : b - self.span[0]]

    @property
    def is_last(self) -> bool:
        """No further hop follows."""
        return self.at + 1 == len(self.flat.hops)

    def next_hop(self) -> None:
        """Make the sums of this hop the buffer that the next hop sends."""
        assert self.total is not None
        own = self.own
        self.buffer, self.total, self.span, self.at = self.total, None, own, self.at + 1
        self._count_bytes()


class Sending(ABC):
    """One hop of one reduction under way. It owns the buffers that `Reduce.start` took.

    Attributes:
        pending: the messages. sent: what is sent, if that is not the reduction's own buffer.
        receive_buffer: where the other ranks' parts arrive.
    """

    def __init__(self, by: Reduce, r: Reduction) -> None:
        self.by, self.r = by, r
        self.pending: Pending | None = None
        self.sent: torch.Tensor | None = None
        self.receive_buffer: torch.Tensor | None = None

    def on_the_wire(self) -> torch.Tensor:
        """The reduction's buffer in the dtype of the wire."""
        r, wire = self.r, self.r.flat.dtypes.wire
        if r.buffer.dtype == wire:
            return r.buffer
        self.sent = self.by.pool.take(r.buffer.numel(), wire, REDUCTION, r.unit.name)
        return self.sent.copy_(r.buffer)

    def land(self) -> None:
        """Wait for the parts, add them up, and set `total` and `result_range` of the reduction."""
        pool = self.by.pool
        self.wait()
        self.give_sent()
        total = self.sum()
        receive_buffer, self.receive_buffer = self.receive_buffer, None
        if receive_buffer is not None:
            pool.give(receive_buffer)
        self.give_sent()
        buffer, self.r.buffer = self.r.buffer, total
        pool.give(buffer)
        self.r.total = total

    def wait(self) -> None:
        """Wait for the parts."""
        pending, self.pending = self.pending, None
        assert pending is not None
        pending.wait()

    def give_sent(self) -> None:
        """Give back the buffer that was sent."""
        sent, self.sent = self.sent, None
        if sent is not None:
            self.by.pool.give(sent)

    @abstractmethod
    def sum(self) -> torch.Tensor:
        """Return the sums of the parts that have come; set `result_range` of the reduction."""

    def drop(self, wait: bool) -> None:
        """Give back what `Reduce.start` took. With `wait`, wait for the parts first; without, they
        will never come.
        """
        pending, self.pending = self.pending, None
        if pending is not None and wait:
            pending.wait()
        del pending
        self.forget_parts()
        nothing = self.r.buffer.new_empty(0)
        taken = self.r.buffer, self.sent, self.receive_buffer
        # Forgotten first: Ctrl-C may come in here, and the next call must give none twice
        self.r.buffer, self.sent, self.receive_buffer = nothing, None, None
        for buffer in taken:
            if buffer is not None and buffer.numel():
                self.by.pool.give(buffer)

    def forget_parts(self) -> None:
        """Drop the parts that are stored in no buffer of the pool."""


class Reduce(ABC):
    """One hop of the reductions of one flat buffer.

    Attributes:
        adds: how this class adds parts, if not as the recipe says.
    """

    adds: ClassVar[Adds | None] = None

    def __init__(self, flat: Flat, at: int, resources: Resources) -> None:
        self.flat, self.at, self.hop, self.group = flat, at, flat.hops[at], flat.hops[at].group
        self.pool, self.memory = resources.pool, resources.memory
        self.is_last = at + 1 == len(flat.hops)
        # One for each span seen so far: spans change when parameters are frozen or trained again
        self._cuts: dict[tuple[int, int], Cut] = {}
        self._exchanges: dict[tuple[tuple[int, int], torch.dtype], Exchange] = {}

    @abstractmethod
    def start(self, r: Reduction, context: CollectiveContext) -> Sending:
        """Start this hop of `r`."""

    def cut(self, span: tuple[int, int]) -> Cut:
        """How this hop divides a buffer over `span`."""
        if span not in self._cuts:
            self._cuts[span] = self.group.cut(
                [b - a for a, b in (overlap(span, there) for there in self.hop.ranges)]
            )
        return self._cuts[span]

    def exchange(self, r: Reduction) -> Exchange:
        """The buffers that this hop needs."""
        key = (r.span, r.buffer.dtype)
        if key not in self._exchanges:
            self._exchanges[key] = self.flat.spec.exchange(self.at, key[1], r.span, self.adds)
        return self._exchanges[key]

    # -- sums --------------------------------------------------------------------------------------

    @property
    def late_scale(self) -> float:
        """The mean's factor if this hop applies it to its sums, else 1. See [Note: the mean over
        ranks].
        """
        return 1.0 / self.group.size if self.group.size > 1 and self.flat.scales_late else 1.0

    def target(self, r: Reduction) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (memory for the sums over `result_range`, the part of it that this rank sums)."""
        flat, own = self.flat, r.own
        if not self.is_last:  # the sums are sent on
            total = self.pool.take(own[1] - own[0], flat.dtypes.sums, REDUCTION, r.unit.name)
            r.result_range = own
            return total, total
        # A rank that holds more than it sums puts its sums into their place in what it holds. The
        # other ranks' sums come later.
        sent_on = flat.broadcast_back is not None
        a, b = r.result_range = overlap(r.run, flat.owned) if sent_on else own
        total = self.pool.fresh(b - a, flat.spec.landed)
        self.memory.add(GRADIENTS, nbytes_of(total))
        return total, total[own[0] - a : own[1] - a]

    def finish(self, r: Reduction, target: torch.Tensor, sending: PartsSending) -> None:
        """Add the parts up into `target`: in the accumulation dtype, scaled, rounded once."""
        sums_dtype = self.flat.dtypes.sums
        sums = target
        if target.dtype != sums_dtype:
            sums = self.pool.take(target.numel(), sums_dtype, REDUCTION, r.unit.name)
        sending.add_up(sums)
        if self.late_scale != 1:
            sums.mul_(self.late_scale)
        if sums is not target:
            target.copy_(sums)
            self.pool.give(sums)
        elif self.is_last:
            self._round(sums, sending.receive_buffer)

    def _round(self, sums: torch.Tensor, room: torch.Tensor | None) -> None:
        """Round `sums` to the dtype of the wire, in place. See [Note: rounded once].

        The rounded values pass through `room`, the receive buffer of parts that have been added.
        """
        wire = self.flat.dtypes.wire
        if room is None or wire == sums.dtype or torch.promote_types(wire, sums.dtype) == wire:
            return
        room = room.view(torch.uint8)
        room = room[: room.numel() // wire.itemsize * wire.itemsize].view(wire)
        for part in sums.split(max(room.numel(), 1)):
            part.copy_(room[: part.numel()].copy_(part))


class PartsSending(Sending):
    """A hop that adds up the ranks' parts itself: `parts`, by position in the hop's group."""

    def __init__(self, by: Reduce, r: Reduction) -> None:
        super().__init__(by, r)
        self.parts: dict[int, torch.Tensor] = {}

    def sum(self) -> torch.Tensor:
        total, target = self.by.target(self.r)
        self.by.finish(self.r, target, self)
        self.parts.clear()
        return total

    def forget_parts(self) -> None:
        self.parts.clear()

    def add_up(self, sums: torch.Tensor) -> None:
        """Add all parts into `sums`, in rank order."""
        first, *others = self.parts.values()
        if others and first.dtype == others[0].dtype == sums.dtype:
            torch.add(first, others[0], out=sums)
            others = others[1:]
        else:
            sums.copy_(first)
        for part in others:
            sums.add_(part)


class PairwiseReduce(Reduce):
    """Each rank sends to every other rank the part that the other sums, and adds up what it gets.

    If the parts arrive in the dtype of the sums, and the sums may lie anywhere, one peer's part is
    received into memory of its own. The other parts are added to it, and it becomes the gradient.
    """

    adds = "pairwise"

    def __init__(self, flat: Flat, at: int, resources: Resources) -> None:
        super().__init__(flat, at, resources)
        in_place = (
            self.is_last
            and flat.broadcast_back is None
            and self.group.size > 1
            and flat.dtypes.wire == flat.dtypes.sums
        )
        # The peer whose part becomes the sum; None if none does
        self.into: int | None = (1 if self.group.rank == 0 else 0) if in_place else None

    def start(self, r: Reduction, context: CollectiveContext) -> Sending:
        sending = (
            InPlaceSending(self, r, self.into)
            if self.into is not None and r.buffer.dtype == self.flat.dtypes.wire
            else PartsSending(self, r)
        )
        sent = sending.on_the_wire()
        self.place_parts(sending)
        sends, recvs = self.messages(sending, sent)
        sending.pending = self.group.exchange(
            sends, recvs, context, self.flat.index, move=context.move, addresses=r.run
        )
        return sending

    def place_parts(self, sending: PartsSending) -> None:
        """Parts from other ranks share one receive buffer; this rank's part stays in place."""
        r, group, dtype = sending.r, self.group, self.flat.dtypes.wire
        mine = r.mine
        places = {group.rank: mine}
        if isinstance(sending, InPlaceSending):
            places[sending.into] = self.pool.fresh(mine.numel(), dtype)
            self.memory.add(REDUCTION, nbytes_of(places[sending.into]), r.unit.name)
        room = self.exchange(r)
        if room.rows:
            sending.receive_buffer = self.pool.take(room.received, dtype, REDUCTION, r.unit.name)
            self.place_others(places, sending.receive_buffer.view(room.rows, room.part))
        sending.parts = dict(sorted(places.items()))

    def place_others(self, places: dict[int, torch.Tensor], rows: torch.Tensor) -> None:
        """Receive the parts that have no place yet into `rows`."""
        others = (p for p in range(self.group.size) if p not in places)
        places |= dict(zip(others, rows.unbind(), strict=True))

    def messages(
        self, sending: PartsSending, sent: torch.Tensor
    ) -> tuple[list[tuple[int, torch.Tensor]], list[tuple[int, torch.Tensor]]]:
        """Return (what is sent, what is received), each a list of (peer, tensor)."""
        here = self.group.rank
        parts = enumerate(pieces(sent, sending.r.span, self.hop))
        return (
            [(p, piece) for p, piece in parts if p != here],
            [(p, part) for p, part in sending.parts.items() if p != here],
        )


class SimulatedReduce(PairwiseReduce):
    """One rank stands for all (torch's "fake" backend). Two messages stand for those to all other
    ranks, and nothing arrives.
    """

    def place_others(self, places: dict[int, torch.Tensor], rows: torch.Tensor) -> None:
        pass

    def messages(
        self, sending: PartsSending, sent: torch.Tensor
    ) -> tuple[list[tuple[int, torch.Tensor]], list[tuple[int, torch.Tensor]]]:
        here, r = self.group.rank, sending.r
        a, b = r.own[0] - r.span[0], r.own[1] - r.span[0]
        return (
            [(here, sent[:a]), (here, sent[b:])],
            [(p, part) for p, part in sending.parts.items() if p != here],
        )


class InPlaceSending(PartsSending):
    """The part of the peer `into` becomes the sum."""

    def __init__(self, by: Reduce, r: Reduction, into: int) -> None:
        super().__init__(by, r)
        self.into = into

    def sum(self) -> torch.Tensor:
        total = self.parts[self.into]
        self.r.result_range = self.r.own
        self.by.memory.add(REDUCTION, -nbytes_of(total), self.r.unit.name)
        self.by.memory.add(GRADIENTS, nbytes_of(total))
        # Rank 0 adds part 1 to part 0, the others part 0 to part 1: the same sum
        for rank, part in self.parts.items():
            if rank != self.into:
                total.add_(part)
        self.parts.clear()
        return total

    def forget_parts(self) -> None:
        if self.into in self.parts:
            nbytes = nbytes_of(self.parts[self.into])
            self.by.memory.add(REDUCTION, -nbytes, self.r.unit.name)
        self.parts.clear()


# -- to the other ranks that hold the sums too -----------------------------------------------------


def broadcast_back(r: Reduction, context: CollectiveContext) -> Pending:
    """Start the exchange of sums among all ranks that hold them: between groups first, then inside
    each group.
    """
    last, group = len(r.flat.hops) - 1, r.flat.group
    pending = _broadcast_on(r, last, context)
    if r.flat.whole_master and last:
        return Chain(group, pending, lambda: _broadcast_on(r, 0, context))
    return pending


def _broadcast_on(r: Reduction, at: int, context: CollectiveContext) -> Pending:
    """Exchange sums over the addresses of hop `at` with the ranks of its group: send this rank's,
    receive theirs.
    """
    assert r.total is not None
    hop, by = r.flat.hops[at], r.flat.reduces[at]
    group, span = hop.group, overlap(r.result_range, (hop.ranges[0][0], hop.ranges[-1][1]))
    total = r.total[span[0] - r.result_range[0] : span[1] - r.result_range[0]]
    division = by.cut(span)
    if group.can_reduce(division):
        return group.all_gather(
            total, context, r.flat.index, move="all-reduce", over=1, addresses=r.run
        )
    part = pieces(total, span, hop)
    peers = [p for p in range(group.size) if p != group.rank]
    recvs = [(p, part[p]) for p in peers] if not group.alone else []
    sends = [(p, part[group.rank]) for p in peers]
    return group.exchange(sends, recvs, context, r.flat.index, move="all-reduce", addresses=r.run)


def pieces(buffer: torch.Tensor, span: tuple[int, int], hop: GroupHop) -> tuple[torch.Tensor, ...]:
    """Split a buffer over `span` into the ranks' pieces, by position in the hop's group."""
    cuts = [overlap(span, there) for there in hop.ranges]
    return buffer.split([b - a for a, b in cuts])


# -- sums on a native backend ----------------------------------------------------------------------
#
# Reductions on backends with collectives of their own (NCCL).
#
# [Note: all parts at once] One operation brings the parts of all ranks into the rows of one buffer,
# and one kernel adds them (comm/sums.py). This rank's part is sent along, unless it is in a wider
# dtype than the wire. Then it stays where it is and is not rounded, as on gloo. With
# `reduce="native"` the backend adds the parts, in the dtype of the wire and in an order of its own.
#
# [Note: sums beside the computation] On a device with streams the kernel that adds the parts runs on
# a stream of its own, `Group.summing`:
#
#     computing    ... gradients of unit 1 |    gradients of unit 0    | wait for sum 1 | ...
#     reductions                           [r1 ......]
#     summing                                         [sum 1]
#
# It is queued at the launch, behind the parts. When the reduction is landed, the computing stream
# waits for the sum, and only then: the buffers were allocated on that stream, and go back to its pool.
# So a sum that is done by then costs the computation nothing. The memory of the sum is taken at the
# launch, on any device, so that a plan counts the same bytes for all.


class RowsSending(Sending):
    """Parts in the rows of `receive_buffer`.

    Attributes:
        rows: the number of rows. summed: the backend has added the parts up and scaled them, into
            one row.
        total, target: memory for the sums, and the part of it that this rank sums.
        added: an event behind the sum, where that runs on a stream of its own.
    """

    def __init__(self, by: Reduce, r: Reduction, rows: int, summed: bool = False) -> None:
        super().__init__(by, r)
        self.rows, self.summed = rows, summed
        self.total: torch.Tensor | None = None
        self.target: torch.Tensor | None = None
        self.added: Any = None

    def take_total(self) -> None:
        """Take memory for the sums. Called before the launch: the parts wait for what had that
        memory before, and the sum for the parts.
        """
        self.total, self.target = self.by.target(self.r)

    def launched(self, pending: Pending) -> Sending:
        """Note that the parts are on their way, and queue the sum behind them. See [Note: sums
        beside the computation].
        """
        self.pending, summing = pending, self.by.group.summing
        if summing is not None:
            with use_stream(summing):
                pending.wait()
                self._add()
                self.added = summing.record_event()
        return self

    def wait(self) -> None:
        if self.added is None:
            super().wait()
            return
        pending, self.pending = self.pending, None
        assert pending is not None
        self.by.group.wait_for(self.added, pending.context, pending.event)

    def sum(self) -> torch.Tensor:
        if self.added is None:
            self._add()
        total, self.total, self.target, self.added = self.total, None, None, None
        assert total is not None
        return total

    def _add(self) -> None:
        """Add the rows, and this rank's part if it is not among them, with one kernel."""
        r, by, dtypes, target = self.r, self.by, self.r.flat.dtypes, self.target
        assert self.receive_buffer is not None and target is not None
        stays = not self.summed and self.rows < by.group.size
        sum_parts(
            self.receive_buffer.view(self.rows, target.numel()),
            target,
            1.0 if self.summed else by.late_scale,
            own=r.mine if stays else None,
            rank=by.group.rank,
            round_to=dtypes.wire if by.is_last else None,
            dtype=dtypes.sums,
        )

    def drop(self, wait: bool) -> None:
        if self.added is not None:  # later work gets the memory that the sum reads and writes
            current_stream(self.by.group.device).wait_event(self.added)
            self.pending = self.added = None
        super().drop(wait)

    def forget_parts(self) -> None:
        total, self.total, self.target = self.total, None, None
        if total is None:
            return
        if self.by.is_last:
            self.by.memory.add(GRADIENTS, -nbytes_of(total))
        else:
            self.by.pool.give(total)


class RowsReduce(Reduce):
    """See [Note: all parts at once]."""

    adds = "at once"

    def start(self, r: Reduction, context: CollectiveContext) -> Sending:
        pool, wire, cut, sent = self.pool, self.flat.dtypes.wire, self.cut(r.span), r.buffer
        room = self.exchange(r)
        sending = RowsSending(self, r, room.rows)
        if sent.dtype != wire:
            a, b = r.own[0] - r.span[0], r.own[1] - r.span[0]
            sent = sending.sent = pool.take(room.sent, wire, REDUCTION, r.unit.name)
            sent[:a].copy_(r.buffer[:a])
            sent[a:].copy_(r.buffer[b:])
        into = pool.take(room.received, wire, REDUCTION, r.unit.name)
        sending.receive_buffer = into
        sending.take_total()
        pending = self.group.scatter_parts(
            sent,
            cut,
            into.view(room.rows, room.part),
            context,
            self.flat.index,
            context.move,
            addresses=r.run,
        )
        return sending.launched(pending)


class BackendReduce(RowsReduce):
    """The backend adds the parts up, in the dtype of the wire."""

    def start(self, r: Reduction, context: CollectiveContext) -> Sending:
        cut = self.cut(r.span)
        if not self.group.can_reduce(cut):  # uneven parts, as where some parameters are frozen
            return super().start(r, context)
        sending = RowsSending(self, r, 1, summed=True)
        sent = sending.on_the_wire()
        into = self.pool.take(cut.own, sent.dtype, REDUCTION, r.unit.name)
        sending.receive_buffer = into
        sending.take_total()
        mean = self.flat.scales_late
        pending = self.group.reduce_scatter(
            sent, cut, into, context, self.flat.index, context.move, mean, r.run
        )
        return sending.launched(pending)


class BackendAllReduce(Reduce):
    """The backend adds everything up for all ranks in one operation, which stands for all hops and
    the way back.
    """

    def start(self, r: Reduction, context: CollectiveContext) -> Sending:
        sending = AllReduceSending(self, r, context)
        sent, r.at = sending.on_the_wire(), len(self.flat.hops) - 1
        total = self.pool.fresh(sent.numel(), sent.dtype).copy_(sent)
        self.memory.add(GRADIENTS, nbytes_of(total))
        sending.total = total
        sending.pending = self.flat.group.all_reduce(
            total, context, self.flat.index, self.flat.scales_late, r.run
        )
        return sending


class AllReduceSending(Sending):
    """`total` becomes the sums in place."""

    total: torch.Tensor

    def __init__(self, by: Reduce, r: Reduction, context: CollectiveContext) -> None:
        super().__init__(by, r)
        self.context = context

    def sum(self) -> torch.Tensor:
        # Every rank has the sums: nothing is left to send on
        self.r.result_range = self.r.run
        self.r.gathering = Pending(self.r.flat.group, [], self.context)
        return self.total
