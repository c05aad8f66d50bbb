"""The NVMe store of one process: regions on one disk or several, and the buffers to move them
through.

    store = Nvme(["/nvme0", "/nvme1"], name="rank0")
    moments = store.region("block.3.exp_avg", numel, torch.float32)         # allocated now: a full disk shows here, not later
    staging = store.buffer(numel * 4).view(torch.float32)[:numel]
    moments.write(0, staging).wait()
    under_way = moments.read(0, staging)                                     # ... compute ...
    under_way.wait()
    store.close()                                                            # nothing is left on the disks

What is written is for this run only: nothing is flushed, and nothing outlives the process.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from onefold.memory.tier_error import failure
from onefold.offload.nvme.buffer import PAGE, page_buffer, rounded
from onefold.offload.nvme.datafile import ALLOCATE, READ, WRITE
from onefold.offload.nvme.files import Folder, as_paths
from onefold.offload.nvme.io import Fault, Io
from onefold.offload.nvme.region import Lane, Region, lane_lengths


class Nvme:
    """Regions of elements on disk, read and written past the page cache by a few threads. One a
    process.

    Attributes:
        name: as in messages and in the folders' names.
        folders: where the bytes lie, one for each path.
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
        """Make a folder of its own on each path, after removing what killed processes have left
        there.

        Args:
            paths: folders that are there already, best each on a disk of its own; regions are
                striped over them.
            name: letters, digits, '.', '_' and '-'; need not be unique.
            threads: reads and writes under way at a time.
            stripe: bytes on one path before the next one's turn; a multiple of PAGE.
            block: bytes of one read or write at most; a multiple of PAGE.

        Raises:
            ValueError: an argument is out of range.
            TierError: a path is not there or cannot be written.
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
        """Bytes allocated on the disks now, freed regions' space included: it stays until the store
        is closed.
        """
        return sum(folder.data.size for folder in self._folders)

    @property
    def read_bytes(self) -> int:
        """Bytes read since the start; whole pages, as the disks saw them."""
        return self._io.moved[READ]

    @property
    def written_bytes(self) -> int:
        """Bytes written since the start; whole pages, as the disks saw them."""
        return self._io.moved[WRITE]

    @property
    def busy_seconds(self) -> float:
        """Seconds since the start in which at least one read or write was under way."""
        return self._io.busy_seconds

    @property
    def direct(self) -> bool:
        """Whether all folders' file systems take transfers past the page cache. Where not, pages
        are dropped after each transfer.
        """
        return all(folder.data.direct for folder in self._folders)

    @property
    def fault(self) -> Fault | None:
        """For tests: asked ahead of each read and write, see `io.Fault`, and ahead of each
        allocation (operation "allocate", offset 0).
        """
        return self._io.fault

    @fault.setter
    def fault(self, fault: Fault | None) -> None:
        self._io.fault = fault

    def region(self, name: str, numel: int, dtype: torch.dtype) -> Region:
        """Room for `numel` elements of `dtype`; zeros, or what a freed region of the same size has
        left there.

        Raises:
            ValueError: `numel` is negative.
            TierError: the disk is full, or the store closed.
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
        """Take a region's space back for a later region of the same size, once its reads and writes
        are over. Twice is once.
        """
        with self._lock:
            if region.release():
                self._spare[region.capacity].append(region.lanes)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Bytes (uint8, one dimension, `nbytes` rounded up to PAGE) for reads and writes. Not kept
        here: it goes with its last view.

        Raises:
            ValueError: `nbytes` is negative.
            MemoryError: the host has no such room.
        """
        return page_buffer(nbytes)

    def close(self) -> None:
        """Return when what is under way is over, the threads are gone and the folders removed.
        Again, or in a forked child: nothing.
        """
        self._end()

    def _allocate(self, name: str, capacity: int) -> tuple[Lane, ...]:
        """Extents on the files, beginning with another file each time: small regions are spread
        like the stripes of large ones.
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
                raise failure(
                    f"allocating {nbytes:,} bytes for region {name!r} in", file.path, error
                ) from None
        return tuple(lanes)


def _end(io: Io, folders: list[Folder], process: int) -> None:
    """Close what a store had. It may be called by the collector of garbage, in any thread."""
    if os.getpid() != process:  # a forked child: all this is its parent's
        return
    if io.is_own_thread():
        threading.Thread(
            target=_end, args=(io, folders, process), name=f"onefold-nvme-{io.name}-end"
        ).start()
        return
    io.close()
    for folder in folders:
        folder.remove()
