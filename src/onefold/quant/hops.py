"""Reductions that send encoded parts (qgZ, ZeRO++).

Each part is encoded for its receiver, which decodes it and adds it in the accumulation dtype.
Encoded values are never added. A rank's own part is not encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onefold.comm import CollectiveContext
from onefold.quant.codecs import CODECS
from onefold.runtime.flat import Flat
from onefold.runtime.hops import Hop, UnderWay

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine


class Encoded(Hop):
    """One hop with encoded parts. Each encoded part begins at a multiple of 16 bytes."""

    def __init__(self, flat: Flat, at: int, engine: Engine) -> None:
        super().__init__(flat, at, engine)
        self.codec = CODECS[engine.recipe.gradients.codec or ""]
        self.used = self.codec.encoded_bytes(self.own)

    def run(self, taken: list[torch.Tensor], context: CollectiveContext) -> UnderWay:
        buffer, group, flat, here = taken[0], self.group, self.flat, self.group.rank
        room, mine, plain = (
            self.rooms[buffer.dtype],
            buffer[self.mine],
            self.own * self.wire.itemsize,
        )
        sent, received = (self.take(n, room.dtype, taken) for n in (room.sent, room.received))
        coded, rows = (each.view(group.size, room.part) for each in (sent, received))
        self._encode(buffer[: self.mine.start], coded[:here])
        self._encode(buffer[self.mine.stop :], coded[here + 1 :])
        if group.native and self.used == room.part:
            pending = group.scatter_parts(sent, rows, context, flat.index, plain, flat.trained)
        else:
            sends, recvs = (
                [(p, each[p, : self.used]) for p in group.peers] for each in (coded, rows)
            )
            pending = self.exchange(sends, recvs, context, plain)
        yield from self.until_here(pending)
        total, target = self.total()
        sums = target
        if target.dtype != self.sums:
            sums = self.take(self.own, self.sums, taken)
        self.codec.decode_sum(rows[:, : self.used], mine, here, sums)
        self.add([sums], target)
        return total

    def _encode(self, values: torch.Tensor, coded: torch.Tensor) -> None:
        """Encode the parts of neighbours, which lie end to end, each into a row."""
        if values.numel():
            self.codec.encode(values.view(-1, self.own), coded[:, : self.used])
