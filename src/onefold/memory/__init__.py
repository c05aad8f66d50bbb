"""Room `memory`: buffers with a lifetime and the memory ledger. Knows no modules and no collectives."""

from onefold.memory.pool import MemoryLedger, Pool, empty

__all__ = ["MemoryLedger", "Pool", "empty"]
