"""Gathers that send encoded bytes (qwZ, ZeRO++; frozen weights that are stored encoded).

After a step each rank's interval is encoded once. It is sent and cached as bytes, and decoded into
the flat buffer after the last hop. Each rank decodes its own interval too, so all ranks compute
with the same values.

| class               | caches the bytes of                                        |
|---------------------|------------------------------------------------------------|
| `EncodedGather`     | the intervals that a rank owns; with hpZ the group's shard |
| `EncodedRestGather` | nothing: masters are bytes                                 |
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from onefold.comm import CollectiveContext, Group, Pending
from onefold.memory import GATHERED
from onefold.quant.codecs import Codec
from onefold.quant.encoded_storage import EncodedIntervals, EncodedStorage
from onefold.runtime.gather_paths import Gather

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Flat


class EncodedGather(Gather):
    """One all-gather of bytes among the ranks that together own the whole."""

    exact = False

    def __init__(self, flat: Flat, engine: Engine, codec: Codec) -> None:
        super().__init__(flat, engine)
        self.intervals, self.pool = EncodedIntervals(flat, codec), engine.pool

    def start(self, full: torch.Tensor, context: CollectiveContext) -> Pending:
        flat = self.flat
        # Take the buffer on the computing stream: the pool reuses it in that stream's order.
        coded = self.pool.take(flat.spec.coded_bytes, torch.uint8, GATHERED, flat.unit_name)
        with self.up.on_stream() if self.beside else nullcontext():
            return Decoded(self.send(full, coded, context), self, full, coded)

    @property
    def cached_slice(self) -> slice:
        flat = self.flat
        return slice(
            *self.intervals.bytes_of(flat.shard if flat.spec.has_secondary else flat.owned)
        )

    def fill(self, full: torch.Tensor, wire: torch.Tensor) -> None:
        """Encode what this rank owns, interval by interval. Each interval is encoded separately, so
        the bytes do not depend on the groups.
        """
        self.put(full)
        a, b = self.flat.owned
        self.intervals.encode(full[a:b], wire[slice(*self.intervals.bytes_of((a, b)))])

    def all_gather(self, group: Group, wire: torch.Tensor, context: CollectiveContext) -> Pending:
        """Gather the bytes of the whole, or of a shard, among ranks that each have a part. The
        ledger also gets the size before encoding (`plain`).
        """
        flat = self.flat
        whole = flat.layout.numel * flat.dtypes.compute.itemsize
        plain = whole * wire.numel() // flat.spec.coded_bytes
        return group.all_gather(wire, context, flat.index, plain=plain)


class EncodedRestGather(EncodedGather):
    """Sends the bytes of masters that are stored encoded. Nothing is cached."""

    def __init__(self, flat: Flat, engine: Engine, storage: EncodedStorage) -> None:
        super().__init__(flat, engine, storage.codec)
        self.storage = storage

    def build(self, device: torch.device) -> None:
        pass

    def fill(self, full: torch.Tensor, wire: torch.Tensor) -> None:
        wire[self.cached_slice].copy_(self.storage.payload)


class Decoded(Pending):
    """A pending gather of bytes; `wait` decodes them into the flat buffer."""

    __slots__ = ("_coded", "_full", "_gather", "_moving")

    def __init__(
        self, moving: Pending, gather: EncodedGather, full: torch.Tensor, coded: torch.Tensor
    ) -> None:
        self._moving, self._gather, self._full = moving, gather, full
        self._coded: torch.Tensor | None = coded
        self.context, self.event = moving.context, moving.event

    def wait(self) -> None:
        coded, self._coded = self._coded, None
        if coded is not None:
            self._moving.wait()
            self._gather.intervals.decode(coded, self._full)
            self._gather.pool.give(coded)
