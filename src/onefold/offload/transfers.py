"""What an engine has off the device: copy streams, host buffers, files, and the ledgers of all three."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from onefold.comm import TrafficEvent, TrafficLedger
from onefold.device import CopyStream, HostSums, host_threads, using_threads
from onefold.memory import LEAVING, MemoryLedger, Pool, TierError, nbytes_of
from onefold.recipe import Tier

if TYPE_CHECKING:
    from onefold.offload.nvme import Nvme, Region, Transfer
    from onefold.runtime.engine import Engine

#: The number of writes of one rank that may be under way. A further one waits for the first.
BEHIND = 3


class Transfers:
    """The transfers of one rank between the device, the host and a disk.

    Attributes:
        ledgers: the ledgers of memory by tier. device: that of the device. host: that of host
            memory, for what is offloaded or under way. disk: that of the recipe's disk.
        moved: bytes "up" to the device and "down" to the host, "read" from and "written" to a disk,
            with the seconds waited for them.
        down, up: the copy streams to the host and to the device, which work at the same time.
        sums: adds gradients to those on the host, on the device.
        pool: host buffers, pinned on a device with streams, in whole pages if the recipe has a
            disk. chunk: elements moved at a time, and the size of the buffers for the disk.
        measures: measure gradients before they leave the device: the last clipping asked for what
            can be measured there.
        threads: how many of the host's threads work on what is stored there; None before the first
            such work.
        broken: why nothing may go on, if the disk failed in the middle of a step; else None.
    """

    def __init__(self, engine: Engine) -> None:
        device, memory = engine.device, engine.memory
        self.recipe, self.rank, self.device = engine.recipe, engine.rank, memory
        self._world_size = engine.world_size
        self.ledgers = {tier: MemoryLedger() for tier in Tier} | {Tier.DEVICE: memory}
        self.host = self.ledgers[Tier.HOST]
        self.disk = self.ledgers[Tier.NVME]
        self.moved = TrafficLedger()
        self.moved.wanted = lambda: memory.record
        self.down, self.up = (
            CopyStream(device),
            # Casts of masters run there, and gathers begin with them
            CopyStream(device, urgent=True),
        )
        self.sums = HostSums(self.down, taken=partial(memory.add, LEAVING))
        pinned = device if self.up.asynchronous else None
        self.pool = Pool(torch.device("cpu"), self.host, self.recipe.on_disk, pinned)
        self.chunk = self.recipe.chunk
        self.measures = False
        self.threads: int | None = None
        self.broken: str | None = None
        self._writing: deque[tuple[torch.Tensor, Transfer]] = deque()
        self._rising: deque[tuple[Any, torch.Tensor]] = deque()
        # For steps in the backward pass, which write from a thread of their own
        self._lock = threading.RLock()
        self._store: Any = None

    @property
    def store(self) -> Nvme:
        """The files of this rank on a disk. They are made at the first access.

        Raises:
            TierError: a folder does not exist, or cannot be written to.
        """
        if self._store is None:
            from onefold.offload.nvme import Nvme

            name, recipe = f"rank{self.rank}", self.recipe
            self._store = Nvme(recipe.nvme, name=name, threads=recipe.nvme_threads)
        store: Nvme = self._store
        return store

    def check(self) -> None:
        """Raise TierError if an earlier failure may have left wrong state."""
        if self.broken is not None:
            raise TierError(self.broken)

    def entered(self, move: str, unit: str, nbytes: int) -> None:
        """Record bytes that start to move: "up", "down", "read" or "written"."""
        self.moved.record(TrafficEvent(move, unit, nbytes))

    def wait(self, transfer: Transfer) -> None:
        """Wait for the disk; the seconds count as exposed.

        Raises:
            TierError: the transfer failed.
        """
        begun = time.perf_counter()
        try:
            transfer.wait()
        finally:
            self.moved.waited(None, begun)

    def rise(self, into: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy a buffer of the pool to the device, on the stream `up`. The buffer goes back to the
        pool when the copy is done. The host does not wait.
        """
        ticket = self.up.copy(into, whole)
        with self._lock:
            self._rising.append((ticket, whole))
        self.risen()

    def risen(self, all_of_them: bool = False) -> None:
        """Give back the buffers whose copies are done; or wait for all copies and give back all."""
        if all_of_them:
            self.up.wait()
        with self._lock:
            while self._rising and (
                all_of_them or (ticket := self._rising[0][0]) is None or ticket.query()
            ):
                self.pool.give(self._rising.popleft()[1])

    def host_threads(self, beside: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this thread's operators on the host use this rank's share of
        the cores (onefold/cores.py). On a CPU it changes nothing: the model computes there too.

        `beside`: leave a core to the thread that launches kernels meanwhile.
        """
        if not self.up.asynchronous:
            return contextlib.nullcontext()
        if self.threads is None:
            self.threads = host_threads(self._world_size)
        return using_threads(max(1, self.threads - 1) if beside else self.threads)

    def gradients_are_down(self) -> None:
        """Wait until the gradients that the user finds on the host are complete."""
        self.down.wait()
        self.sums.release()

    def read(self, region: Region, start: int, into: torch.Tensor, unit: str) -> Transfer:
        """Start to read elements of `region` from `start` on into `into`."""
        self.entered("read", unit, nbytes_of(into))
        return region.read(start, into)

    def write(
        self, region: Region, start: int, data: torch.Tensor, whole: torch.Tensor, unit: str
    ) -> None:
        """Start writing `data` to `region` from element `start` on. Its buffer `whole` goes back to
        the pool when the write is done.

        Raises:
            TierError: an earlier write failed.
        """
        with self._lock:
            self._writing.append((whole, region.write(start, data)))
            self.entered("written", unit, nbytes_of(data))
            self.flush(BEHIND)

    def flush(self, behind: int = 0) -> None:
        """Wait until no more than `behind` writes are under way.

        Raises:
            TierError: a write failed.
        """
        with self._lock:
            while self._writing and (len(self._writing) > behind or self._writing[0][1].done()):
                whole, transfer = self._writing.popleft()
                try:
                    self.wait(transfer)
                finally:
                    self.pool.give(whole)

    def forget_writes(self) -> None:
        """Wait for the writes under way and ignore their errors: a failure was already reported."""
        while self._writing:
            with contextlib.suppress(TierError):
                self.flush()

    def close(self) -> None:
        """Let go of buffers and files."""
        self.risen(all_of_them=True)
        self.gradients_are_down()
        self.forget_writes()
        self.pool.close()
        if self._store is not None:
            self._store.close()
