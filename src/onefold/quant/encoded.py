"""What is stored or sent encoded: frozen weights (QLoRA's base), gathers (qwZ, ZeRO++) and reductions (qgZ).

Gathers: after a step each rank's interval is encoded once. It is sent and cached as bytes, and decoded
into the flat buffer after the last hop. Each rank decodes its own interval too, so all ranks compute
with the same values. The bytes of the intervals that a rank owns are cached; with hpZ those of the
group's shard. Frozen weights that are stored encoded are these bytes, and nothing else.

Reductions: each part is encoded for its receiver, which decodes it and adds it in the accumulation
dtype. Encoded values are never added. A rank's own part is not encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from onefold.comm import CollectiveContext, Group, Pending
from onefold.memory import GATHERED
from onefold.quant.codecs import CODECS
from onefold.runtime.gather import Gather
from onefold.runtime.hops import Hop, UnderWay
from onefold.runtime.storage import Storage

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Entry, Flat


class EncodedStorage(Storage):
    """Frozen weights that are stored only as the bytes that gathers send (QLoRA's base): the cached
    shard of an `EncodedGather`.
    """

    in_place = False

    def build(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.numel, dtype=self.flat.dtypes.master, device=device)

    def decoded(self) -> torch.Tensor:
        values, gather = torch.empty_like(self.flat.master), cast(EncodedGather, self.flat.gather)
        gather.decode(gather.cached, values)
        return values

    def store(self, values: torch.Tensor) -> None:
        gather = cast(EncodedGather, self.flat.gather)
        gather.encode(values, gather.cached)

    def refuse_training(self, entry: Entry) -> None:
        raise ValueError(
            f"parameter {entry.slot.name!r} was frozen when the model was sharded, so it is stored"
            " encoded, and cannot be trained now. Leave requires_grad=True while calling shard()"
            " and freeze it afterwards, or leave frozen out of the recipe."
        )

    def put(self, full: torch.Tensor) -> None:
        """Do nothing: `EncodedGather` sends the bytes."""


class EncodedGather(Gather):
    """One all-gather of bytes among the ranks that together own the whole. Each rank's interval is
    encoded separately and takes `each` bytes, so the bytes do not depend on the groups.

        values   | interval 0 | interval 1 | interval 2 | ...     shard_numel elements each
        bytes    | each       | each       | each       | ...     a multiple of 16
    """

    exact = False

    def __init__(self, flat: Flat, engine: Engine) -> None:
        super().__init__(flat, engine)
        self.codec = cast(Any, flat.spec.gather_codec)
        self.numel, self.each, self.pool = flat.layout.shard_numel, flat.spec.each, engine.pool
        self.used = self.codec.encoded_bytes(self.numel)

    def start(self, full: torch.Tensor, context: CollectiveContext) -> Pending:
        flat = self.flat
        # Take the buffer on the computing stream: the pool reuses it in that stream's order.
        coded = self.pool.take(flat.spec.coded_bytes, torch.uint8, GATHERED, flat.unit_name)

        def decode() -> None:
            self.decode(coded, full)
            self.pool.give(coded)

        return self.send(full, coded, context).then(decode)

    def encode(self, values: torch.Tensor, coded: torch.Tensor | None) -> None:
        """Encode `values` of some intervals into their bytes `coded`."""
        if self.numel and values.numel():
            self.codec.encode(values.view(-1, self.numel), self._rows(coded))

    def decode(self, coded: torch.Tensor | None, values: torch.Tensor) -> None:
        """Decode the bytes `coded` of some intervals into `values`."""
        if self.numel and values.numel():
            self.codec.decode(self._rows(coded), values.view(-1, self.numel))

    def _rows(self, coded: torch.Tensor | None) -> torch.Tensor:
        """Return the bytes of intervals without their padding, [intervals, used]."""
        assert coded is not None
        return coded.view(-1, self.each)[:, : self.used]

    def fill(self, full: torch.Tensor, wire: torch.Tensor) -> None:
        """Encode what this rank owns, interval by interval."""
        self.put(full)
        self.encode(full[slice(*self.flat.owned)], self.part(wire, self.flat.owned))

    def all_gather(self, group: Group, wire: torch.Tensor, context: CollectiveContext) -> Pending:
        """Gather the bytes of the whole, or of a shard, among ranks that each have a part. The
        ledger also gets the size before encoding (`plain`).
        """
        flat = self.flat
        whole = flat.layout.numel * flat.dtypes.compute.itemsize
        plain = whole * wire.numel() // max(flat.spec.coded_bytes, 1)
        return group.all_gather(wire, context, flat.index, plain=plain)


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
            pending = group.scatter_parts(sent, rows, context, flat.index, plain)
        else:
            sends, recvs = (
                [(p, each[p, : self.used]) for p in group.peers] for each in (coded, rows)
            )
            pending = group.exchange(sends, recvs, context, flat.index, plain=plain)
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
