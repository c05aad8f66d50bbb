"""Buffers with a lifetime: taken from a pool, given back when the work that reads them is done.

[Note: nobody reads a reused buffer] A tensor that autograd saved, a module's output, or anything else may alias a gathered buffer
(`w.t()`, `w[idx]`, a tied head). `give` therefore looks at how many owners the storage has: the pool's own handle alone means
that it can be reused; any other owner means that the pool forgets the buffer, and the memory lives as long as its last reader.
A buffer is never reused under a reader, and nothing is kept alive by a convention.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import torch


class MemoryLedger:
    """Bytes that the engine holds on this rank, by category; `peak` is the largest sum seen, with its categories."""

    def __init__(self) -> None:
        self.probes: dict[str, Callable[[], int]] = {}  # categories whose end the engine does not see (the user drops them)
        self._now: Counter[str] = Counter()
        self._peak: dict[str, int] = {}
        self._peak_total = 0

    def add(self, category: str, nbytes: int) -> None:
        self._now[category] += nbytes
        if nbytes > 0 and (total := sum(self._now.values())) > self._peak_total:
            self._peak_total, self._peak = total, dict(self._now)

    def set(self, category: str, nbytes: int) -> None:
        self.add(category, nbytes - self._now[category])

    def look(self) -> None:
        """Ask the probes."""
        for category, probe in self.probes.items():
            self.set(category, probe())

    def now(self) -> dict[str, int]:
        self.look()
        return {k: v for k, v in self._now.items() if v}

    def peak(self) -> dict[str, int]:
        return {k: v for k, v in self._peak.items() if v}

    def reset_peak(self) -> None:
        self._peak, self._peak_total = dict(self._now), sum(self._now.values())


class Pool:
    """Flat one-dimensional buffers on one device. See [Note: nobody reads a reused buffer]."""

    def __init__(self, device: torch.device, ledger: MemoryLedger) -> None:
        self.device, self.ledger = device, ledger
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._taken: dict[int, str] = {}

    def take(self, numel: int, dtype: torch.dtype, category: str) -> torch.Tensor:
        """A buffer of `numel` elements with undefined contents, entered in the ledger under `category`."""
        free = self._free[numel, dtype]
        if free:
            buffer = free.pop()
            self.ledger.add("idle", -_bytes(buffer))
        else:
            self.drain()  # new memory is asked for only when no idle memory is left
            buffer = torch.empty(numel, dtype=dtype, device=self.device)
        self._taken[id(buffer)] = category
        self.ledger.add(category, _bytes(buffer))
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back. The caller holds no view of it any more; other readers may, and keep it alive."""
        category = self._taken.pop(id(buffer))
        self.ledger.add(category, -_bytes(buffer))
        if _owners(buffer) <= 1:
            self._free[buffer.numel(), buffer.dtype].append(buffer)
            self.ledger.add("idle", _bytes(buffer))

    def drain(self) -> None:
        """Let go of every buffer that is not in use."""
        self._free.clear()
        self.ledger.set("idle", 0)


def _bytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


def _owners(t: torch.Tensor) -> int:
    """Tensors that share t's storage, t included."""
    storage = t.untyped_storage()
    count = getattr(torch._C, "_storage_Use_Count", None)
    # The Python handle in `storage` is an owner too. Without the counter, say "many": the buffer is then never reused.
    return count(storage._cdata) - 1 if count is not None else 2
