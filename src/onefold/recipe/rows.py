"""What a row of the recipe says of where: placements and tiers."""

from __future__ import annotations

import enum


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
