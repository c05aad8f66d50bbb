"""Gathers that send encoded bytes (qwZ, ZeRO++; frozen weights that are stored encoded).

After a step each rank's interval is encoded once. It is sent and cached as bytes, and decoded into
the flat buffer after the last hop. Each rank decodes its own interval too, so all ranks compute
with the same values.

It caches the bytes of the intervals that a rank owns; with hpZ those of the group's shard. Frozen
weights that are stored encoded are bytes already, so nothing is cached.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from onefold.comm import CollectiveContext, Group, Pending
from onefold.memory import GATHERED
from onefold.quant.encoded_storage import EncodedIntervals, EncodedStorage
from onefold.runtime.gather import Gather

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Flat


class EncodedGather(Gather):
    """One all-gather of bytes among the ranks that together own the whole."""

    exact = False

    def __init__(self, flat: Flat, engine: Engine) -> None:
        super().__init__(flat, engine)
        recipe = engine.recipe
        codec = recipe.frozen if flat.spec.stored else recipe.parameters.codec
        self.intervals, self.pool = EncodedIntervals(flat, codec), engine.pool

    def start(self, full: torch.Tensor, context: CollectiveContext) -> Pending:
        flat = self.flat
        # Take the buffer on the computing stream: the pool reuses it in that stream's order.
        coded = self.pool.take(flat.spec.coded_bytes, torch.uint8, GATHERED, flat.unit_name)

        def decode() -> None:
            self.intervals.decode(coded, full)
            self.pool.give(coded)

        with self.up.on_stream() if self.beside else nullcontext():
            return self.send(full, coded, context).then(decode)

    @property
    def cached_slice(self) -> slice:
        flat = self.flat
        return slice(
            *self.intervals.bytes_of(flat.shard if flat.spec.has_secondary else flat.owned)
        )

    def fill(self, full: torch.Tensor, wire: torch.Tensor) -> None:
        """Encode what this rank owns, interval by interval, unless it is stored so."""
        a, b = self.flat.owned
        coded, storage = wire[slice(*self.intervals.bytes_of((a, b)))], self.flat.storage
        if isinstance(storage, EncodedStorage):
            coded.copy_(storage.payload)
            return
        self.put(full)
        self.intervals.encode(full[a:b], coded)

    def all_gather(self, group: Group, wire: torch.Tensor, context: CollectiveContext) -> Pending:
        """Gather the bytes of the whole, or of a shard, among ranks that each have a part. The
        ledger also gets the size before encoding (`plain`).
        """
        flat = self.flat
        whole = flat.layout.numel * flat.dtypes.compute.itemsize
        plain = whole * wire.numel() // flat.spec.coded_bytes
        return group.all_gather(wire, context, flat.index, plain=plain)
