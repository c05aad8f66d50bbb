"""Gathers that send encoded bytes (qwZ, ZeRO++; frozen weights that are stored encoded).

After a step each rank's interval is encoded once. It is sent and cached as bytes, and decoded into
the flat buffer after the last hop. Each rank decodes its own interval too, so all ranks compute
with the same values.

| class                    | caches the bytes of            | the bytes travel                                  |
|--------------------------|--------------------------------|---------------------------------------------------|
| `EncodedGather`          | the intervals that a rank owns | among all owners                                  |
| `EncodedSecondaryGather` | the group's shard              | inter-group once after a step, intra-group always |
| `EncodedRestGather`      | nothing: masters are bytes     | among all owners                                  |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from onefold.comm import Chain, CollectiveContext, Group, Pending
from onefold.memory import GATHERED, Pool
from onefold.quant.codecs import Codec
from onefold.quant.encoded_storage import EncodedIntervals, EncodedStorage
from onefold.runtime.gather_paths import Gather, StreamContext

if TYPE_CHECKING:
    from onefold.runtime.flat import Flat


class EncodedGather(Gather):
    """One all-gather of bytes among the ranks that together own the whole."""

    exact = False

    def __init__(self, flat: Flat, codec: Codec, pool: Pool) -> None:
        super().__init__(flat)
        self.intervals, self.pool = EncodedIntervals(flat, codec), pool

    @property
    def cached_slice(self) -> slice:
        """The place of the cached bytes in the bytes of the whole."""
        return slice(*self.intervals.bytes_of(self.flat.owned))

    def build(self, device: torch.device) -> None:
        nbytes = self.flat.spec.cached_bytes
        self.cached = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def start(
        self,
        full: torch.Tensor,
        put: Callable[[], None],
        context: CollectiveContext,
        on_copy_stream: StreamContext,
    ) -> Pending:
        flat = self.flat
        # Take the buffer on the computing stream: the pool reuses it in that stream's order.
        coded = self.pool.take(flat.spec.coded_bytes, torch.uint8, GATHERED, flat.unit_name)
        with on_copy_stream():
            return Decoded(self.send(full, coded, put, context), self, full, coded)

    def send(
        self,
        full: torch.Tensor,
        coded: torch.Tensor,
        put: Callable[[], None],
        context: CollectiveContext,
    ) -> Pending:
        """Start to fill `coded` with the bytes of the whole."""
        cached, mine = self.cached, coded[self.cached_slice]
        assert cached is not None
        if self.fresh:
            mine.copy_(cached)
        else:
            put()
            self.encode(full, coded)
            cached.copy_(mine)
            self.fresh = True
        return self.all_gather(self.flat.owners_group, coded, context)

    def encode(self, full: torch.Tensor, coded: torch.Tensor) -> None:
        """Encode what this rank owns, interval by interval. Each interval is encoded separately, so
        the bytes do not depend on the groups.
        """
        a, b = self.flat.owned
        self.intervals.encode(full[a:b], coded[slice(*self.intervals.bytes_of((a, b)))])

    def all_gather(self, group: Group, coded: torch.Tensor, context: CollectiveContext) -> Pending:
        """Gather the bytes of the whole, or of a shard, among ranks that each have a part. The
        ledger also gets the size before encoding (`plain`).
        """
        flat = self.flat
        whole = flat.layout.numel * flat.dtypes.compute.itemsize
        plain = whole * coded.numel() // flat.spec.coded_bytes
        return group.all_gather(coded, context, flat.index, plain=plain)


class EncodedSecondaryGather(EncodedGather):
    """Caches the bytes of the group's shard on this rank (qwZ with hpZ)."""

    @property
    def cached_slice(self) -> slice:
        return slice(*self.intervals.bytes_of(self.flat.shard))

    def send(
        self,
        full: torch.Tensor,
        coded: torch.Tensor,
        put: Callable[[], None],
        context: CollectiveContext,
    ) -> Pending:
        group, cached, mine = self.flat.group, self.cached, coded[self.cached_slice]
        assert cached is not None
        if self.fresh:
            mine.copy_(cached)
            return self.all_gather(group.intra_group, coded, context)
        put()
        self.encode(full, coded)
        self.fresh = True

        def keep() -> Pending:
            cached.copy_(mine)
            return self.all_gather(group.intra_group, coded, context)

        return Chain(group, self.all_gather(group.inter_group, mine, context), keep)


class EncodedRestGather(EncodedGather):
    """Sends the bytes of masters that are stored encoded. Nothing is cached."""

    def __init__(self, flat: Flat, storage: EncodedStorage, pool: Pool) -> None:
        super().__init__(flat, storage.codec, pool)
        self.storage = storage

    def build(self, device: torch.device) -> None:
        pass

    @property
    def reads_masters(self) -> bool:
        return True

    def send(
        self,
        full: torch.Tensor,
        coded: torch.Tensor,
        put: Callable[[], None],
        context: CollectiveContext,
    ) -> Pending:
        coded[self.cached_slice].copy_(self.storage.payload)
        return self.all_gather(self.flat.owners_group, coded, context)


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
