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
    Dtypes,
    Hop,
    Level,
    ShardSpec,
    Tiers,
)
