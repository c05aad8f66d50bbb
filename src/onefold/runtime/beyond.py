"""What an engine has beyond the device: the lane of copies, host buffers, files on NVMe, and the ledgers of all three."""

from __future__ import annotations

import time

import torch

from onefold.comm import TrafficLedger
from onefold.memory import Lane, MemoryLedger, Pool
from onefold.memory.nvme import Nvme, TierError, Transfer
from onefold.recipe import Recipe


class Beyond:
    """Attributes:
    host, disk: bytes held on the host for what rests off the device (and what is on its way), and on NVMe.
    moved: bytes "up" to the device and "down" to the host, "read" from and "written" to NVMe, with the seconds waited for them.
    pool: host buffers of whole pages, reused.
    broken: why nothing may go on: the disk failed in the middle of a step.
    """

    def __init__(self, recipe: Recipe, rank: int, device: torch.device) -> None:
        self.recipe, self.rank = recipe, rank
        self.host, self.disk = MemoryLedger(), MemoryLedger()
        self.moved = TrafficLedger()
        self.lane = Lane(device)
        self.pool = Pool(torch.device("cpu"), self.host, paged=True)
        self.broken: str | None = None
        self._store: Nvme | None = None

    @property
    def store(self) -> Nvme:
        """The files on NVMe of this rank; made when they are first asked for.

        Raises:
            TierError: a folder is not there, or cannot be written.
        """
        if self._store is None:
            self._store = Nvme(self.recipe.nvme, name=f"rank{self.rank}", threads=self.recipe.nvme_threads)
        return self._store

    @property
    def open_store(self) -> Nvme | None:
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

    def close(self) -> None:
        """Let go of buffers and files."""
        self.lane.wait()
        self.pool.drain()
        if self._store is not None:
            self._store.close()
