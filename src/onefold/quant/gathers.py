"""Gathers whose bytes travel encoded (qwZ, ZeRO++; frozen weights that rest encoded).

Each rank's interval is encoded once after a step, moved and cached as bytes, and decoded into the
flat buffer behind the last hop. Every rank decodes its own interval too, so that all compute with
the same values.

| class                    | bytes are cached of       | they travel                                      |
|--------------------------|---------------------------|--------------------------------------------------|
| `EncodedGather`          | what this rank owns       | among all owners                                  |
| `EncodedSecondaryGather` | the shard of its group    | between groups once after a step, then inside     |
| `EncodedRestGather`      | nothing: masters are bytes | among all owners                                 |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from onefold.comm import Chain, CollectiveContext, Group, Pending
from onefold.comm.codec import Codec
from onefold.memory import GATHERED, Pool
from onefold.quant.encoded_storage import EncodedIntervals, EncodedStorage
from onefold.runtime.gathers import Beside, Gather

if TYPE_CHECKING:
    from onefold.runtime.flat import Flat


class EncodedGather(Gather):
    """One all-gather of bytes among the ranks whose masters together are the whole."""

    exact = False

    def __init__(self, flat: Flat, codec: Codec, pool: Pool) -> None:
        super().__init__(flat)
        self.intervals, self.pool = EncodedIntervals(flat, codec), pool

    @property
    def cached_slice(self) -> slice:
        """Where the cached bytes lie in those of the whole."""
        return slice(*self.intervals.bytes_of(self.flat.owned))

    def build(self, device: torch.device) -> None:
        nbytes = self.flat.spec.cached_bytes
        self.cached = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def start(
        self,
        full: torch.Tensor,
        put: Callable[[], None],
        context: CollectiveContext,
        beside: Beside,
    ) -> Pending:
        flat = self.flat
        # Taken on the computing stream, in whose order it is handed on.
        coded = self.pool.take(flat.spec.coded_bytes, torch.uint8, GATHERED, flat.unit_name)
        with beside():
            return Decoded(self.send(full, coded, put, context), self, full, coded)

    def send(
        self,
        full: torch.Tensor,
        coded: torch.Tensor,
        put: Callable[[], None],
        context: CollectiveContext,
    ) -> Pending:
        """Bring the bytes of the whole into `coded`."""
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
        """What this rank owns, interval by interval: each is encoded by itself, so that the bytes
        are the same over any groups.
        """
        a, b = self.flat.owned
        self.intervals.encode(full[a:b], coded[slice(*self.intervals.bytes_of((a, b)))])

    def all_gather(self, group: Group, coded: torch.Tensor, context: CollectiveContext) -> Pending:
        """The bytes of the whole, or of a shard, among the ranks that have a part of them each. The
        ledger hears of those that they were encoded from.
        """
        flat = self.flat
        whole = flat.layout.numel * flat.dtypes.compute.itemsize
        plain = whole * coded.numel() // flat.spec.coded_bytes
        return group.all_gather(coded, context, flat.index, plain=plain)


class EncodedSecondaryGather(EncodedGather):
    """The bytes of the group's shard are cached on this rank (qwZ with hpZ)."""

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
    """Masters rest encoded: their bytes are what travels, and nothing is cached."""

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
    """A gather of bytes that ends with the values."""

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
