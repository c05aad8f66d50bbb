"""How the whole of a flat buffer comes together. `shard()` chooses one `Gather` for each flat buffer.

| class           | file                  | what travels                                                          |
|-----------------|-----------------------|-----------------------------------------------------------------------|
| `Gather`        | here                  | values in the compute dtype                                           |
| `EncodedGather` | quant/gather_paths.py | bytes, encoded once after a step                                      |

| path                                                                  | where                            |
|-----------------------------------------------------------------------|----------------------------------|
| a copy, or nothing                                                    | every rank has all masters       |
| owned ── all owners ──► whole                                         | else                             |
| interval ── inter-group ──► shard (cached) ── intra-group ──► whole   | with a second copy (hpZ, ZeRO++) |

`interval` is a rank's part among all ranks, `shard` its part among those of its group (see [Note:
positions] in layout/flat.py). A gather may have a cached shard: the secondary shard (hpZ), or
this rank's part encoded (qwZ). Gathers start from it until masters are written to.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from onefold.comm import Chain, CollectiveContext, Group, Pending
from onefold.memory import TierError

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Flat


class Gather:
    """The gathers of one flat buffer.

    Attributes:
        exact: the whole holds the masters' values, rounded to the compute dtype and no further.
        cached: the bytes of the cached shard; None if every gather starts from the masters.
        cached_of: the version of the masters that the cached shard was made of.
        beside: it begins with a copy, from the host or a cast. Copy and gather then run on the stream
            of the copies up. The computation goes on, and waits where the unit is used.
    """

    exact: bool = True

    def __init__(self, flat: Flat, engine: Engine) -> None:
        self.flat, self.engine = flat, engine
        self.up = engine.transfers.up
        self.beside = self.up.asynchronous and not flat.spec.shares_memory
        self.cached: torch.Tensor | None = None
        self.cached_of = -1

    def build(self, device: torch.device) -> None:
        """Take the memory of the cached shard."""
        spec = self.flat.spec
        if spec.cached_bytes and not spec.stored:
            self.cached = torch.empty(spec.cached_bytes, dtype=torch.uint8, device=device)

    def start(self, full: torch.Tensor, context: CollectiveContext) -> Pending:
        """Start gathering the whole into `full`."""
        with self.up.on_stream() if self.beside else nullcontext():
            if self.flat.whole_master:
                self.put(full)
                return Pending(self.flat.group, [], context)
            return self.send(full, full, context)

    def send(self, full: torch.Tensor, wire: torch.Tensor, context: CollectiveContext) -> Pending:
        """Do so on the present stream. `wire`: the whole as it travels."""
        group, cached = self.flat.group, self.cached
        if cached is None:
            self.fill(full, wire)
            return self.all_gather(self.flat.owners_group, wire, context)
        cached, mine = cached.view(wire.dtype), wire[self.cached_slice]
        second_copy = self.flat.spec.has_secondary
        last = group.intra_group if second_copy else self.flat.owners_group
        if self.fresh:
            mine.copy_(cached)
            return self.all_gather(last, wire, context)
        self.fill(full, wire)
        self.cached_of = self.flat.version

        def cache_and_gather() -> Pending:
            cached.copy_(mine)
            return self.all_gather(last, wire, context)

        if not second_copy:
            return cache_and_gather()
        return Chain(group, self.all_gather(group.inter_group, mine, context), cache_and_gather)

    @property
    def fresh(self) -> bool:
        """Whether the cached shard has the masters' present values."""
        return self.cached is not None and self.cached_of == self.flat.version

    @property
    def cached_slice(self) -> slice:
        """The place of the cached shard in what travels."""
        return slice(*self.flat.shard)

    def fill(self, full: torch.Tensor, wire: torch.Tensor) -> None:
        """Put this rank's part into its place in what travels."""
        self.put(full)

    def all_gather(self, group: Group, wire: torch.Tensor, context: CollectiveContext) -> Pending:
        return group.all_gather(wire, context, self.flat.index)

    def put(self, full: torch.Tensor) -> None:
        """Copy this rank's masters into their place in the whole.

        If a disk fails while other ranks wait for this one, this rank must not stop alone. It goes
        on with the values that it has, and all ranks raise before the optimizer steps.
        """
        try:
            self.flat.storage.put(full)
        except TierError as error:
            if not self.engine.awaited_by_others:
                raise
            self.engine.failed(error)


def state_context(engine: Engine, unit_name: str) -> CollectiveContext:
    """Return what errors and the ledger say of a collective over parameters or states of a unit."""
    return CollectiveContext("state", unit_name, engine.step_count, "state")
