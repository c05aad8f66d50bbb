"""Room `layout`: the address of every element, and every size that follows from it. Knows no
processes and makes no tensors.
"""

from onefold.layout.flat import (
    ALIGNMENT,
    FlatLayout,
    Slot,
    Topology,
    overlap,
    round_up,
)
from onefold.layout.spec import (
    LOW,
    Adds,
    Dtypes,
    Hop,
    Level,
    ShardSpec,
    Tiers,
    adds_of,
    hops_of,
)

__all__ = [
    "ALIGNMENT",
    "LOW",
    "Adds",
    "Dtypes",
    "FlatLayout",
    "Hop",
    "Level",
    "ShardSpec",
    "Slot",
    "Tiers",
    "Topology",
    "adds_of",
    "hops_of",
    "overlap",
    "round_up",
]
