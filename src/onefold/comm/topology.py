"""Which ranks stand together, as the launcher says, and how many make a group of a recipe.

| group given      | ranks of a group, where each node has the same number of neighbouring ranks, above 1 | elsewhere             |
|------------------|------------------------------------------------------------------------------------|-----------------------|
| None             | those of a node: two levels                                                         | all: one level        |
| "node"           | those of a node                                                                     | all where nobody says |
|                  |                                                                                     | where nodes end;      |
|                  |                                                                                     | raises where uneven   |
| "flat"           | all: one level, every rank to every other                                           | the same              |
| a number         | that many                                                                           | the same              |

`Topology` (layout/topology.py) says which interval each of them then has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import groupby

from onefold.layout import Topology
from onefold.recipe.rows import FLAT, NODE


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
