"""The hops of a gradient, from the whole to this rank's interval.

    over all ranks, no groups        whole ────────────── all ──────────────► interval
    over all ranks, in groups        whole ── intra-group ──► shard ── inter-group ──► interval

`interval` is a rank's part among all ranks, `shard` its part among those of its group (see [Note:
positions] in comm/topology.py). At each hop the parts are added in the accumulation dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from onefold.comm import Group
from onefold.layout import FlatLayout


@dataclass(frozen=True)
class Hop:
    """One step of a reduction: the ranks of `group` divide a range of addresses among themselves,
    `ranges` by position.
    """

    group: Group
    ranges: tuple[tuple[int, int], ...]

    @property
    def own(self) -> tuple[int, int]:
        """The addresses that this rank sums."""
        return self.ranges[self.group.rank]


def hops_of(layout: FlatLayout, group: Group) -> tuple[Hop, ...]:
    """The hops of a gradient over `layout`."""
    topology = group.topology
    everybody = Hop(group, tuple(layout.interval(p) for p in range(group.size)))
    if 1 in (topology.inner, topology.outer):
        return (everybody,)
    each = layout.shard_numel * topology.outer
    inside = Hop(
        group.intra_group, tuple((i * each, (i + 1) * each) for i in range(topology.inner))
    )
    mine = topology.inter_group(group.rank)
    return inside, Hop(group.inter_group, tuple(layout.interval(p) for p in mine))
