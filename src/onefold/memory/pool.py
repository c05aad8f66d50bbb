"""Buffers with a lifetime: taken from a pool, given back when the work that reads them is done.

[Note: nobody reads a reused buffer] A tensor that autograd saved, a module's output, or anything
else may alias a gathered buffer (`w.t()`, `w[idx]`, a tied head). `give` therefore looks at how
many owners the storage has: the pool's own handle alone means that it can be reused; any other
owner means that the pool forgets the buffer, and the memory lives as long as its last reader. A
buffer is never reused under a reader, and nothing is kept alive by a convention.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable

import torch

from onefold.device import host_empty, host_pages
from onefold.device.pinned import HUGE_PAGE

# Categories of the ledger: what the engine holds, in the words that plans and reports use too.
PARAMETERS, MASTERS, GRADIENTS = "parameters", "master weights", "gradients"
#: Bytes of gradients on the device that a copy to the host still reads.
LEAVING = "gradients on their way"
GATHERED, REDUCTION, IDLE = "gathered units", "reduction buffers", "idle buffers"
# What encoding gradients for the wire has lost, to be added to the next ones.
RESIDUALS = "error feedback"
# Off the device: an optimizer's states there, and buffers for what is on its way.
MOMENTS, STAGING = "moments", "staging buffers"

# Host buffers from this size on ask for huge pages. The C library never serves them from its heap,
# so each would fault in anew.
LARGE = 32 << 20


def empty(
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    paged: bool = False,
    pinned: torch.device | None = None,
) -> torch.Tensor:
    """A fresh one-dimensional buffer with undefined contents.

    A large one on the host lies in a mapping of its own that asks for huge pages: buffers of a step
    go back to the system after it, and touching fresh memory costs a fault for each page. Where the
    system has no huge pages it is a mapping like any other. `paged` asks for whole pages of its own
    whatever the size, as direct reads from a disk want them. `pinned`: a device that copies from it
    and to it by itself.
    """
    nbytes = numel * dtype.itemsize
    if pinned is not None and numel:
        return host_empty(numel, dtype, pinned, paged=paged)
    # A disk takes huge pages in longer pieces
    large = nbytes >= (HUGE_PAGE if paged else LARGE) and hasattr(mmap, "MADV_HUGEPAGE")
    plain = device.type != "cpu" or not (large or paged) or numel == 0
    # Under a mode torch makes the tensor itself: it may be one without contents
    if plain or torch._C._len_torch_dispatch_stack():
        return torch.empty(numel, dtype=dtype, device=device)
    return host_pages(nbytes, large, paged=paged).view(dtype)


class MemoryLedger:
    """Bytes that the engine holds on this rank, by category and unit; `peak` is the largest sum
    seen, with its categories.

    Attributes:
        record: True keeps every change in `timeline`, as (seconds of `time.perf_counter`, category,
            unit, change in bytes).
        probes: categories whose end the engine does not see (the user drops them): asked whenever
            somebody looks.
    """

    def __init__(self) -> None:
        self.probes: dict[str, Callable[[], int]] = {}
        self.record = False
        self.timeline: deque[tuple[float, str, str, int]] = deque(maxlen=1 << 16)
        self._now: Counter[str] = Counter()
        self._units: Counter[tuple[str, str]] = Counter()
        self._peak: dict[str, int] = {}
        self._total = self._peak_total = 0
        # Steps in the backward pass take buffers in a thread of their own
        self._lock = threading.Lock()

    def add(self, category: str, nbytes: int, unit: str = "") -> None:
        with self._lock:
            self._now[category] += nbytes
            self._units[unit, category] += nbytes
            self._total += nbytes
            if self._total > self._peak_total:
                self._peak_total, self._peak = self._total, dict(self._now)
        if self.record and nbytes:
            self.timeline.append((time.perf_counter(), category, unit, nbytes))

    def set(self, category: str, nbytes: int) -> None:
        self.add(category, nbytes - self._now[category])

    def held(self, category: str) -> int:
        """Bytes entered under `category`, without asking the probes."""
        return self._now[category]

    def look(self) -> None:
        """Ask the probes."""
        for category, probe in self.probes.items():
            self.set(category, probe())

    def now(self) -> dict[str, int]:
        self.look()
        return {k: v for k, v in self._now.items() if v}

    def by_unit(self) -> dict[str, dict[str, int]]:
        """What is held now by unit, then by category; under "" what belongs to no unit."""
        self.look()
        out: dict[str, dict[str, int]] = {}
        for (unit, category), nbytes in self._units.items():
            if nbytes:
                out.setdefault(unit, {})[category] = nbytes
        return out

    def peak(self) -> dict[str, int]:
        return {k: v for k, v in self._peak.items() if v}

    def reset_peak(self) -> None:
        self._peak, self._peak_total = dict(self._now), self._total


class Pool:
    """Flat one-dimensional buffers on one device. See [Note: nobody reads a reused buffer]."""

    def __init__(
        self,
        device: torch.device,
        ledger: MemoryLedger,
        paged: bool = False,
        pinned: torch.device | None = None,
    ) -> None:
        self.device, self.ledger, self.paged, self.pinned = device, ledger, paged, pinned
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._taken: dict[int, tuple[str, str]] = {}

    def take(self, numel: int, dtype: torch.dtype, category: str, unit: str = "") -> torch.Tensor:
        """A buffer of `numel` elements with undefined contents, entered in the ledger under
        `category` and `unit`.
        """
        free = self._free[numel, dtype]
        try:
            buffer = free.pop()  # another thread may have taken the last one
            self.ledger.add(IDLE, -nbytes_of(buffer))
        except IndexError:
            self.drain()  # new memory is asked for only when no idle memory is left
            buffer = empty(numel, dtype, self.device, self.paged, self.pinned)
        self._taken[id(buffer)] = category, unit
        self.ledger.add(category, nbytes_of(buffer), unit)
        return buffer

    def fresh(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """New memory with undefined contents that will not come back to the pool; whoever takes it
        enters it in the ledger.
        """
        return empty(numel, dtype, self.device)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back. The caller holds no view of it any more; other readers may, and keep
        it alive.
        """
        category, unit = self._taken.pop(id(buffer))
        self.ledger.add(category, -nbytes_of(buffer), unit)
        if _owners(buffer) <= 1:
            self._free[buffer.numel(), buffer.dtype].append(buffer)
            self.ledger.add(IDLE, nbytes_of(buffer))

    def drain(self) -> None:
        """Let go of every buffer that is not in use."""
        self._free.clear()
        self.ledger.set(IDLE, 0)


def storage_of(t: torch.Tensor) -> int:
    """Which memory a tensor lies in: the same number for all its views, also where there are no
    contents (fake tensors, meta).
    """
    return t.untyped_storage()._cdata


def nbytes_of(t: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return t.numel() * t.element_size()


def _owners(t: torch.Tensor) -> int:
    """Tensors that share t's storage, t included."""
    storage = t.untyped_storage()
    count = getattr(torch._C, "_storage_Use_Count", None)
    # The Python handle in `storage` is an owner too. Without the counter, say "many": the buffer is
    # then never reused.
    return count(storage._cdata) - 1 if count is not None else 2
