"""How gradients and parameters travel: the hops among groups of ranks, and the paths of a gather."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from onefold.comm import Chain, CollectiveContext, Group, Pending
from onefold.layout import Level, ShardSpec
from onefold.memory import PARAMETERS, nbytes_of

if TYPE_CHECKING:
    from onefold.runtime.flat import Flat
    from onefold.runtime.resources import Resources


# -- hops ------------------------------------------------------------------------------------------
#
# The hops of a gradient from the whole to this rank's interval.
#
#     over all ranks, no groups        whole ────────────── all ──────────────► interval
#     over all ranks, in groups        whole ── intra-group ──► shard ── inter-group ──► interval
#
# `interval` is a rank's part among all ranks, `shard` its part among those of its group (see [Note:
# positions] in layout/flat.py). At each hop the parts are added in the accumulation dtype.


@dataclass(frozen=True)
class GroupHop:
    """One step of a reduction: the ranks of `group` divide a range of addresses among themselves.
    `ranges` are their parts, by position.
    """

    group: Group
    ranges: tuple[tuple[int, int], ...]

    @property
    def own(self) -> tuple[int, int]:
        """The addresses that this rank sums."""
        return self.ranges[self.group.rank]


def group_hops(spec: ShardSpec, group: Group) -> tuple[GroupHop, ...]:
    """Return the hops of a gradient, each with the group of ranks that it runs among."""

    def ranks(level: Level) -> Group:
        if level == "all":
            return group
        return group.intra_group if level == "intra-group" else group.inter_group

    return tuple(GroupHop(ranks(hop.level), hop.ranges) for hop in spec.hops)


# -- paths of a gather -----------------------------------------------------------------------------
#
# How the whole of a flat buffer comes together. `shard()` chooses one `Gather` for each flat
# buffer.
#
# | class             | file             | path of a rank's part                                                   |
# |-------------------|------------------|-------------------------------------------------------------------------|
# | `LocalGather`     | here             | every rank has all masters: a copy, or nothing                           |
# | `FlatGather`      | here             | owned ── all owners ──► whole                                            |
# | `SecondaryGather` | here             | interval ── inter-group ──► shard (cached) ── intra-group ──► whole      |
# | `EncodedGather`   | quant/gather_paths.py | as `FlatGather` or `SecondaryGather`, encoded once after a step          |
#
# `interval` is a rank's part among all ranks, `shard` its part among those of its group (see [Note:
# positions] in layout/flat.py). A gather may have a cached shard: the secondary shard (hpZ), or
# this rank's part encoded (qwZ). Gathers start from it until masters are written to.


#: Makes a context whose work may go to another stream than the computing one.
StreamContext = Callable[[], AbstractContextManager[Any]]


class Gather(ABC):
    """The gathers of one flat buffer.

    Attributes:
        exact: the whole holds the masters' values, rounded to the compute dtype and no further.
        plain: it is one all-gather of the masters among `flat.owners_group`, and nothing else.
        cached: the cached shard; None if every gather starts from the masters.
        fresh: the cached shard has the masters' present values.
    """

    exact: bool = True
    plain: bool = False

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.cached: torch.Tensor | None = None
        self.fresh = False

    def build(self, device: torch.device) -> None:
        """Take the memory of the cached shard."""

    @abstractmethod
    def start(
        self,
        full: torch.Tensor,
        put: Callable[[], None],
        context: CollectiveContext,
        on_copy_stream: StreamContext,
    ) -> Pending | None:
        """Start gathering the whole into `full`. `put` writes this rank's part of the masters
        there. Both run inside the context of `on_copy_stream`. Returns None if nothing is under way.
        """

    @property
    def reads_masters(self) -> bool:
        """Whether the next gather begins with this rank's masters, not with the cached shard."""
        return not (self.fresh and self.cached is not None)

    def masters_written(self) -> None:
        """Note that the masters have new values."""
        self.fresh = False

    @property
    def resting_bytes(self) -> dict[str, int]:
        """Bytes of the cached shard, by category."""
        return {} if self.cached is None else {PARAMETERS: nbytes_of(self.cached)}


class LocalGather(Gather):
    """No traffic: this rank has all masters."""

    def start(
        self,
        full: torch.Tensor,
        put: Callable[[], None],
        context: CollectiveContext,
        on_copy_stream: StreamContext,
    ) -> None:
        with on_copy_stream():
            put()


class FlatGather(Gather):
    """One all-gather among the ranks whose masters together are the whole."""

    plain = True

    def start(
        self,
        full: torch.Tensor,
        put: Callable[[], None],
        context: CollectiveContext,
        on_copy_stream: StreamContext,
    ) -> Pending:
        with on_copy_stream():
            put()
            return self.flat.owners_group.all_gather(full, context, self.flat.index)


class SecondaryGather(Gather):
    """A gather between groups once after a step, and further gathers inside the group from the
    secondary shard (hpZ, ZeRO++).
    """

    def build(self, device: torch.device) -> None:
        dtype = self.flat.dtypes.compute
        numel = self.flat.spec.cached_bytes // dtype.itemsize
        self.cached = torch.empty(numel, dtype=dtype, device=device)

    def start(
        self,
        full: torch.Tensor,
        put: Callable[[], None],
        context: CollectiveContext,
        on_copy_stream: StreamContext,
    ) -> Pending:
        flat, group, cached = self.flat, self.flat.group, self.cached
        mine = full[slice(*flat.shard)]
        assert cached is not None
        with on_copy_stream():
            if self.fresh:
                mine.copy_(cached)
                return group.intra_group.all_gather(full, context, flat.index)
            put()
            self.fresh = True

            def cache_and_gather_intra_group() -> Pending:
                cached.copy_(mine)
                return group.intra_group.all_gather(full, context, flat.index)

            first = group.inter_group.all_gather(mine, context, flat.index)
            return Chain(group, first, cache_and_gather_intra_group)


def state_context(resources: Resources, unit_name: str) -> CollectiveContext:
    """Return what errors and the ledger say of a collective over parameters or states of a unit."""
    return CollectiveContext("state", unit_name, resources.progress.step_count, "state")
