"""Reductions on backends with collectives of their own (NCCL). See the table in reductions.py.

[Note: all parts at once] One operation brings the parts of all ranks into the rows of one buffer,
and one kernel adds them (comm/sums.py). This rank's part is sent along, unless it is in a wider
dtype than the wire. Then it stays where it is and is not rounded, as on gloo. With
`reduce="native"` the backend adds the parts, in the dtype of the wire and in an order of its own.

[Note: sums beside the computation] On a device with streams the kernel that adds the parts runs on
a stream of its own, `Peers.summing`:

    computing    ... gradients of unit 1 |    gradients of unit 0    | wait for sum 1 | ...
    reductions                           [r1 ......]
    summing                                         [sum 1]

It is queued at the launch, behind the parts. When the reduction is landed, the computing stream
waits for the sum, and only then: the buffers were allocated on that stream, and go back to its pool.
So a sum that is done by then costs the computation nothing. The memory of the sum is taken at the
launch, on any device, so that a plan counts the same bytes for all.
"""

from __future__ import annotations

from typing import Any

import torch

from onefold.comm import CollectiveContext, Pending
from onefold.comm.sums import sum_parts
from onefold.device import current_stream, use_stream
from onefold.memory import GRADIENTS, REDUCTION, nbytes_of
from onefold.runtime.reductions import Reduce, Reduction, Sending


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
        mean = self.flat.early_scale == 1
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
            total, context, self.flat.index, self.flat.early_scale == 1, r.run
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
