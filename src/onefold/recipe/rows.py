"""What a row of the recipe says of where: placements, tiers, and which ranks it is divided among.

Ranks stand in groups, as a rule the ranks of a node, whose links are faster than those between
nodes. Where the launcher tells of several nodes, everything moves over two levels, inside nodes and
across them: each byte enters a node once. Between every rank and every other ("flat") it would
enter as often as the node has ranks. A row's `over` says what it is divided among: "all" ranks, or
those of each "group", which then has a replica of the row to itself.

| recipe                       | parameters | gradients | optimizer | between groups, a step of m micro-batches          |
|------------------------------|------------|-----------|-----------|----------------------------------------------------|
| ZeRO-3                       | all        | all       | all       | 3mΨ                                                |
| HSDP, MiCS                   | group      | group     | group     | 2Ψ/G, once: gradients reduced                      |
| hybrid optimizer sharding    | group      | group     | all       | 2Ψ/G, once: gradients reduced, parameters gathered |
| second copy (ZeRO++ hpZ)     | group      | all       | all       | Ψ once, and mΨ: gradients                          |

Parameters over a group with an optimizer over all ranks are a second copy: each rank keeps 1/G of
the parameters to gather from, renewed once after each optimizer step.

Sources: Zhao et al. 2023 (PyTorch FSDP, hybrid sharding), Zhang et al. 2022 (MiCS), Wang et al.
2023 (ZeRO++).
"""

from __future__ import annotations

import enum

#: What a row may be divided over.
ALL, GROUP = "all", "group"
#: What `Recipe.group` may say besides a number of ranks.
NODE, FLAT = "node", "flat"
#: Who adds gradients up, see `Recipe.reduce`.
ORDERED, NATIVE = "ordered", "native"


class Placement(enum.Enum):
    """Where one kind of state lives on the data-parallel axis.

    REPLICATED: every rank holds all of it. SHARDED: each rank holds one interval of each unit's
    flat address space.
    """

    REPLICATED = "replicated"
    SHARDED = "sharded"


class Tier(enum.Enum):
    """Which memory holds it: the one that the module computes from, the host's, or files on a
    disk.
    """

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"
