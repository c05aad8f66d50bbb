"""Reductions that send encoded parts (qgZ, ZeRO++).

Each part is encoded for its receiver, which decodes it and adds it in the accumulation dtype.
Encoded values are never added. A rank's own part is not encoded. The error of the encoding can be
kept and added to the next gradient (runtime/residuals.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onefold.comm import CollectiveContext
from onefold.comm.codec import Codec
from onefold.layout import overlap
from onefold.memory import REDUCTION
from onefold.runtime.flat import Flat
from onefold.runtime.reductions import PartsSending, Reduce, Reduction, Sending

if TYPE_CHECKING:
    from onefold.runtime.progress import Resources


class EncodedReduce(Reduce):
    """One hop with encoded parts. Each encoded part begins at a multiple of 16 bytes."""

    def __init__(self, flat: Flat, at: int, resources: Resources, codec: Codec) -> None:
        super().__init__(flat, at, resources)
        self.codec, self.residuals = codec, resources.residuals

    def start(self, r: Reduction, context: CollectiveContext) -> Sending:
        group, codec, name, first = self.group, self.codec, r.unit.name, r.span[0]
        sending = EncodedSending(self, r)
        cuts = [overlap(r.span, there) for there in self.hop.ranges]
        used = [codec.encoded_bytes(b - a) for a, b in cuts]
        room = self.exchange(r)
        each = room.part
        sent = sending.coded = self.pool.take(room.sent, torch.uint8, REDUCTION, name)
        into = self.pool.take(room.received, torch.uint8, REDUCTION, name)
        sending.receive_buffer = into
        residual = self.residuals.of(r)
        sends, recvs, mine = [], [], used[group.rank]
        plain = {p: (b - a) * self.flat.dtypes.wire.itemsize for p, (a, b) in enumerate(cuts)}
        for p, (a, b) in enumerate(cuts):
            if p == group.rank or a == b:
                continue
            piece, coded = r.buffer[a - first : b - first], sent[p * each : p * each + used[p]]
            if residual is None:
                codec.encode(piece, coded, rounding=self.residuals.rounding(r, a))
            else:
                lost = residual[a - first : b - first].add_(piece)
                codec.encode(lost, coded, rounding=self.residuals.rounding(r, a))
                codec.keep_residual(coded, lost)
            sends.append((p, coded))
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


class EncodedSending(PartsSending):
    """Encoded parts being sent. `coded`: their buffer, returned to the pool after the sum."""

    coded: torch.Tensor | None

    def add_up(self, sums: torch.Tensor) -> None:
        by = self.by
        assert isinstance(by, EncodedReduce)
        sums.zero_()
        for rank, part in self.parts.items():
            if rank == by.group.rank:
                sums.add_(part)
            else:
                by.codec.decode_add(part, sums)

    def sum(self) -> torch.Tensor:
        total = super().sum()
        self.sent, self.coded = self.coded, None
        return total

    def drop(self, wait: bool) -> None:
        self.sent, self.coded = self.coded, None
        super().drop(wait)
