"""Which ranks share a node, and how many ranks make a group.

The nodes are those of the launcher's variables. If it sets none, or none that can be used, the
ranks compare the identities of their hosts (`host_identity`) when the group is made.

| recipe's `group` | ranks of a group, if every node has the same number (above 1) of consecutive ranks | else                            |
|------------------|------------------------------------------------------------------------------------|---------------------------------|
| None             | the ranks of a node: two levels                                                    | all: one level                  |
| "node"           | the ranks of a node                                                                | raises, naming the nodes        |
| "flat"           | all: one level, every rank to every other                                          | the same                        |
| a number         | that many                                                                          | the same                        |

`Topology` (layout/topology.py) says which interval each rank then has.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from onefold.comm.members import format_ranks
from onefold.layout import Topology
from onefold.recipe.rows import FLAT, NODE

#: Where nodes end: the number of consecutive ranks on each, or the node of each global rank, by the
#: ranks' own comparison. None: all ranks are on one node.
Nodes = int | Mapping[int, int] | None

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


def host_identity(environment: Mapping[str, str] = os.environ) -> str:
    """Return what tells this host from others: its name and the id of its boot, or NCCL_HOSTID if
    it is set. NCCL takes the same for a host.

    Containers on one machine have names of their own. They count as hosts of their own, since they
    reach each other over the network.
    """
    if said := environment.get("NCCL_HOSTID"):
        return said
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def inner_of(group: int | str | None, ranks: Sequence[int], per_node: Nodes) -> int:
    """Return the ranks of a group, by the table of this module.

    Raises:
        ValueError: group="node", but `ranks` are spread over nodes unevenly or not consecutively.
    """
    if group == FLAT:
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


def nodes_of(ranks: Sequence[int], per_node: Nodes) -> list[int]:
    """Return the node of each global rank."""
    if isinstance(per_node, Mapping):
        return [per_node[rank] for rank in ranks]
    return [rank // per_node if per_node else 0 for rank in ranks]


def flat_over(nodes: Sequence[int], topology: Topology) -> bool:
    """Return whether exchanges are flat over nodes: every rank sends to every other, although
    several share a node. `nodes` has the node of each rank.

    With m ranks on each node, reductions then send m times the bytes between nodes that they send
    on two levels.
    """
    return not topology.two_levels and 1 < len(set(nodes)) < len(nodes)


def communicators_of(topology: Topology) -> int:
    """Return how many native communicators an engine's `Group` makes over these ranks: one each for
    gathers and reductions over all ranks, or on two levels one over all ranks and two on each level.
    """
    if topology.size == 1:
        return 0
    return 5 if topology.two_levels else 2


def flat_note(
    group: int | str | None, ranks: Sequence[int], per_node: Nodes, topology: Topology
) -> str:
    """Return a sentence for a default (`group` is None) that is flat over nodes: why, what it costs
    and what to do; "" if it is not.
    """
    nodes = nodes_of(ranks, per_node)
    if group is not None or not flat_over(nodes, topology):
        return ""
    by_node: dict[int, list[int]] = {}
    for rank, node in sorted(zip(ranks, nodes, strict=True)):
        by_node.setdefault(node, []).append(rank)
    runs = [len(list(neighbours)) for _, neighbours in groupby(nodes)]
    uneven, scattered = len(set(map(len, by_node.values()))) > 1, len(runs) > len(by_node)
    why = " and ".join(
        ["unevenly"] * uneven + ["not as neighbours"] * scattered  # at least one of the two
    )
    shown = "; ".join(format_ranks(members) for members in list(by_node.values())[:8])
    more = f"; and {len(by_node) - 8} more" if len(by_node) > 8 else ""
    most, fitting = max(Counter(nodes).values()), math.gcd(*runs)
    cure = "Start the same number of ranks on each host, numbered host by host"
    if fitting > 1:
        cure += f", or give group={fitting}: groups of ranks that share a host"
    return (
        f"the ranks lie on {len(by_node)} hosts {why} (ranks {shown}{more}), so that no two levels"
        " can be made: every rank sends to every other, up to"
        f" {most} times the bytes between hosts in a reduction. {cure}."
    )


def sides_of(
    ranks: Sequence[int], per_node: Nodes, group: int | str | None, topology: Topology
) -> tuple[list[int], str]:
    """Return what counts as the node of each position, and the number of nodes in words; "" if
    there is one.

    If there is only one node, and the recipe names a number of ranks for its groups, the groups
    stand for nodes.
    """
    nodes, name = nodes_of(ranks, per_node), "nodes"
    if len(set(nodes)) == 1 and isinstance(group, int):
        nodes, name = [number // topology.inner for number in topology.order], "groups"
    count = len(set(nodes))
    return nodes, f"{count} {name}" if count > 1 else ""
