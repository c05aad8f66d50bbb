"""The NVMe tier: regions of elements in one file for each folder, read and written past the page cache.

    store = Nvme(["/nvme0", "/nvme1"], name="rank0")
    moments = store.region("block.3.exp_avg", numel, torch.float32)     # allocated now: a full disk shows here, not later
    moments.write(0, staging).wait()
    under_way = moments.read(0, staging)                                # ... compute ...
    under_way.wait()
    store.close()                                                       # nothing is left on the disks

The data is for this run only. It is never flushed. Its files have no name, so nobody else can change
them, and the system frees their space when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from onefold.memory import TierError, failure

#: Bytes. Offsets, addresses and lengths of direct transfers are multiples of it.
PAGE = 4096
#: Bytes of one system call at most.
BLOCK = 8 << 20
READ, WRITE = "read", "write"


# -- files -----------------------------------------------------------------------------------------


class DataFile:
    """A file without a name in `folder`, which grows and never shrinks.

    Its transfers are direct (O_DIRECT) if the file system takes them. Else they go through the page
    cache, and their pages are dropped after each. Some file systems take the flag and then refuse
    transfers: the first one that fails with EINVAL takes it away for good.

    Attributes:
        size: bytes allocated, all of them backed by disk space.
    """

    def __init__(self, folder: Path) -> None:
        """Raises: TierError: `folder` does not exist, or is not writable."""
        check_folder(folder)
        self.folder, self.size, self._direct = folder, 0, True
        try:
            self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise failure("making a file for states on NVMe in", folder, error) from None
        try:
            fcntl.fcntl(self.file, fcntl.F_SETFL, os.O_RDWR | os.O_DIRECT)
        except OSError:
            self._give_up_direct()
        weakref.finalize(self, self.file.close)
        living = weakref.ref(self)

        def close_in_child() -> None:  # else the child holds the space after its parent has ended
            if (mine := living()) is not None:
                mine.file.close()

        os.register_at_fork(after_in_child=close_in_child)

    def extend(self, nbytes: int) -> int:
        """Allocate `nbytes` more of disk space and return their offset.

        Raises:
            OSError: the disk is full; the file is then unchanged.
        """
        begin = self.size
        try:
            if nbytes:
                os.posix_fallocate(self.file.fileno(), begin, nbytes)
        except OSError:
            with contextlib.suppress(OSError):
                self.file.truncate(begin)
            raise
        self.size += nbytes
        return begin

    def move(self, op: str, what: str, view: memoryview, offset: int) -> None:
        """Read into or write from all of `view`, at `offset`; then let go of it.

        Raises:
            TierError: it failed. `what` names the region in the message.
        """
        with view:  # the pool takes the buffer back once nothing refers to it
            done, total = 0, len(view)
            doing = (
                f"{'reading' if op == READ else 'writing'} {total:,} bytes of region {what!r} in"
            )
            while done < total:
                direct = self._direct
                try:
                    moved = self._once(op, view[done:], offset + done, direct)
                except OSError as error:
                    if direct and error.errno == errno.EINVAL:
                        self._give_up_direct()
                        continue
                    raise failure(doing, self.folder, error) from None
                if done + moved < total:
                    moved -= moved % PAGE  # the next call must begin on a page
                if not moved:
                    raise TierError(
                        f"{doing} {self.folder} ended after {done:,}, as if the file ended there,"
                        " which it does not. Name another disk in nvme=."
                    )
                done += moved

    def _once(self, op: str, view: memoryview, offset: int, direct: bool) -> int:
        """Make one system call; return the bytes moved, which may be fewer than the view has."""
        file = self.file.fileno()
        moved = os.preadv(file, [view], offset) if op == READ else os.pwritev(file, [view], offset)
        if not direct:
            if op == WRITE:
                os.fdatasync(file)  # pages that are not on the disk yet cannot be dropped
            os.posix_fadvise(file, offset, moved, os.POSIX_FADV_DONTNEED)
        return moved

    def _give_up_direct(self) -> None:
        """Use the page cache from now on, and drop the pages after each transfer."""
        self._direct = False
        fcntl.fcntl(self.file, fcntl.F_SETFL, os.O_RDWR)
        # No readahead by the kernel: its pages would never be dropped
        os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        logging.getLogger("onefold").warning(
            "the file system at %s takes no direct transfers; reads and writes go through the page"
            " cache, which is slower.",
            self.folder,
        )


def check_folder(path: Path) -> None:
    """Check that the folder exists. Raises: TierError: it does not.

    The folder is not created: with a mistyped mount point it would be on another disk.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "is not there"
        raise TierError(
            f"the folder {path} for states on NVMe {what}. Create it on the disk that is meant,"
            " or name another one in nvme=."
        )


