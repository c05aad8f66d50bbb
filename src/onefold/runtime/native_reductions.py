"""Reductions on backends with collectives of their own (NCCL). See the table in reductions.py.

[Note: all parts at once] One operation brings the parts of all ranks into the rows of one buffer,
and one kernel adds them (comm/sums.py). This rank's part is sent along, unless it is in a wider
dtype than the wire. Then it stays where it is and is not rounded, as on gloo. With
`reduce="native"` the backend adds the parts, in the dtype of the wire and in an order of its own.
"""

from __future__ import annotations

import torch

from onefold.comm import CollectiveContext, Pending
from onefold.comm.sums import sum_parts
from onefold.memory import GRADIENTS, REDUCTION, nbytes_of
from onefold.runtime.reductions import Reduce, Reduction, Sending


class RowsSending(Sending):
    """Parts in the rows of `receive_buffer`.

    Attributes:
        rows: the number of rows. summed: the backend has added the parts up and scaled them, into
            one row.
    """

    def __init__(self, by: Reduce, r: Reduction, rows: int, summed: bool = False) -> None:
        super().__init__(by, r)
        self.rows, self.summed = rows, summed

    def sum(self) -> torch.Tensor:
        """Add the rows, and this rank's part if it is not among them, with one kernel."""
        r, by, dtypes = self.r, self.by, self.r.flat.dtypes
        assert self.receive_buffer is not None
        total, target = by.target(r)
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
        return total


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
        sending.pending = self.group.scatter_parts(
            sent,
            cut,
            into.view(room.rows, room.part),
            context,
            self.flat.index,
            context.move,
            addresses=r.run,
        )
        return sending


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
        mean = self.flat.early_scale == 1
        sending.pending = self.group.reduce_scatter(
            sent, cut, into, context, self.flat.index, context.move, mean, r.run
        )
        return sending


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
