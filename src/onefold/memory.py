"""Room `memory`: pools of buffers, the memory ledger, the host's memory, and errors of the tiers. Knows no
modules and no collectives.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from onefold.device import host_empty, host_pages, owners_of
from onefold.device.pinned import HUGE_PAGE

# -- errors of a tier ------------------------------------------------------------------------------
#
# `TierError`: the error of a failed file operation on a disk, in a sentence with a hint.


class TierError(RuntimeError):
    """A file operation failed. The message has the operation, path, system's error and a hint."""


def failure(what: str, path: Path, error: OSError) -> TierError:
    """Return the error for an operation `what` on `path` that the system refused, with what to do."""
    said = error.strerror or str(error) or type(error).__name__
    return TierError(
        f"{what} {path} failed: {said}; name another disk in nvme=, with room and for this user to"
        " write to, or store more on the host."
    )


# -- the host's memory -----------------------------------------------------------------------------
#
# The memory of this host: how much is free, and how much there is.


_CGROUP = Path("/sys/fs/cgroup")


def _found(file: Path, pattern: str = r"^(\d+)") -> int | None:
    """Return the number that a file of the system says; None if it says none."""
    try:
        found = re.search(pattern, file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found is not None else None


def _installed() -> int | None:
    known = hasattr(os, "sysconf")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if known else None


def free_host_memory() -> int:
    """Return the bytes of memory that can be allocated without swapping: the kernel's figure or the
    cgroup's, whichever is lower; half of what there is if neither is known.
    """
    available = _found(Path("/proc/meminfo"), r"^MemAvailable:\s+(\d+) kB")
    found = [available * 1024] if available is not None else []
    limit, used = (_found(_CGROUP / f"memory.{name}") for name in ("max", "current"))
    if limit is not None and used is not None:
        cache = _found(_CGROUP / "memory.stat", r"^inactive_file (\d+)") or 0
        found.append(max(0, limit - used + cache))
    return min(found or [(_installed() or 0) // 2])


def total_host_memory() -> int:
    """Return the bytes of host memory that this process may use at most: the machine's or the
    cgroup's limit, whichever is lower; 0 if neither is known.
    """
    found = _installed(), _found(_CGROUP / "memory.max")
    return min((nbytes for nbytes in found if nbytes is not None), default=0)


# -- the pool --------------------------------------------------------------------------------------
#
# Pools of buffers: a buffer is taken, and given back when the work that reads it is done.
#
# [Note: nobody reads a reused buffer] A tensor that autograd has saved, a module's output, or
# anything else may alias a gathered buffer (`w.t()`, `w[idx]`, a tied head). `give` therefore counts
# the owners of the storage. If the pool's handle is the only one, the buffer can be reused. Else the
# pool forgets it, and the memory lives as long as its last reader. So a buffer is never reused while
# something can still read it, and no caller has to keep track of readers.


# Categories of the ledger, by the names that plans and reports use too.
PARAMETERS, MASTERS, GRADIENTS = "parameters", "master weights", "gradients"
#: Gradients on the device that a copy to the host still reads.
LEAVING = "gradients on their way"
GATHERED, REDUCTION, IDLE = "gathered units", "reduction buffers", "idle buffers"
#: Matrices and gradients that are whole on their owner for a step, and their pieces on the way.
OWNED = "whole matrices of a step"
# Off the device: the optimizer's states, and buffers for transfers.
MOMENTS, STAGING = "moments", "staging buffers"

# Host buffers of this size (bytes) and more use huge pages. The C library never serves them from
# its heap, so each new one takes page faults.
LARGE = 32 << 20


def empty(
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    paged: bool = False,
    pinned: torch.device | None = None,
) -> torch.Tensor:
    """Return a new one-dimensional buffer with undefined contents.

    A large host buffer is a mapping of its own that asks for huge pages: buffers of a step are
    returned to the system after it, and touching new memory costs a fault for each page. On a
    system without huge pages it is an ordinary mapping.

    Args:
        paged: the buffer has whole pages of its own at any size, as direct reads from a disk need.
        pinned: pin the host buffer for copies from and to this device.
    """
    nbytes = numel * dtype.itemsize
    if pinned is not None and numel:
        return host_empty(numel, dtype, pinned, paged=paged)
    # A disk transfers huge pages in longer pieces, so paged buffers use them from a smaller size on
    large = nbytes >= (HUGE_PAGE if paged else LARGE)
    plain = device.type != "cpu" or not (large or paged) or numel == 0
    # Under a dispatch mode torch must make the tensor: it may be a fake one
    if plain or torch._C._len_torch_dispatch_stack():
        return torch.empty(numel, dtype=dtype, device=device)
    return host_pages(nbytes, large, paged=paged).view(dtype)


class MemoryLedger:
    """Bytes that the engine holds on this rank, by category. `peak` is the largest sum
    seen, by category.

    Attributes:
        record: True keeps every change in `timeline`, as (seconds of `time.perf_counter`, category,
            unit, change in bytes).
        probes: functions that return the bytes of categories whose memory the user frees without
            the engine's knowledge. They are called whenever the ledger is read.
    """

    def __init__(self) -> None:
        self.probes: dict[str, Callable[[], int]] = {}
        self.record = False
        self.timeline: list[tuple[float, str, str, int]] = []
        self._now: Counter[str] = Counter()
        self._peak: dict[str, int] = {}
        self._total = self._peak_total = 0
        # Optimizer steps in the backward pass take buffers in a thread of their own
        self._lock = threading.Lock()

    def add(self, category: str, nbytes: int, unit: str = "") -> None:
        with self._lock:
            self._now[category] += nbytes
            self._total += nbytes
            if self._total > self._peak_total:
                self._peak_total, self._peak = self._total, dict(self._now)
        if self.record and nbytes:
            self.timeline.append((time.perf_counter(), category, unit, nbytes))

    def set(self, category: str, nbytes: int) -> None:
        self.add(category, nbytes - self._now[category])

    def held(self, category: str) -> int:
        """Return the bytes of `category`, without calling the probes."""
        return self._now[category]

    def look(self) -> None:
        """Call the probes, and update their categories."""
        for category, probe in self.probes.items():
            self.set(category, probe())

    def now(self) -> dict[str, int]:
        self.look()
        return {k: v for k, v in self._now.items() if v}

    def peak(self) -> dict[str, int]:
        return {k: v for k, v in self._peak.items() if v}

    def reset_peak(self) -> None:
        self._peak, self._peak_total = dict(self._now), self._total


class Pool:
    """Flat one-dimensional buffers on one device. See [Note: nobody reads a reused buffer].

    Idle buffers are freed when one of another size is needed, and by `drain`. Pinned buffers are
    kept, because pinning takes longer than what they are used for: `drain` frees those that were
    idle since the call before the last.
    """

    def __init__(
        self,
        device: torch.device,
        ledger: MemoryLedger,
        paged: bool = False,
        pinned: torch.device | None = None,
    ) -> None:
        self.device, self.ledger, self.paged, self.pinned = device, ledger, paged, pinned
        # Idle buffers, and how many times `drain` had been called when they were given back
        self._free: dict[tuple[int, torch.dtype], list[tuple[torch.Tensor, int]]] = defaultdict(
            list
        )
        self._taken: dict[int, tuple[str, str]] = {}
        self._lent: list[torch.Tensor] = []
        self._drained = 0
        # Optimizer steps in the backward pass take buffers in a thread of their own
        self._lock = threading.Lock()

    def take(self, numel: int, dtype: torch.dtype, category: str, unit: str = "") -> torch.Tensor:
        """Return a buffer, [numel], with undefined contents, and enter it in the ledger."""
        buffer = self._buffer(numel, dtype)
        self._taken[id(buffer)] = category, unit
        self.ledger.add(category, nbytes_of(buffer), unit)
        return buffer

    def fresh(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a tensor that nobody will give back; the caller enters it in the ledger.
        Pinned memory comes back by itself when no tensor lies in it any more: a copy in flight holds
        both of its tensors (`CopyStream`), so it is not being copied then.
        """
        if self.pinned is None:
            return empty(numel, dtype, self.device)
        if not self._free[numel, dtype]:
            self.idle()
        buffer = self._buffer(numel, dtype)
        self._lent.append(buffer)
        return buffer[:]

    def idle(self) -> int:
        """Return the bytes of idle buffers, after taking back what nobody uses any more."""
        with self._lock:
            self._lent = [buffer for buffer in self._lent if not self._take_back(buffer)]
        return self.ledger.held(IDLE)

    def _buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            buffer, _ = self._free[numel, dtype].pop()  # another thread may have taken the last one
        except IndexError:
            if self.pinned is None:
                self.drain()  # before allocating
            return empty(numel, dtype, self.device, self.paged, self.pinned)
        self.ledger.add(IDLE, -nbytes_of(buffer))
        return buffer

    def _take_back(self, buffer: torch.Tensor) -> bool:
        unread = owners_of(buffer) <= 1
        if unread:
            self._free[buffer.numel(), buffer.dtype].append((buffer, self._drained))
            self.ledger.add(IDLE, nbytes_of(buffer))
        return unread

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back. Other code may still hold a view, which keeps its memory alive."""
        category, unit = self._taken.pop(id(buffer))
        self.ledger.add(category, -nbytes_of(buffer), unit)
        self._take_back(buffer)

    def drain(self) -> None:
        """Free every idle buffer; of pinned ones those that nobody has taken for a while."""
        if self.pinned is None:
            self.close()
            return
        self._drained += 1
        for idle in self._free.values():
            for buffer, given in idle:
                if given < self._drained - 2:
                    self.ledger.add(IDLE, -nbytes_of(buffer))
            idle[:] = [each for each in idle if each[1] >= self._drained - 2]

    def close(self) -> None:
        """Free every idle buffer, and forget those that nobody will give back."""
        self._free.clear()
        self._lent.clear()
        self.ledger.set(IDLE, 0)


def storage_of(t: torch.Tensor) -> int:
    """Return what identifies a storage, whatever its views; also of fake and meta tensors."""
    return t.untyped_storage()._cdata


def nbytes_of(t: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return t.numel() * t.element_size()
