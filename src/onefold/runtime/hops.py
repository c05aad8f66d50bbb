"""How the partial gradients in one buffer become this rank's sums, hop by hop, and reach the other
ranks that hold these sums too.

    stage 1 to 3      whole ── all ──► interval
    stage 0           whole ── all ──► interval ── all ──► whole            (reduce-scatter and all-gather: an all-reduce)
    over groups       whole ── intra-group ──► shard ── inter-group ──► interval
    stage 0           ... ──► interval ── inter-group ──► shard ── intra-group ──► whole
    HSDP, MiCS        whole ── intra-group ──► shard ── inter-group ──► interval ── inter-group ──► shard

One `Hop` for each hop of each flat buffer, chosen once in `shard()`:

| class          | file          | parts travel                           | and are added                           |
|----------------|---------------|----------------------------------------|-----------------------------------------|
| `Pairwise`     | here          | in messages between two ranks (gloo)   | here, in rank order                     |
| `Rows`         | here          | in one all_to_all_single (NCCL)        | here, in rank order                     |
| `Rows`         | here          | in a reduce_scatter of the backend     | by the backend, in an order of its own  |
| `Encoded`      | quant/encoded.py | encoded (qgZ)                          | here, decoded, in rank order            |

[Note: a hop under way is a generator] `Hop.start` yields once, when its messages are launched. The
second `next` lands it (`landed`): it waits for the parts, adds them up and returns the sums. `drop`
makes it raise `Dropped` in place of that. Either way it gives back what it has taken. The stream is
the caller's at the yield: no other stream may be current there.

[Note: rounded once] The mean over the ranks is computed in the accumulation dtype and rounded once
to the dtype of the wire. That holds too where the mean stays on this rank (stages 1 to 3). So the second half of stage 0's
all-reduce sends as many bytes as the formula says, and stages 1 to 3 get the same bits as stage 0.

[Note: the mean over ranks] Gradients are divided by the number of ranks once. If they travel in the
accumulation dtype, each rank scales its own gradients while it copies them into the buffer
(`Flat.early_scale`), at no cost. If they travel in 16 bits, scaling early would waste the range of
the dtype. Then the sums are scaled (`Hop.late`): on each hop by the number of ranks that it adds
up. Only where that is not the number to divide by (experts, layout/holders.py), the rest is early.

[Note: all parts at once] On backends with collectives of their own one operation brings the parts of
all ranks into the rows of one buffer, which are added in rank order (`add_up`). This rank's part is
sent along, unless it is in a wider dtype than the wire. Then it stays where it is and is not
rounded, as on gloo. With `reduce="native"` the backend adds the parts, in the dtype of the wire.

[Note: sums beside the computation] On a device with streams the kernel that adds the parts runs on
a stream of its own, `Group.summing`:

    computing    ... gradients of unit 1 |    gradients of unit 0    | wait for sum 1 | ...
    reductions                           [r1 ......]
    summing                                         [sum 1]

It is queued at the launch, behind the parts. When the reduction is landed, the computing stream
waits for the sum, and only then: the buffers were allocated on that stream, and go back to its pool.
So a sum that is done by then costs the computation nothing. The memory of the sum is taken at the
launch, on any device, so that a plan counts the same bytes for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from onefold.comm import CollectiveContext, Group, Pending
from onefold.comm.group import Parts
from onefold.device import current_stream, use_stream
from onefold.memory import GRADIENTS, REDUCTION, nbytes_of

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Flat

#: See [Note: a hop under way is a generator].
UnderWay = Generator[None, None, torch.Tensor]


class Dropped(Exception):
    """Raised inside a hop under way whose sums nobody wants any more."""


def landed(hop: UnderWay) -> torch.Tensor:
    """Wait for the parts of a hop under way and return their sums."""
    try:
        next(hop)
    except StopIteration as done:
        sums: torch.Tensor = done.value
        return sums
    raise AssertionError("a hop yields once")


def drop(hop: UnderWay) -> None:
    """Give up a hop under way. Waits for the parts, unless the group is broken: they will never come."""
    with suppress(Dropped):
        hop.throw(Dropped())


class Hop(ABC):
    """One hop of the reductions of one flat buffer: the ranks of `group` divide addresses.

    Attributes:
        last: no further hop follows. own: elements of a part. mine: this rank's part of a buffer.
        first: the address at which the buffer begins.
        sent_bytes: of a buffer in the dtype of the wire. They are the same on all ranks, unlike those of
            a buffer in which a rank has added up gradients.
        adds: who adds the parts up. late: the mean's factor if this hop applies it to its sums, else 1.
        rooms: the buffers that it needs, by the dtype of what it reduces.
    """

    def __init__(self, flat: Flat, at: int, engine: Engine) -> None:
        hop = flat.spec.hops[at]
        self.flat, self.last, self.first = flat, at + 1 == len(flat.spec.hops), hop.start
        self.group: Group = flat.group
        if hop.level != "all":
            inside = hop.level == "intra-group"
            self.group = flat.group.intra_group if inside else flat.group.inter_group
        self.pool, self.memory, self.unit = engine.pool, engine.memory, flat.unit_name
        self.wire, self.sums = flat.dtypes.wire, flat.dtypes.sums
        self.own = hop.own
        self.mine = slice(hop.index * hop.own, (hop.index + 1) * hop.own)
        self.sent_bytes = hop.span * self.wire.itemsize
        self.adds = flat.spec.added_by(hop)
        scales = flat.scales_late and self.adds != "backend"
        self.late = 1.0 / hop.size if scales else 1.0
        self.rooms = {d: flat.spec.exchange(at, d) for d in (self.wire, self.sums)}

    def start(self, buffer: torch.Tensor, context: CollectiveContext) -> UnderWay:
        """Reduce `buffer`, of the pool, which goes back to it. See [Note: a hop under way is a
        generator].
        """
        taken = [buffer]
        try:
            return (yield from self.run(taken, context))
        finally:  # the views of them are gone by now, so that the pool may hand them out again
            while taken:
                self.pool.give(taken.pop())

    @abstractmethod
    def run(self, taken: list[torch.Tensor], context: CollectiveContext) -> UnderWay:
        """Do what `start` says with `taken[0]`. Buffers that go back at the end are added to `taken`."""

    # -- memory ------------------------------------------------------------------------------------

    def take(self, numel: int, dtype: torch.dtype, taken: list[torch.Tensor]) -> torch.Tensor:
        taken.append(self.pool.take(numel, dtype, REDUCTION, self.unit))
        return taken[-1]

    def on_the_wire(self, taken: list[torch.Tensor]) -> torch.Tensor:
        """Return the buffer in the dtype of the wire: itself, or the last of `taken`."""
        buffer = taken[0]
        if buffer.dtype == self.wire:
            return buffer
        return self.take(buffer.numel(), self.wire, taken).copy_(buffer)

    def total(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the sums, and the part of it that this rank sums.

        A rank that holds more than it sums puts its sums into their place in what it holds. The
        other ranks' sums come later.
        """
        flat, own = self.flat, self.own
        if not self.last:  # the sums are sent on
            total = self.pool.take(own, self.sums, REDUCTION, self.unit)
            return total, total
        total = self.pool.fresh(flat.spec.own, flat.spec.landed)
        self.memory.add(GRADIENTS, nbytes_of(total))
        first = self.first + self.mine.start - flat.owned[0]
        return total, total[first : first + own]

    # -- parts and sums ----------------------------------------------------------------------------

    def until_here(self, pending: Pending) -> Iterator[None]:
        """Yield once, and then wait for the messages, also if the hop is dropped."""
        try:
            yield
        except Dropped:
            if self.group.broken is None:
                pending.wait()
            raise
        pending.wait()

    def add(self, parts: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Make the sums of all parts, in rank order, into `target`. See [Note: rounded once]."""
        round_to = self.wire if self.last else None
        add_up(parts, target, self.late, round_to=round_to, dtype=self.sums)


class Pairwise(Hop):
    """Each rank sends to every other rank the part that the other sums, and adds up what it gets.

    If the parts arrive in the dtype of the sums, and the sums may lie anywhere, the first part of
    another rank is received into memory of its own (`Exchange.apart`). The other parts are added to
    it, and it becomes the gradient.

    Where one rank stands for all (torch's "fake" backend), two messages stand for those to all other
    ranks, and nothing arrives.
    """

    def run(self, taken: list[torch.Tensor], context: CollectiveContext) -> UnderWay:
        buffer, group, here = taken[0], self.group, self.group.rank
        room, apart = self.rooms[buffer.dtype], None
        parts = {here: buffer[self.mine]}
        if room.apart:
            parts[int(here == 0)] = apart = self.pool.fresh(room.apart, self.wire)
            self.memory.add(REDUCTION, nbytes_of(apart), self.unit)
        rows = self.take(room.received, self.wire, taken) if room.rows else buffer[:0]
        if not group.stands_for_all:
            others = [p for p in range(group.size) if p not in parts]
            parts |= dict(zip(others, rows.view(room.rows, room.part), strict=True))
        sent = self.on_the_wire(taken)
        recvs = [(p, part) for p, part in parts.items() if p != here]
        try:
            yield from self.until_here(self.exchange(sent, recvs, context))
        finally:
            if apart is not None:
                self.memory.add(REDUCTION, -nbytes_of(apart), self.unit)
        if sent is not buffer:
            self.pool.give(taken.pop())
        if apart is not None:
            total = target = apart
            self.memory.add(GRADIENTS, nbytes_of(apart))
        else:
            total, target = self.total()
        self.add([part for _, part in sorted(parts.items())], target)
        return total

    def exchange(self, sent: torch.Tensor, recvs: Parts, context: CollectiveContext) -> Pending:
        """Send each rank its part of `sent`, and receive theirs of this rank's."""
        group, flat, here, mine = self.group, self.flat, self.group.rank, self.mine
        if group.stands_for_all:
            sends = [(here, sent[: mine.start]), (here, sent[mine.stop :])]
        else:
            pieces = enumerate(sent.view(group.size, self.own))
            sends = [(p, piece) for p, piece in pieces if p != here]
        return group.exchange(sends, recvs, context, flat.index)


class Rows(Hop):
    """See [Note: all parts at once] and [Note: sums beside the computation]."""

    def run(self, taken: list[torch.Tensor], context: CollectiveContext) -> UnderWay:
        room, group, added = self.rooms[taken[0].dtype], self.group, None
        rows = self.take(room.received, self.wire, taken).view(room.rows, room.part)
        total, target = self.total()
        try:
            pending, parts = self.launch(taken, rows, context)
            if group.summing is None:
                yield from self.until_here(pending)
            else:
                with use_stream(group.summing):
                    pending.wait()
                    self.add(parts, target)
                    added = group.summing.record_event()
                yield
                group.wait_for(added, pending.context, pending.event)
        except BaseException:
            if added is not None:  # later work gets the memory that the sum reads and writes
                current_stream(group.device).wait_event(added)
            if self.last:
                self.memory.add(GRADIENTS, -nbytes_of(total))
            else:
                self.pool.give(total)
            raise
        if added is None:
            self.add(parts, target)
        return total

    def launch(
        self, taken: list[torch.Tensor], rows: torch.Tensor, context: CollectiveContext
    ) -> tuple[Pending, list[torch.Tensor]]:
        """Send the parts, and receive them into `rows`. Returns also what is to be added then: this
        rank's part stays where it is if it is in a wider dtype. If the backend adds, in the dtype of
        the wire, one row arrives.
        """
        sent, mine, parts, flat = taken[0], self.mine, list(rows), self.flat
        if self.adds == "backend":
            sent, scales = self.on_the_wire(taken), flat.scales_late
            return self.group.reduce_scatter(sent, rows[0], context, flat.index, scales), parts
        if sent.dtype != self.wire:
            parts.insert(self.group.rank, sent[mine])
            before, behind = sent[: mine.start], sent[mine.stop :]
            sent = self.take(sent.numel() - self.own, self.wire, taken)
            sent[: mine.start].copy_(before)
            sent[mine.start :].copy_(behind)
        return self.group.scatter_parts(sent, rows, context, flat.index), parts


# -- sums ------------------------------------------------------------------------------------------
#
# Parts are added up in rank order, in one dtype, scaled and rounded once, in one pass over memory.
#
#     parts     [ranks, n]   16 bits or fp32, as they came over the wire        r0 |■ ■ ■ ■|
#     sum       [n]          ((r0 + r1) + r2) + ..., in `dtype` (fp32)          r1 |■ ■ ■ ■|  ──►  out |■ ■ ■ ■|
#     scaled    sum * scale, one multiplication behind the last addition        r2 |■ ■ ■ ■|
#     rounded   to `round_to`, then to the dtype of `out`
#
# [Note: the order of a sum] Floating-point addition is not associative, so the result depends on the
# order. Rank 0's part comes first. Each part is converted exactly and added with one rounding. The
# multiplication by the scale comes last: before an addition, a compiler could fuse it into one
# operation, which rounds once instead of twice. Stages 0 to 3 therefore sum the same parts to the
# same bits, in different places, on any device.


#: Elements added up at a time on a CPU: a slab, and what torch converts of it, fit the cache.
CPU_SLAB = 1 << 18


def add_up(
    parts: Sequence[torch.Tensor],
    out: torch.Tensor,
    scale: float = 1.0,
    *,
    round_to: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write `scale` times the sum of the ranks' parts, added in rank order, over all of `out`.
    Nothing waits for the device.

    Args:
        parts: one [n] for each rank, in rank order, in any floating-point dtypes.
        out: [n], contiguous, on the device of `parts`. It may be one of them; it must not overlap
            them otherwise.
        scale: the sum is multiplied by it, as by `Tensor.mul_`.
        round_to: the scaled sum is rounded to this dtype before it is converted to that of `out`;
            None: it is not.
        dtype: the accumulation dtype, in which parts are added and the sum is multiplied.
    """
    if round_to is not None and torch.promote_types(round_to, dtype) == round_to:
        round_to = None  # it can hold every value of `dtype`
    # If `out` is one of these, it would be overwritten before that is read
    later, n = parts[2 if parts[0].dtype == dtype else 1 :], out.numel()
    apart = out.dtype != dtype or any(part is out for part in later)
    slab = min(n, CPU_SLAB) if out.device.type == "cpu" else n
    room = torch.empty_like(out[:slab], dtype=dtype) if apart else None
    whole = (out, *parts)
    slabs = [whole] if slab == n else zip(*(t.split(slab) for t in whole), strict=True)
    for piece, first, *others in slabs:
        sums = piece if room is None else room[: piece.numel()]
        if others and first.dtype == others[0].dtype == dtype:
            torch.add(first, others.pop(0), out=sums)
        else:
            sums.copy_(first)
        for part in others:
            sums.add_(part)
        if scale != 1:
            sums.mul_(scale)
        if round_to is not None:
            sums = sums.to(round_to)
        if sums is not piece:
            piece.copy_(sums)
