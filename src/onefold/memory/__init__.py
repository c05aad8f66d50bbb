"""Room `memory`: buffers with a lifetime and the memory ledger. Knows no modules and no collectives."""

from onefold.memory.pool import GATHERED, GRADIENTS, IDLE, MASTERS, PARAMETERS, REDUCTION, MemoryLedger, Pool, empty, storage_of

__all__ = ["GATHERED", "GRADIENTS", "IDLE", "MASTERS", "PARAMETERS", "REDUCTION", "MemoryLedger", "Pool", "empty", "storage_of"]