# -- regions ---------------------------------------------------------------------------------------


class Transfer:
    """A read or write that is under way."""

    def __init__(self, pieces: Sequence[Future[None]] = ()) -> None:
        self._pieces = pieces

    def done(self) -> bool:
        """Return whether the transfer has ended, with success or not."""
        return all(piece.done() for piece in self._pieces)

    def settle(self) -> None:
        """Wait for the end of the transfer, and ignore failure."""
        wait(self._pieces)

    def wait(self) -> None:
        """Wait for the end of the transfer.

        Raises:
            TierError: it failed (raised again on every later call). After a failed read the
                contents of the tensor are undefined.
        """
        self.settle()
        for piece in self._pieces:
            # A new error each time: what is raised knows the callers, and the region keeps the old one
            if (error := piece.exception()) is not None:
                raise TierError(str(error))


class Region:
    """`numel` elements of `dtype` on disk. Made by `Nvme.region`.

    [Note: what overlaps waits] If two transfers of one region share bytes and one of them is a
    write, the later one begins after the earlier one has ended. A well written pipeline never runs
    into this wait. Another one still never reads half-written bytes.

    Attributes:
        name: for messages.
        nbytes: numel × bytes of an element.
    """

    def __init__(self, store: Any, name: str, numel: int, dtype: torch.dtype) -> None:
        self.name, self.numel, self.dtype = name, numel, dtype
        self.nbytes = numel * dtype.itemsize
        self._store = store
        self._file, self._begin = store.allocate(name, _rounded(self.nbytes))
        self._lock = threading.RLock()
        self._under_way: list[tuple[int, int, str, Transfer]] = []

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether all of the region may be read into `tensor`: it begins on a page, and holds
        whole pages.
        """
        return not tensor.data_ptr() % PAGE and not self.nbytes % PAGE

    def read(self, start: int, into: torch.Tensor) -> Transfer:
        """Start to read elements [start, start + into.numel()) into `into`, which nobody may use
        until the transfer has ended.

        Args:
            start: first element; its byte offset must be a multiple of PAGE.
            into: contiguous host tensor of the region's dtype that begins on a page. It ends at a
                multiple of PAGE bytes, or at the region's end: there its storage must reach to the
                next page, and the bytes up to it are overwritten too.

        Raises:
            AssertionError: a condition is not met. Data is never copied to make it fit.
            TierError: the store is closed.
        """
        return self._move(READ, start, into)

    def write(self, start: int, source: torch.Tensor) -> Transfer:
        """Start to write `source` to elements [start, start + source.numel()). Nobody may change
        `source` until the transfer has ended.

        Args and Raises: as for `read`.
        """
        return self._move(WRITE, start, source)

    def _move(self, op: str, start: int, tensor: torch.Tensor) -> Transfer:
        lo, nbytes = start * self.dtype.itemsize, _rounded(tensor.nbytes)
        memory = self._memory(start, tensor)
        with self._lock:
            self._under_way = [other for other in self._under_way if not other[-1].done()]
            for other_lo, other_hi, other_op, transfer in self._under_way:
                if other_lo < lo + nbytes and lo < other_hi and WRITE in (op, other_op):
                    transfer.settle()  # [Note: what overlaps waits]
            transfer = self._store.start(op, self.name, self._file, memory, self._begin + lo)
            self._under_way.append((lo, lo + nbytes, op, transfer))
        return transfer

    def _memory(self, start: int, tensor: torch.Tensor) -> Any:
        """Return the whole pages of `tensor`."""
        end, size = start + tensor.numel(), self.dtype.itemsize
        assert tensor.dtype == self.dtype and tensor.is_contiguous() and 0 <= start <= end
        assert end == self.numel or (end < self.numel and not tensor.nbytes % PAGE)
        assert not (start * size % PAGE or (tensor.numel() and tensor.data_ptr() % PAGE))
        first, nbytes = int(tensor.storage_offset()) * size, _rounded(tensor.nbytes)
        whole = torch.empty(0, dtype=torch.uint8, device="cpu")
        return whole.set_(tensor.untyped_storage(), first, (nbytes,), (1,))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class Nvme:
    """Regions of elements on disk, read and written by a few threads. One per process.

    The system calls release the GIL, so a handful of threads keeps a disk's queue filled while the
    caller computes.

    Attributes:
        files: one for each path. Each region lies in one of them, the least filled.
    """

    def __init__(self, paths: Sequence[str | Path], *, name: str, threads: int = 4) -> None:
        """Make a file in each folder.

        Args:
            paths: existing folders, ideally each on its own disk.
            name: for messages.
            threads: number of reads and writes under way at a time.

        Raises:
            TierError: a path is missing or is not writable.
        """
        self.name, self.files = name, [DataFile(Path(path)) for path in paths]
        self._process, self._lock, self._closed = os.getpid(), threading.Lock(), False
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"onefold-nvme-{name}")

    def region(self, name: str, numel: int, dtype: torch.dtype) -> Region:
        """Allocate a region of `numel` elements of `dtype`, all zeros.

        Raises:
            TierError: the disk is full, or the store is closed.
        """
        self._check_open()
        return Region(self, name, numel, dtype)

    def allocate(self, name: str, nbytes: int) -> tuple[DataFile, int]:
        """Return where `nbytes` of a new region begin: (file, offset). Raises: TierError."""
        with self._lock:
            file = min(self.files, key=lambda file: file.size)
            try:
                return file, file.extend(nbytes)
            except OSError as error:
                what = f"allocating {nbytes:,} bytes for region {name!r} in"
                raise failure(what, file.folder, error) from None

    def start(
        self, op: str, what: str, file: DataFile, whole: torch.Tensor, offset: int
    ) -> Transfer:
        """Start to move the bytes `whole` from or to `offset` of a file.

        Raises:
            TierError: the store is closed, or this is a forked child of the process that made it.
        """
        self._check_open()
        pieces: list[Future[None]] = []
        with memoryview(whole.numpy()) as view:  # type: ignore[arg-type]  # Python 3.11's typing does not know arrays for buffers
            try:
                for at in range(0, len(view), BLOCK):
                    cut = view[at : at + BLOCK]
                    pieces.append(self._pool.submit(file.move, op, what, cut, offset + at))
            except RuntimeError:  # another thread closes the store, or the interpreter ends
                wait(pieces)
                raise self._refusal() from None
        return Transfer(pieces)

    def _check_open(self) -> None:
        if self._closed:
            raise self._refusal()
        if os.getpid() != self._process:
            raise TierError(
                f"the NVMe store {self.name!r} belongs to process {self._process}; this is a child"
                " that was forked from it and cannot use it. Make a store of its own in the child,"
                " or start the child with spawn."
            )

    def _refusal(self) -> TierError:
        return TierError(f"the NVMe store {self.name!r} is closed; nothing moves any more.")

    def close(self) -> None:
        """Wait for all transfers, end the threads and free the space. A second call, or a call in a
        forked child, does nothing. The garbage collector may call it in any thread.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        # One of its threads cannot wait for itself, and leaves the files to their last transfers
        waits = threading.current_thread() not in self._pool._threads
        self._pool.shutdown(wait=waits)
        for file in self.files if waits else ():
            file.file.close()


