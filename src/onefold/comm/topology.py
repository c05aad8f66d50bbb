"""Which ranks share a node, by the launcher's variables, and how many ranks make a group.

| recipe's `group` | ranks of a group, if every node has the same number (above 1) of consecutive ranks | else                            |
|------------------|------------------------------------------------------------------------------------|---------------------------------|
| None             | the ranks of a node: two levels                                                    | all: one level                  |
| "node"           | the ranks of a node                                                                | all if the nodes are unknown;   |
|                  |                                                                                    | raises if nodes are uneven      |
| "flat"           | all: one level, every rank to every other                                          | the same                        |
| a number         | that many                                                                          | the same                        |

`Topology` (layout/topology.py) says which interval each rank then has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from onefold.layout import Topology
from onefold.recipe.rows import FLAT, NODE

#: Variables with (ranks of this node, ranks of the run), by launcher: torchrun and others that set
#: the same; Open MPI; MPICH, Intel MPI and MVAPICH.
_SAID_BY = (
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
)
#: srun: "4(x2)", or "4" on one node; anything else is uneven.
_SLURM = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS")
#: srun's distributions that put consecutive ranks on a node.
_NEIGHBOURS = ("", "block", "unknown")


def ranks_of_a_node(
    environment: Mapping[str, str] = os.environ, world_size: int | None = None
) -> int | None:
    """Return the number of ranks on each node, from the variables of torchrun, mpirun or srun.

    None if no launcher has set them, if nodes have different numbers of ranks, or if the ranks of a
    node are not consecutive.

    Args:
        environment: the environment variables.
        world_size: the number of ranks of this run. Variables for another number are ignored: they
            come from an outer run, inside which this one was started.

    Raises:
        ValueError: a variable is not a number of ranks, or exceeds the ranks of the run.
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
    """Return the ranks of a group, by the table of this module. `per_node` is None if the nodes are
    unknown.

    Raises:
        ValueError: group="node", but `ranks` are spread over nodes unevenly or not consecutively.
    """
    if group == FLAT or (group in (None, NODE) and per_node is None):
        return len(ranks)
    if group is not None and group != NODE:
        return int(group)
    nodes = nodes_of(ranks, per_node)
    each = len(ranks) // len(set(nodes))
    uneven = [len(list(neighbours)) for _, neighbours in groupby(nodes)] != [each] * len(set(nodes))
    if group is None:  # by default, no groups if nodes are uneven or have one rank each
        return len(ranks) if uneven or each == 1 else each
    if uneven:
        raise ValueError(
            f"group='node': ranks {list(ranks)} lie on nodes {nodes}, unevenly. Give the same"
            " number of neighbouring ranks on each node, or the number of ranks of a group."
        )
    return each


def nodes_of(ranks: Sequence[int], per_node: int | None) -> list[int]:
    """Return the node of each global rank. Each node has `per_node` consecutive ranks; None means
    that all ranks are on one node.
    """
    return [rank // per_node if per_node else 0 for rank in ranks]


def sides_of(
    ranks: Sequence[int], per_node: int | None, group: int | str | None, topology: Topology
) -> tuple[list[int], str]:
    """Return what counts as the node of each position, and the number of nodes in words; "" if
    there is one.

    These are the launcher's nodes. If there is only one, and the recipe names a number of ranks for
    its groups, the groups stand for nodes.
    """
    nodes, name = nodes_of(ranks, per_node), "nodes"
    if len(set(nodes)) == 1 and isinstance(group, int):
        nodes, name = [number // topology.inner for number in topology.order], "groups"
    count = len(set(nodes))
    return nodes, f"{count} {name}" if count > 1 else ""
