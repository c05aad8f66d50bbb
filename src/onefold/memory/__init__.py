"""Room `memory`: pools of buffers, the memory ledger, and errors of the tiers. Knows no modules and
no collectives.
"""

from onefold.memory.pool import (
    GATHERED,
    GRADIENTS,
    IDLE,
    LEAVING,
    MASTERS,
    MOMENTS,
    OWNED,
    PARAMETERS,
    REDUCTION,
    STAGING,
    MemoryLedger,
    Pool,
    empty,
    nbytes_of,
    storage_of,
)

__all__ = [
    "GATHERED",
    "GRADIENTS",
    "IDLE",
    "LEAVING",
    "MASTERS",
    "MOMENTS",
    "OWNED",
    "PARAMETERS",
    "REDUCTION",
    "STAGING",
    "MemoryLedger",
    "Pool",
    "empty",
    "nbytes_of",
    "storage_of",
]