# -- before a run ----------------------------------------------------------------------------------


def refuse_unless_fits(paths: Sequence[str | Path], need: int, what: str) -> None:
    """Raise if `need` bytes, divided among `paths`, do not fit.

    Folders on one file system share its free space.

    Args:
        need: bytes of all ranks of this host together.
        what: the subject of the message.

    Raises:
        TierError: the bytes do not fit, or a path is missing.
    """
    together: dict[int, list[Path]] = defaultdict(list)
    for path in map(Path, paths):
        check_folder(path)
        together[path.stat().st_dev].append(path)
    for folders in together.values():
        share, free = need * len(folders) // len(paths), shutil.disk_usage(folders[0]).free
        if share > free:
            raise TierError(
                f"{what}: {share:,} bytes are needed at {' and '.join(map(str, folders))}, where"
                f" {free:,} are free. Free {share - free:,} bytes there, name larger or more disks"
                " in nvme=, or store more on the host or the device."
            )


def give_large_blocks_back() -> None:
    """Have the C library return freed blocks of 128 KiB and more to the system.

    glibc maps each large block by itself, but each free of such a block raises the threshold of
    "large" to its size, up to 32 MiB. Later blocks below the threshold come from the heap, which
    shrinks only from its end: a model that allocates and frees tensors of such sizes leaves it full
    of holes, several times the memory in use. A threshold that is set explicitly stays.
    """
    settled = "MALLOC_MMAP_THRESHOLD_" in os.environ or "malloc.mmap_threshold" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    if sys.platform == "linux" and not settled:
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD of <malloc.h>
