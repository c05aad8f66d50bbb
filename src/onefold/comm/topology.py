"""Two levels of ranks: groups of `inner` neighbours (as a rule a node), and `outer` such groups.

Six ranks in groups of three; in the first picture by their numbers, in the second by their
positions in the address space:

    group 0    rank 0   rank 1   rank 2         group 0    0   2   4        inside: 0 2 4  |  1 3 5
    group 1    rank 3   rank 4   rank 5         group 1    1   3   5        across: 0 1  |  2 3  |  4 5

[Note: positions] A rank's interval of a flat buffer is that of its position, and positions count
across the groups first. So the intervals of the ranks that hold the same part in different groups
(`inter_group`) lie side by side, and what one of them gathers there is one interval of the division
among the ranks of a group (`intra_group`): moves over both levels need no reordering.

| group given      | ranks of a group, where each node has the same number of neighbouring ranks, above 1 | elsewhere             |
|------------------|------------------------------------------------------------------------------------|-----------------------|
| None             | those of a node: two levels                                                         | all: one level        |
| "node"           | those of a node                                                                     | all where nobody says |
|                  |                                                                                     | where nodes end;      |
|                  |                                                                                     | raises where uneven   |
| "flat"           | all: one level, every rank to every other                                           | the same              |
| a number         | that many                                                                           | the same              |
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from onefold.recipe.rows import FLAT, NODE


@dataclass(frozen=True)
class Topology:
    """`size` ranks in groups of `inner`.

    Raises:
        ValueError: the groups do not divide the ranks.
    """

    size: int
    inner: int

    def __post_init__(self) -> None:
        if self.inner < 1 or self.size % self.inner:
            fitting = [n for n in range(1, self.size + 1) if self.size % n == 0]
            raise ValueError(
                f"groups of {self.inner} ranks do not divide {self.size}"
                f" rank{'s' if self.size > 1 else ''}: choose a size of"
                f" {', '.join(map(str, fitting))}."
            )

    @property
    def outer(self) -> int:
        """Groups."""
        return self.size // self.inner

    @property
    def order(self) -> list[int]:
        """The ranks' numbers, 0 to size − 1, by position."""
        return [(p % self.outer) * self.inner + p // self.outer for p in range(self.size)]

    def intra_group(self, position: int) -> list[int]:
        """The positions in the group of `position`, itself among them."""
        return list(range(position % self.outer, self.size, self.outer))

    def inter_group(self, position: int) -> list[int]:
        """The positions that hold in other groups what `position` holds in its own, itself among
        them.
        """
        first = position // self.outer * self.outer
        return list(range(first, first + self.outer))


def ranks_of_a_node(
    environment: Mapping[str, str] = os.environ, world_size: int | None = None
) -> int | None:
    """How many ranks each node has, as the launcher says (torchrun and those that set the same
    variables); None if it does not say.

    `world_size`: of the run. What a launcher says of another number of ranks is of another run,
    inside which this one was started.
    """
    try:
        here, all_of_them = int(environment["LOCAL_WORLD_SIZE"]), int(environment["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    if world_size is not None and all_of_them != world_size:
        return None
    return here if 1 <= here <= all_of_them and all_of_them % here == 0 else None


def inner_of(group: int | str | None, ranks: Sequence[int], per_node: int | None) -> int:
    """Ranks of a group, by the table of this module; `per_node` is None where nobody says where
    nodes end.

    Raises:
        ValueError: "node" was asked for, and `ranks` are spread over nodes unevenly, or not in a
            row.
    """
    if group == FLAT or (group in (None, NODE) and per_node is None):
        return len(ranks)
    if group is not None and group != NODE:
        return int(group)
    nodes = nodes_of(ranks, per_node)
    each = len(ranks) // len(set(nodes))
    uneven = [len(list(neighbours)) for _, neighbours in groupby(nodes)] != [each] * len(set(nodes))
    if group is None:  # nobody asked for groups: none where they are not there, or have one rank
        return len(ranks) if uneven or each == 1 else each
    if uneven:
        raise ValueError(
            f"group='node': ranks {list(ranks)} lie on nodes {nodes}, unevenly. Give the same"
            " number of neighbouring ranks on each node, or the number of ranks of a group."
        )
    return each


def nodes_of(ranks: Sequence[int], per_node: int | None) -> list[int]:
    """The node of each global rank, where each node has `per_node` ranks in a row; None: all are on
    one.
    """
    return [rank // per_node if per_node else 0 for rank in ranks]


def sides_of(
    ranks: Sequence[int], per_node: int | None, group: int | str | None, topology: Topology
) -> tuple[list[int], str]:
    """What counts as a node of the ranks at each position, and how many there are, in words; ""
    where there is one.

    The launcher's nodes; where it knows of one only, groups of a number of ranks that the recipe
    names stand for nodes.
    """
    nodes, name = nodes_of(ranks, per_node), "nodes"
    if len(set(nodes)) == 1 and isinstance(group, int):
        nodes, name = [number // topology.inner for number in topology.order], "groups"
    count = len(set(nodes))
    return nodes, f"{count} {name}" if count > 1 else ""
