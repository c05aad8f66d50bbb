"""Room `memory`: buffers with a lifetime, the tiers, and the memory ledger. Knows no modules and no
collectives.
"""

from onefold.memory.pool import (
    GATHERED,
    GRADIENTS,
    IDLE,
    LEAVING,
    MASTERS,
    MOMENTS,
    PARAMETERS,
    REDUCTION,
    RESIDUALS,
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
    "PARAMETERS",
    "REDUCTION",
    "RESIDUALS",
    "STAGING",
    "MemoryLedger",
    "Pool",
    "empty",
    "nbytes_of",
    "storage_of",
]
