"""Reductions that send encoded parts (qgZ, ZeRO++).

Each part is encoded for its receiver, which decodes it and adds it in the accumulation dtype.
Encoded values are never added. A rank's own part is not encoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from onefold.comm import CollectiveContext
from onefold.layout import overlap
from onefold.memory import REDUCTION
from onefold.quant.codecs import Codec
from onefold.runtime.flat import Flat
from onefold.runtime.reduce_paths import PartsSending, Reduce, Reduction, Sending

if TYPE_CHECKING:
    from onefold.runtime.resources import Resources


class EncodedReduce(Reduce):
    """One hop with encoded parts. Each encoded part begins at a multiple of 16 bytes."""

    def __init__(self, flat: Flat, at: int, resources: Resources, codec: Codec) -> None:
        super().__init__(flat, at, resources)
        self.codec = codec

    def start(self, r: Reduction, context: CollectiveContext) -> Sending:
        group, codec, name = self.group, self.codec, r.unit.name
        sending = EncodedSending(self, r)
        cuts = [overlap(r.span, there) for there in self.hop.ranges]
        used = [codec.encoded_bytes(b - a) for a, b in cuts]
        room = self.exchange(r)
        each = room.part
        sent = sending.coded = self.pool.take(room.sent, torch.uint8, REDUCTION, name)
        into = self.pool.take(room.received, torch.uint8, REDUCTION, name)
        sending.receive_buffer = into
        sends, mine = [], used[group.rank]
        plain = {p: (b - a) * self.flat.dtypes.wire.itemsize for p, (a, b) in enumerate(cuts)}
        self._encode(r, cuts, used, sent, each)
        for p, (a, b) in enumerate(cuts):
            if p != group.rank and a != b:
                sends.append((p, sent[p * each : p * each + used[p]]))
        recvs = []
        parts = {group.rank: r.mine}
        for p in range(group.size) if mine else ():
            if p != group.rank:
                parts[p] = into[p * each : p * each + mine]
                recvs.append((p, parts[p]))
        sending.parts = dict(sorted(parts.items()))
        if group.native and set(used) == {each}:
            even, rows = group.cut([each] * group.size), into.view(group.size, each)
            sending.pending = group.scatter_parts(
                sent,
                even,
                rows,
                context,
                self.flat.index,
                context.move,
                plain[group.rank],
                r.run,
            )
        else:
            sending.pending = group.exchange(
                sends,
                recvs,
                context,
                self.flat.index,
                move=context.move,
                plain=plain,
                addresses=r.run,
            )
        return sending

    def _encode(
        self,
        r: Reduction,
        cuts: list[tuple[int, int]],
        used: list[int],
        sent: torch.Tensor,
        each: int,
    ) -> None:
        """Encode the parts `cuts` of other ranks into `sent`: neighbours of one length together."""
        codec, first = self.codec, r.span[0]
        for start, stop in _alike(cuts, self.group.rank):
            (a, b), end = cuts[start], cuts[stop - 1][1]
            pieces = r.buffer[a - first : end - first].view(stop - start, b - a)
            coded = _rows(sent, start, stop - start, each, used[start])
            codec.encode(pieces, coded)


def _alike(cuts: list[tuple[int, int]], own: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of ranks whose parts have one length, are not empty and follow each other,
    without `own`.
    """
    start = 0
    while start < len(cuts):
        stop, (a, b) = start + 1, cuts[start]
        if start != own and a != b:
            while stop < len(cuts) and stop != own and cuts[stop] == (b, 2 * b - a):
                (a, b), stop = cuts[stop], stop + 1
            yield start, stop
        start = stop


def _rows(buffer: torch.Tensor, first: int, count: int, each: int, used: int) -> torch.Tensor:
    """Return a view of `count` parts of a buffer from part `first` on, without their padding."""
    offset = buffer.storage_offset() + first * each
    return buffer.as_strided((count, used), (each, 1), offset)


class EncodedSending(PartsSending):
    """Encoded parts being sent. `coded`: their buffer, returned to the pool after the sum."""

    coded: torch.Tensor | None

    def add_up(self, sums: torch.Tensor) -> None:
        by, own = self.by, self.parts[self.by.group.rank]
        assert isinstance(by, EncodedReduce)
        received, ranks = self.receive_buffer, len(self.parts)
        if ranks == 1 or received is None:
            sums.copy_(own).add_(0.0)
            return
        each, used = received.numel() // ranks, by.codec.encoded_bytes(own.numel())
        by.codec.decode_sum(_rows(received, 0, ranks, each, used), own, by.group.rank, sums)

    def sum(self) -> torch.Tensor:
        total = super().sum()
        self.sent, self.coded = self.coded, None
        return total

    def drop(self, wait: bool) -> None:
        self.sent, self.coded = self.coded, None
        super().drop(wait)
