"""The collectives ("moves") between placements: all tensor traffic goes through here.

| from         | to         | move           | pairwise (gloo)                            | native (NCCL)                |
|--------------|------------|----------------|--------------------------------------------|------------------------------|
| sharded      | replicated | all-gather     | each rank sends its interval to each other | all_gather_single            |
| partial sums | sharded    | reduce-scatter | sends of intervals, then a local sum       | all_to_all_single, local sum |
| partial sums | replicated | all-reduce     | the two above                              | the two above                |
| replicated   | sharded    | slice          | no traffic                                 | no traffic                   |

With `reduce="native"` in the recipe partial sums go by the backend's own reduce_scatter_single and
all_reduce.

[Note: sums are local and in rank order] Every reduction sends the parts unchanged. The rank that
owns the interval adds them up in rank order, in the accumulation dtype. So the bits of a sum depend
neither on the placement of the result nor on how the unit was cut into messages, and stages 0 to 3
are bit-equal. And 16-bit gradients can be sent in 16 bits and still be summed in fp32.

[Note: one rank stands for all] Under torch's "fake" backend (simulation/simulate.py) moves are entered in
the ledger and nothing arrives. Where a rank needs the others' values, it takes its own. A
simulation with a clock (simulation/clock.py) gives each move a work object to wait for, as NCCL
does.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from onefold.comm.peers import Messages
from onefold.comm.pending import Chain, CollectiveContext, Pending, StallError
from onefold.comm.wire import GLOO, Cut, Launch, Parts

if TYPE_CHECKING:
    from onefold.comm.group import Group


class Moves(Messages):
    """The collectives of a group, and of its levels."""

    _intra_group: Group | None
    _inter_group: Group | None
    _parts: dict[tuple[int, ...], Group]

    def below(self) -> Iterator[Group]:
        """Yield the groups made of this one: its levels, its parts, and their levels."""
        for group in (self._intra_group, self._inter_group, *self._parts.values()):
            if group is not None:
                yield group
                yield from group.below()

    # -- gathers -----------------------------------------------------------------------------------

    def all_gather(
        self,
        full: torch.Tensor,
        context: CollectiveContext,
        number: int,
        *,
        move: str = "all-gather",
        plain: int = 0,
    ) -> Pending:
        """sharded → replicated, in place: send rank r's interval of `full` ([numel], cut evenly) to
        every other rank's `full`.

        `plain`: bytes that `full` was encoded from, for the ledger.
        """
        if self.size == 1:
            return Pending(self, [], context)
        shard = full.numel() // self.size
        inner, outer = self._intra_group, self._inter_group
        if inner is not None and outer is not None:
            first = self.rank // outer.size * outer.size * shard
            low = outer.all_gather(
                full[first : first + shard * outer.size],
                context,
                number,
                move=move,
                plain=plain * outer.size // self.size,
            )
            return Chain(
                self,
                low,
                lambda: inner.all_gather(full, context, number, move=move, plain=plain),
            )
        mine = full[self.rank * shard : (self.rank + 1) * shard]
        each, part = (
            self._to_all(mine.numel() * mine.element_size()),
            self._to_all(plain // self.size),
        )
        event = self._record(move, context, full.dtype, *each, *part)
        return self.wire.all_gather(Launch(self, move, number, context, event), full, mine)

    def _to_all(self, nbytes: int) -> tuple[int, int]:
        """Return (all bytes, bytes to other nodes) that are sent if each peer is sent `nbytes`."""
        return nbytes * len(self.peers), nbytes * self._peers_elsewhere

    @property
    def joins_messages(self) -> bool:
        """Whether `all_gather_together` is available and pays: on gloo and a CPU, a message costs
        the host more than copying the few bytes in it.
        """
        return (
            self.wire is GLOO
            and self.size > 1
            and self.device.type == "cpu"
            and (self._inter_group is None or self._intra_group is None)
        )

    def all_gather_together(
        self, fulls: Sequence[torch.Tensor], places: Sequence[CollectiveContext], number: int
    ) -> Pending:
        """All-gather several buffers, in one message to each rank.

        Until the move is waited for, temporary buffers, together as large as all `fulls`, hold what
        is sent and received.

        Args:
            fulls: [numel] each, cut evenly, of one dtype.
            places: the context of each gather; the ledger gets an event for each.
            number: messages with different numbers are never taken for each other.
        """
        size, rank = self.size, self.rank
        rows = [full.view(size, -1) for full in fulls]
        events = []
        for row, context in zip(rows, places, strict=True):
            each = self._to_all(row.shape[1] * row.element_size())
            events.append(self._record("all-gather", context, row.dtype, *each))
        lengths = [row.shape[1] for row in rows]
        sent = torch.cat([row[rank] for row in rows])
        received = [(peer, torch.empty_like(sent)) for peer in self.peers]

        def arrived() -> None:
            for peer, message in received:
                torch._foreach_copy_([row[peer] for row in rows], list(message.split(lengths)))
            now = time.perf_counter()
            for event in events[1:]:
                self.ledger.waited(event, now)

        sends = [(peer, sent) for peer in self.peers]
        launch = Launch(self, "all-gather", number, places[0], events[0])
        return self.wire.exchange(launch, sends, received).then(arrived)

    # -- moves of reductions on native backends ----------------------------------------------------

    def cut(self, sizes: Sequence[int]) -> Cut:
        """Return the division of a buffer into parts of `sizes` elements, by position, for the
        moves below. Make it once.
        """
        elsewhere = sum(size for size, far in zip(sizes, self._elsewhere, strict=True) if far)
        return Cut(tuple(sizes), sum(sizes), sizes[self.rank], elsewhere, len(set(sizes)) == 1)

    def scatter_parts(
        self,
        sent: torch.Tensor,
        cut: Cut,
        received: torch.Tensor,
        context: CollectiveContext,
        number: int,
        move: str,
        plain: int = 0,
        addresses: tuple[int, int] | None = None,
    ) -> Pending:
        """Exchange the parts of a reduction, in one operation. The caller adds them up.

        Args:
            sent: the parts for all ranks, in order of position, [numel]; or without this rank's own
                part, [numel - own].
            received: the parts from all ranks, by position: [ranks, own] with a row for this rank,
                or [ranks - 1, own] without.
            plain: bytes that each rank's part was encoded from, for the ledger.
            addresses: the range of the unit's buffer that is reduced, the same on all ranks. If
                ranks disagree on it, they do not take each other's bytes for their own.
        """
        width = sent.element_size()
        parts = (cut.numel - cut.own) * width, cut.between * width
        event = self._record(move, context, sent.dtype, *parts, *self._to_all(plain))
        return self.wire.scatter_parts(
            Launch(self, move, number, context, event, addresses), sent, cut, received
        )

    def can_reduce(self, cut: Cut) -> bool:
        """Whether the backend has a reduce-scatter of its own and it fits: the parts are even, and
        in the order in which the communicator counts the ranks.
        """
        return self.wire is not GLOO and cut.even and self.ordered

    def reduce_scatter(
        self,
        sent: torch.Tensor,
        cut: Cut,
        own: torch.Tensor,
        context: CollectiveContext,
        number: int,
        move: str,
        mean: bool,
        addresses: tuple[int, int] | None = None,
    ) -> Pending:
        """Run the backend's own reduce-scatter: the sum, or mean, of all ranks' `sent` [numel].
        This rank's part is written to `own`. The backend adds in the dtype of `sent`.
        """
        width = sent.element_size()
        event = self._record(
            move, context, sent.dtype, (cut.numel - cut.own) * width, cut.between * width
        )
        return self.wire.reduce_scatter(
            Launch(self, move, number, context, event, addresses), sent, own, mean
        )

    def all_reduce(
        self,
        whole: torch.Tensor,
        context: CollectiveContext,
        number: int,
        mean: bool,
        addresses: tuple[int, int] | None = None,
    ) -> Pending:
        """Run the backend's own all-reduce: the sum, or mean, of all ranks' `whole`, in place and
        in its dtype.
        """
        move, each = "all-reduce", 2 * math.ceil(whole.numel() / self.size) * whole.element_size()
        event = self._record(move, context, whole.dtype, *self._to_all(each))
        return self.wire.all_reduce(
            Launch(self, move, number, context, event, addresses), whole, mean
        )

    def gather_sums(
        self,
        whole: torch.Tensor,
        cut: Cut,
        context: CollectiveContext,
        number: int,
        addresses: tuple[int, int] | None = None,
    ) -> Pending:
        """All-gather each rank's part of `whole` ([numel], by position) in place, after a
        reduction. It goes to the communicator of reductions, in their order.

        `cut` is one that `can_reduce`.
        """
        move, each = "all-reduce", cut.own * whole.element_size()
        event = self._record(move, context, whole.dtype, *self._to_all(each))
        own = whole[self.rank * cut.own : (self.rank + 1) * cut.own]
        return self.wire.gather_sums(
            Launch(self, move, number, context, event, addresses), whole, own
        )

    def launched(self) -> bytes:
        """Return a checksum of all launches on the native communicators so far, in order. It is the
        same on all ranks unless they diverged. See [Note: order instead of tags].
        """
        found = [self._launched, *(group._launched for group in self.below())]
        return zlib.crc32(repr(found).encode()).to_bytes(4, "little")

    def out_of_order(self, context: CollectiveContext) -> StallError:
        """Return the error that every rank raises when the ranks launched different moves. The
        group cannot be used any more.
        """
        self.broken = StallError(
            f"rank {self.ranks[self.rank]} found at the end of the backward pass of step"
            f" {context.step} that ranks {sorted(self.ranks)} launched gathers or reductions of"
            f" different units, or in different orders. {self.backend} matches them by their order:"
            " one unit was taken for another. Do not use the results of this step. Ranks must use"
            " the units of a sharded model in one order; where they cannot, use gloo."
        )
        self.give_up()
        return self.broken

    # -- other moves -------------------------------------------------------------------------------

    def exchange(
        self,
        sends: Parts,
        recvs: Parts,
        context: CollectiveContext,
        number: int,
        *,
        move: str,
        plain: Mapping[int, int] | None = None,
        addresses: tuple[int, int] | None = None,
    ) -> Pending:
        """Send each `(peer, tensor)` and receive into each `(peer, tensor)`: the exchange in a
        reduction, a scatter or a gather of uneven parts.

        Tensors are contiguous and one-dimensional; empty ones are skipped on both sides. `plain`:
        bytes that the part for each peer was encoded from, for the ledger. `addresses`: as in
        `scatter_parts`.
        """
        if self.size == 1:
            return Pending(self, [], context)
        dtype = next((t.dtype for _, t in [*sends, *recvs]), torch.uint8)
        was, elsewhere = plain or {}, self._elsewhere
        counts = [(t.numel() * t.element_size(), was.get(p, 0), elsewhere[p]) for p, t in sends]
        event = self._record(move, context, dtype, sum(c[0] for c in counts), sum(c[0] for c in counts if c[2]),
                             sum(c[1] for c in counts), sum(c[1] for c in counts if c[2]))  # fmt: skip
        return self.wire.exchange(
            Launch(self, move, number, context, event, addresses), sends, recvs
        )

    def broadcast(self, tensors: list[torch.Tensor], context: CollectiveContext) -> None:
        """Broadcast rank 0's tensors to all ranks, in place, in one message. Waits."""
        flat = (
            [t.detach().reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
            if self.size > 1
            else []
        )
        if not flat:
            return
        message = (
            torch.cat([t.to(self.device) for t in flat])
            if len(flat) > 1 or self.rank
            else flat[0].to(self.device)
        )
        self.from_first(message, context, 0x7FFF).wait()
        if self.rank != 0:
            parts = message.split([t.numel() for t in flat])
            with torch.no_grad():
                for t, part in zip((t for t in tensors if t.numel()), parts, strict=True):
                    # clone(): a part may begin at an address that is not aligned for the dtype
                    t.copy_(part.clone().view(t.dtype).view(t.shape))

    def from_first(self, message: torch.Tensor, context: CollectiveContext, number: int) -> Pending:
        """Broadcast rank 0's `message`, uint8 [n] on the device, in place. `number`: on gloo,
        messages with different numbers are never taken for each other.
        """
        if not self.native or self.alone:
            sends = [(p, message) for p in range(1, self.size)] if self.rank == 0 else []
            return self.exchange(
                sends, [] if self.rank == 0 else [(0, message)], context, number, move="state"
            )
        event = self._record(
            "state", context, message.dtype, message.numel() if self.rank == 0 else 0, 0
        )
        self.note_launch(1, "state", number, message.numel())
        with self.launching(context):
            work = dist.broadcast(
                message, group=self.reduce_group, group_src=self.at[0], async_op=True
            )
        return Pending(self, [work], context, event, keep=message)
