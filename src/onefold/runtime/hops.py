"""The hops of a gradient from the whole to this rank's interval.

    over all ranks, no groups        whole ────────────── all ──────────────► interval
    over all ranks, in groups        whole ── intra-group ──► shard ── inter-group ──► interval

`interval` is a rank's part among all ranks, `shard` its part among those of its group (see [Note:
positions] in layout/topology.py). At each hop the parts are added in the accumulation dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from onefold.comm import Group
from onefold.layout import Level, ShardSpec


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
