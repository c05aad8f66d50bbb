"""What an engine has off the device: streams of copies, host buffers, files on NVMe, and the
ledgers of all three.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from onefold.comm import TrafficLedger
from onefold.device import CopyStream, HostBuffers, Ticket
from onefold.memory import STAGING, MemoryLedger, Pool
from onefold.memory.tier_error import TierError
from onefold.recipe import Recipe
from onefold.runtime.capabilities import Region, Store, Transfer

#: Writes under way of one rank, beyond which the next waits for the first.
BEHIND = 3


class Transfers:
    """Attributes:
    device: the ledger of the device's memory. host, disk: bytes held on the host for what rests off
        the device (and what is on its way), and on NVMe.
    moved: bytes "up" to the device and "down" to the host, "read" from and "written" to NVMe, with
        the seconds waited for them.
    down, up: copies to the host and to the device: a device does both at a time.
    pinned: host buffers for gradients and casts. pool: host buffers of whole pages, reused. chunk:
        elements moved at a time, and the size of those buffers.
    broken: why nothing may go on: the disk failed in the middle of a step.
    """

    def __init__(
        self,
        recipe: Recipe,
        rank: int,
        device: torch.device,
        memory: MemoryLedger,
        make: Callable[[Recipe, int, bool], Store],
    ) -> None:
        self._make = make
        self.recipe, self.rank, self.device = recipe, rank, memory
        self.host, self.disk = MemoryLedger(), MemoryLedger()
        self.moved = TrafficLedger()
        self.down, self.up = (
            CopyStream(device, name="copies down"),
            CopyStream(device, name="copies up"),
        )
        self.pinned = HostBuffers(device)
        self.pool = Pool(
            torch.device("cpu"),
            self.host,
            paged=True,
            pinned=device if self.up.asynchronous else None,
        )
        self.chunk = recipe.chunk
        self.broken: str | None = None
        self._writing: deque[tuple[torch.Tensor, Transfer]] = deque()
        self._rising: deque[tuple[Ticket | None, torch.Tensor]] = deque()
        # Steps in the backward pass write from a thread of their own
        self._lock = threading.RLock()
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        """The files on NVMe of this rank; made when they are first asked for.

        Raises:
            TierError: a folder is not there, or cannot be written.
        """
        if self._store is None:
            self._store = self._make(self.recipe, self.rank, self.up.asynchronous)
        return self._store

    @property
    def open_store(self) -> Store | None:
        """The store, if there is one."""
        return self._store

    def check(self) -> None:
        """Raise TierError if an earlier failure left state that nobody can vouch for."""
        if self.broken is not None:
            raise TierError(self.broken)

    def entered(self, move: str, unit: str, nbytes: int) -> None:
        """Bytes on their way: "up", "down", "read" or "written"."""
        self.moved.record(move, unit, nbytes)

    def wait(self, transfer: Transfer) -> None:
        """Wait for the disk; the seconds count as exposed.

        Raises:
            TierError: it did not go well.
        """
        if transfer.done():
            transfer.wait()
            return
        begun = time.perf_counter()
        try:
            transfer.wait()
        finally:
            self.moved.waited(None, begun)

    def rise(self, into: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy a buffer of the pool to the device, on the stream of copies up; it goes back when
        that is done. The host does not wait.
        """
        ticket = self.up.copy(into, whole)
        with self._lock:
            self._rising.append((ticket, whole))
        self.risen()

    def risen(self, all_of_them: bool = False) -> None:
        """Give back the buffers whose copies are done, or wait for all."""
        if all_of_them:
            self.up.wait()
        with self._lock:
            while self._rising and (
                all_of_them or (ticket := self._rising[0][0]) is None or ticket.query()
            ):
                self.pool.give(self._rising.popleft()[1])

    def buffer(
        self, numel: int, dtype: torch.dtype, unit: str, grain: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(a host buffer to be given back to the pool, its first `numel` items): of one size
        wherever that is enough.

        `grain`: elements that an item stands for.
        """
        self.risen()
        whole = self.pool.take(max(numel, -(-self.chunk // grain)), dtype, STAGING, unit)
        return whole, whole[:numel]

    def write(
        self, region: Region, start: int, data: torch.Tensor, whole: torch.Tensor, unit: str
    ) -> None:
        """Start writing `data` to `region` from element `start` on; its buffer `whole` goes back to
        the pool when that is done.

        Raises:
            TierError: an earlier write did not go well.
        """
        with self._lock:
            self._writing.append((whole, region.write(start, data)))
            self.entered("written", unit, data.numel() * data.element_size())
            self.flush(BEHIND)

    def flush(self, behind: int = 0) -> None:
        """Wait until no more than `behind` writes are under way.

        Raises:
            TierError: one did not go well.
        """
        with self._lock:
            while self._writing and (len(self._writing) > behind or self._writing[0][1].done()):
                whole, transfer = self._writing.popleft()
                try:
                    self.wait(transfer)
                finally:
                    self.pool.give(whole)

    def forget_writes(self) -> None:
        """Wait for what is being written, and pass over what goes wrong: that something did was
        said already.
        """
        while self._writing:
            with contextlib.suppress(TierError):
                self.flush()

    def close(self) -> None:
        """Let go of buffers and files."""
        self.risen(all_of_them=True)
        self.down.wait()
        self.pinned.close()
        self.forget_writes()
        self.pool.drain()
        if self._store is not None:
            self._store.close()
