"""The moves between placements: the only things that touch the wire.

| from         | to         | move           | pairwise (gloo)                            | native (NCCL)                |
|--------------|------------|----------------|--------------------------------------------|------------------------------|
| sharded      | replicated | all-gather     | each rank sends its interval to each other | all_gather_single            |
| partial sums | sharded    | reduce-scatter | sends of intervals, then a local sum       | all_to_all_single, local sum |
| partial sums | replicated | all-reduce     | the two above                              | the two above                |
| replicated   | sharded    | slice          | no traffic                                 | no traffic                   |

With `reduce="native"` in the recipe partial sums go by the backend's own reduce_scatter_single and
all_reduce.

[Note: sums are local and in rank order] Every reduction moves the parts as they are and adds them
up on the rank that owns the interval, in the order of the ranks, in the accumulation dtype. The
bits of a sum therefore depend neither on the placement of the result nor on how the unit was cut
into messages, which is why stages 0 to 3 are bit-equal; and 16-bit gradients can travel in 16 bits
and still be summed in fp32.

[Note: one rank stands for all] Under torch's "fake" backend (simulation/simulate.py) moves are entered in
the ledger and nothing arrives. What the others would tell this rank is what it would tell them. A
simulation with a clock (simulation/clock.py) gives each move a work that is waited for as NCCL's is.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from onefold.comm.messages import Messages
from onefold.comm.pending import Chain, Pending
from onefold.comm.stall import CollectiveContext, StallError
from onefold.comm.wire import GLOO, Cut, Launch, Parts

if TYPE_CHECKING:
    from onefold.comm.group import Group


class Moves(Messages):
    """The moves of a group, and of its levels."""

    _intra_group: Group | None
    _inter_group: Group | None

    # -- gathers -----------------------------------------------------------------------------------

    def all_gather(
        self,
        full: torch.Tensor,
        context: CollectiveContext,
        unit_index: int,
        *,
        move: str = "all-gather",
        plain: int = 0,
    ) -> Pending:
        """sharded → replicated, in place: rank r's interval of `full` ([numel], cut evenly) goes to
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
                unit_index,
                move=move,
                plain=plain * outer.size // self.size,
            )
            return Chain(
                self,
                low,
                lambda: inner.all_gather(full, context, unit_index, move=move, plain=plain),
            )
        mine = full[self.rank * shard : (self.rank + 1) * shard]
        each, part = (
            self._to_all(mine.numel() * mine.element_size()),
            self._to_all(plain // self.size),
        )
        event = self._record(move, context, full.dtype, *each, *part)
        return self.wire.all_gather(Launch(self, move, unit_index, context, event), full, mine)

    def _to_all(self, nbytes: int) -> tuple[int, int]:
        """Bytes sent where each peer is sent so many: all, and those of them to other nodes."""
        return nbytes * len(self.peers), nbytes * self._peers_elsewhere

    @property
    def joins_messages(self) -> bool:
        """Whether `all_gather_together` is there, and worth it: a message costs the host more than
        copies of the few bytes in it.
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
        """The same for several buffers, in one message to each rank: what is sent and received lies
        in memory of its own, as large as all `fulls` are together, until it is waited for.

        Args:
            fulls: [numel] each, cut evenly, of one dtype. places: what the gather of each is for; the ledger has
                an event for each.
            number: messages of two numbers never meet.
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
        """A division of a buffer by position, `sizes` in elements, for the moves below. Make it
        once.
        """
        elsewhere = sum(size for size, far in zip(sizes, self._elsewhere, strict=True) if far)
        return Cut(tuple(sizes), sum(sizes), sizes[self.rank], elsewhere, len(set(sizes)) == 1)

    def scatter_parts(
        self,
        sent: torch.Tensor,
        cut: Cut,
        received: torch.Tensor,
        context: CollectiveContext,
        unit_index: int,
        move: str,
        plain: int = 0,
        addresses: tuple[int, int] | None = None,
    ) -> Pending:
        """The wire half of a reduction, in one operation.

        Args:
            sent: each rank's part, one behind the other by position, [numel]; or without this
                rank's own part, [numel - own].
            received: what comes from each rank, by position: [ranks, own] with this rank's row
                among them; or without, [ranks - 1, own].
            plain: bytes that each rank's part was encoded from, for the ledger.
            addresses: of the unit's buffer, that the reduction is of, the same on all ranks. Ranks
                that mean other addresses never take each other's bytes for their own.
        """
        width = sent.element_size()
        parts = (cut.numel - cut.own) * width, cut.between * width
        event = self._record(move, context, sent.dtype, *parts, *self._to_all(plain))
        return self.wire.scatter_parts(
            Launch(self, move, unit_index, context, event, addresses), sent, cut, received
        )

    def can_reduce(self, cut: Cut) -> bool:
        """Whether the backend itself can scatter sums of such parts: they are even, and in its own
        order of the ranks.
        """
        return cut.even and self.ordered

    def reduce_scatter(
        self,
        sent: torch.Tensor,
        cut: Cut,
        own: torch.Tensor,
        context: CollectiveContext,
        unit_index: int,
        move: str,
        mean: bool,
        addresses: tuple[int, int] | None = None,
    ) -> Pending:
        """The backend's own: the sum of all ranks' `sent` [numel], or their mean. This rank gets
        its part `own`. Added in their dtype.
        """
        width = sent.element_size()
        event = self._record(
            move, context, sent.dtype, (cut.numel - cut.own) * width, cut.between * width
        )
        return self.wire.reduce_scatter(
            Launch(self, move, unit_index, context, event, addresses), sent, own, mean
        )

    def all_reduce(
        self,
        whole: torch.Tensor,
        context: CollectiveContext,
        unit_index: int,
        mean: bool,
        addresses: tuple[int, int] | None = None,
    ) -> Pending:
        """The backend's own: the sum of all ranks' `whole`, or their mean, in place. In its
        dtype.
        """
        move, each = "all-reduce", 2 * math.ceil(whole.numel() / self.size) * whole.element_size()
        event = self._record(move, context, whole.dtype, *self._to_all(each))
        return self.wire.all_reduce(
            Launch(self, move, unit_index, context, event, addresses), whole, mean
        )

    def gather_sums(
        self,
        whole: torch.Tensor,
        cut: Cut,
        context: CollectiveContext,
        unit_index: int,
        addresses: tuple[int, int] | None = None,
    ) -> Pending:
        """Each rank's part of `whole` ([numel], by position) to all others, in place: behind a
        reduction, and in the order of reductions.

        `cut` is one that `can_reduce`.
        """
        move, each = "all-reduce", cut.own * whole.element_size()
        event = self._record(move, context, whole.dtype, *self._to_all(each))
        own = whole[self.rank * cut.own : (self.rank + 1) * cut.own]
        return self.wire.gather_sums(
            Launch(self, move, unit_index, context, event, addresses), whole, own
        )

    def launched(self) -> bytes:
        """A checksum of what the native communicators were given so far, in order: one on all
        ranks. See [Note: order instead of tags].
        """
        found = [
            self._launched,
            *(
                level._launched
                for level in (self._intra_group, self._inter_group)
                if level is not None
            ),
        ]
        return zlib.crc32(repr(found).encode()).to_bytes(4, "little")

    def out_of_order(self, context: CollectiveContext) -> StallError:
        """What all ranks say once they know that they launched different moves. Nothing can be
        trusted from here on.
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
        unit_index: int,
        *,
        move: str,
        plain: Mapping[int, int] | None = None,
        addresses: tuple[int, int] | None = None,
    ) -> Pending:
        """Send each `(peer, tensor)` and receive into each `(peer, tensor)`; the wire half of a
        reduction (or of a scatter).

        Tensors are contiguous and one-dimensional; empty ones are left out on both sides. `plain`:
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
            Launch(self, move, unit_index, context, event, addresses), sends, recvs
        )

    def broadcast(self, tensors: list[torch.Tensor], context: CollectiveContext) -> None:
        """Rank 0's tensors to all ranks, in place, in one message. Waits."""
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
                    # Where a part begins need not suit the dtype
                    t.copy_(part.clone().view(t.dtype).view(t.shape))

    def from_first(self, message: torch.Tensor, context: CollectiveContext, number: int) -> Pending:
        """Rank 0's `message`, uint8 [n] on the device, into everybody's. `number`: messages of two
        numbers never meet on gloo.
        """
        if not self.native or self.fake:
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
