"""The NVMe store of one process: regions on one disk or several, and buffers for their transfers.

    store = Nvme(["/nvme0", "/nvme1"], name="rank0")
    moments = store.region("block.3.exp_avg", numel, torch.float32)         # allocated now: a full disk shows here, not later
    staging = store.buffer(numel * 4).view(torch.float32)[:numel]
    moments.write(0, staging).wait()
    under_way = moments.read(0, staging)                                     # ... compute ...
    under_way.wait()
    store.close()                                                            # nothing is left on the disks

The data is for this run only. It is never flushed, and it does not outlive the process.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from onefold.memory import failure
from onefold.offload.nvme.buffer import PAGE, page_buffer, rounded
from onefold.offload.nvme.datafile import ALLOCATE, READ, WRITE
from onefold.offload.nvme.files import Folder, as_paths
from onefold.offload.nvme.io import Fault, Io
from onefold.offload.nvme.region import Lane, Region, lane_lengths

_substitute: ContextVar[Callable[[], Any] | None] = ContextVar("what makes stores", default=None)


@contextlib.contextmanager
def stores_from(make: Callable[[], Any]) -> Iterator[None]:
    """Let `make` make the stores of models that are sharded inside the context: a simulation has no
    disk.
    """
    before = _substitute.set(make)
    try:
        yield
    finally:
        _substitute.reset(before)


def substitute() -> Callable[[], Any] | None:
    """Return what makes stores in place of `Nvme`; None outside of `stores_from`."""
    return _substitute.get()


class Nvme:
    """Regions of elements on disk, read and written past the page cache by a few threads. One per
    process.

    Attributes:
        name: appears in messages and in the folders' names.
        folders: the folders with the data, one for each path.
    """

    def __init__(
        self,
        paths: Sequence[str | Path] | str | Path,
        *,
        name: str,
        threads: int = 4,
        stripe: int = 4 << 20,
        block: int = 8 << 20,
    ) -> None:
        """Make a private folder on each path, after removing stale folders of crashed runs there.

        Args:
            paths: existing folders, ideally each on its own disk. Regions are striped over them.
            name: letters, digits, '.', '_' and '-'; need not be unique.
            threads: number of reads and writes under way at a time.
            stripe: bytes of a region on one path before the next path follows; a multiple of PAGE.
            block: maximum bytes of one read or write; a multiple of PAGE.

        Raises:
            ValueError: an argument is out of range.
            TierError: a path is missing or is not writable.
        """
        given = as_paths(paths)
        if threads < 1:
            raise ValueError(f"{threads} threads were asked for to read and write; give 1 or more.")
        for what, nbytes in (("stripe", stripe), ("block", block)):
            if nbytes < PAGE or nbytes % PAGE:
                raise ValueError(f"{what}={nbytes:,} bytes; give a multiple of {PAGE:,}.")
        self.name, self._stripe, self._block = name, stripe, block
        folders: list[Folder] = []
        try:
            for path in given:
                folders.append(Folder(path, name))
        except BaseException:
            for folder in folders:
                folder.remove()
            raise
        self._folders = folders
        self._io = Io(name, threads)
        self._lock = threading.Lock()
        self._spare: dict[int, list[tuple[Lane, ...]]] = defaultdict(list)  # by capacity
        self._turn = 0
        self._end = weakref.finalize(self, _end, self._io, folders, os.getpid())

    def __enter__(self) -> Nvme:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folders(self) -> list[Path]:
        return [folder.path for folder in self._folders]

    @property
    def nbytes(self) -> int:
        """Bytes allocated on the disks now. The space of freed regions is included: it is reused,
        and returned to the disk when the store is closed.
        """
        return sum(folder.data.size for folder in self._folders)

    @property
    def read_bytes(self) -> int:
        """Bytes read since the start, in whole pages."""
        return self._io.moved[READ]

    @property
    def written_bytes(self) -> int:
        """Bytes written since the start, in whole pages."""
        return self._io.moved[WRITE]

    @property
    def busy_seconds(self) -> float:
        """Seconds since the start during which at least one read or write was under way."""
        return self._io.busy_seconds

    @property
    def direct(self) -> bool:
        """Whether the file systems of all folders accept direct I/O. Without it, pages are dropped
        from the page cache after each transfer.
        """
        return all(folder.data.direct for folder in self._folders)

    @property
    def fault(self) -> Fault | None:
        """For tests: called before each read and write (see `io.Fault`), and before each allocation
        (operation "allocate", offset 0).
        """
        return self._io.fault

    @fault.setter
    def fault(self, fault: Fault | None) -> None:
        self._io.fault = fault

    def region(self, name: str, numel: int, dtype: torch.dtype) -> Region:
        """Allocate a region of `numel` elements of `dtype`. It holds zeros, or the old data of a
        freed region of the same size.

        Raises:
            ValueError: `numel` is negative.
            TierError: the disk is full, or the store is closed.
        """
        if numel < 0:
            raise ValueError(f"region {name!r}: {numel:,} elements were asked for; give 0 or more.")
        self._io.check_open()
        capacity = rounded(numel * dtype.itemsize)
        with self._lock:
            spare = self._spare[capacity]
            lanes = spare.pop() if spare else self._allocate(name, capacity)
        return Region(self._io, name, numel, dtype, lanes, self._stripe, self._block)

    def free(self, region: Region) -> None:
        """Wait for a region's transfers, and keep its space for a later region of the same size. A
        second call does nothing.
        """
        with self._lock:
            if region.release():
                self._spare[region.capacity].append(region.lanes)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return a buffer for reads and writes: uint8, [`nbytes` rounded up to PAGE].

        The store does not refer to it. It is freed with its last view.

        Raises:
            ValueError: `nbytes` is negative.
            MemoryError: the host has not enough memory.
        """
        return page_buffer(nbytes)

    def close(self) -> None:
        """Wait for all transfers, end the threads and remove the folders. A second call, or a call
        in a forked child, does nothing.
        """
        self._end()

    def _allocate(self, name: str, capacity: int) -> tuple[Lane, ...]:
        """Allocate extents on the files. Each region begins on the next file, which spreads small
        regions evenly.
        """
        files = [folder.data for folder in self._folders]
        files = files[self._turn :] + files[: self._turn]
        self._turn = (self._turn + 1) % len(files)
        lanes: list[Lane] = []
        for file, nbytes in zip(
            files, lane_lengths(capacity, len(files), self._stripe), strict=True
        ):
            try:
                given = (
                    fault(ALLOCATE, name, 0, nbytes) if (fault := self.fault) is not None else None
                )
                if isinstance(given, OSError):
                    raise given
                lanes.append(Lane(file, file.extend(nbytes), nbytes))
            except OSError as error:
                for lane in lanes:
                    lane.file.cut_back(lane.begin)
                what = f"allocating {nbytes:,} bytes for region {name!r} in"
                raise failure(what, file.path, error) from None
        return tuple(lanes)


def _end(io: Io, folders: list[Folder], process: int) -> None:
    """Close a store's threads and folders. The garbage collector may call it in any thread."""
    if os.getpid() != process:  # a forked child: everything belongs to its parent
        return
    if io.is_own_thread():
        threading.Thread(
            target=_end, args=(io, folders, process), name=f"onefold-nvme-{io.name}-end"
        ).start()
        return
    io.close()
    for folder in folders:
        folder.remove()
