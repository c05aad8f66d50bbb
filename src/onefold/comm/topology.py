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
import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from onefold.layout import Topology
from onefold.recipe.rows import FLAT, NODE

#: (ranks of this node, ranks of the run), by launcher: torchrun and those that set the same
#: variables; Open MPI; MPICH, Intel MPI and MVAPICH.
_SAID_BY = (
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
)
#: srun: "4(x2)", or "4" on one node; anything else is uneven.
_SLURM = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS")
#: Distributions of srun by which a node has neighbouring ranks.
_NEIGHBOURS = ("", "block", "unknown")


def ranks_of_a_node(
    environment: Mapping[str, str] = os.environ, world_size: int | None = None
) -> int | None:
    """How many ranks each node has, as the launcher says: torchrun, mpirun or srun; None if nobody
    does, or if nodes have different numbers of ranks or ranks that are no neighbours.

    `world_size`: of the run. What a launcher says of another number of ranks is of another run,
    inside which this one was started.

    Raises:
        ValueError: what a launcher has said, or somebody has set by hand, is no number of ranks.
    """
    for here_name, all_name in _SAID_BY:
        if here_name in environment and all_name in environment:
            here = _count(environment, here_name)
            return _each(here, _count(environment, all_name), world_size, here_name)
    tasks, total = (environment.get(name, "") for name in _SLURM)
    even = re.fullmatch(r"(\d+)(\(x\d+\))?", tasks)
    distribution = environment.get("SLURM_DISTRIBUTION", "").partition(":")[0]
    if even and total.isdigit() and distribution in _NEIGHBOURS:
        return _each(int(even.group(1)), int(total), world_size, _SLURM[0])
    return None


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment[name].strip()
    if not text.isdigit() or not int(text):
        raise ValueError(
            f"the environment says {name}={environment[name]!r}: expected a number of ranks from 1"
            " up, as launchers set it. Correct it, or unset it."
        )
    return int(text)


def _each(here: int, all_of_them: int, world_size: int | None, name: str) -> int | None:
    if world_size is not None and all_of_them != world_size:
        return None
    if here > all_of_them:
        raise ValueError(
            f"the environment says {name}={here} for a run of {all_of_them} ranks: a node cannot"
            " have more ranks than there are. Correct it, or unset it."
        )
    return here if all_of_them % here == 0 else None


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
