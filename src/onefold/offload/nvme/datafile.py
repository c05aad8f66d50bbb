"""One file of bytes, accessed past the page cache.

    descriptor   opened with                   used for
    direct       O_DIRECT, if available        reads and writes, as long as the file system accepts them
    plain        nothing special               space and sizes; reads and writes without direct I/O, each followed by dropping its pages

Some file systems open a file with O_DIRECT and then refuse direct transfers. The first transfer
that fails with EINVAL switches the file to the plain descriptor for good.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from onefold.memory import TierError

READ, WRITE, ALLOCATE = "read", "write", "allocate"
_ZEROS = 1 << 20
_NOT_HERE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


class DataFile:
    """A file that grows by whole extents and shrinks only when an allocation is taken back.

    Attributes:
        size: bytes allocated, all of them backed by disk space.
        direct: whether transfers use direct I/O.
    """

    def __init__(self, path: Path, plain: int, direct: int, named: bool = True) -> None:
        self.path, self.size, self.direct = path, 0, direct >= 0
        self._plain, self._direct = plain, direct
        self._lock = threading.Lock()
        self._missed = not named  # whether the loss of the file's name was reported
        if not self.direct:
            self._buffered()

    @classmethod
    def create(cls, path: Path) -> DataFile:
        """Create a new file at `path`. Raises: OSError."""
        plain = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            return cls(path, plain, _open_direct(path))
        except OSError:
            os.close(plain)
            raise

    @classmethod
    def nameless(cls, folder: Path) -> DataFile:
        """Create a file without a name, which disappears however this process ends.
        Raises: OSError.
        """
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            plain = os.dup(file.fileno())
        return cls(
            folder / "(a file without a name)",
            plain,
            _open_direct(Path(f"/proc/self/fd/{plain}")),
            named=False,
        )

    def extend(self, nbytes: int) -> int:
        """Allocate `nbytes` more of disk space and return their offset. Raises: OSError; the file
        is then unchanged.
        """
        begin = self.size
        try:
            _allocate(self._plain, begin, nbytes)
        except OSError:
            self.cut_back(begin)
            raise
        self.size = begin + nbytes
        return begin

    def cut_back(self, size: int) -> None:
        """Give back the disk space behind byte `size`."""
        self.size = size
        with contextlib.suppress(OSError):
            os.ftruncate(self._plain, size)

    def move(self, op: str, view: memoryview, offset: int, direct: bool) -> int:
        """Read into or write from `view` at `offset` with one system call. Return the bytes moved,
        which may be fewer than the view has. Raises: OSError.
        """
        file = self._direct if direct else self._plain
        moved = os.preadv(file, [view], offset) if op == READ else os.pwritev(file, [view], offset)
        if not direct and moved and hasattr(os, "posix_fadvise"):
            if op == WRITE:
                os.fdatasync(file)  # pages that are not on the disk yet cannot be dropped
            os.posix_fadvise(file, offset, moved, os.POSIX_FADV_DONTNEED)
        return moved

    def flush(self) -> None:
        """Wait until all writes are on the disk. Raises: OSError."""
        os.fsync(self._plain)

    def check(self) -> None:
        """Check that the file is still whole, and warn once if its name was removed.

        Raises:
            TierError: somebody truncated the file. The missing bytes would read as zeros after it
                has grown again.
        """
        before = self.size
        now = os.fstat(self._plain)
        size = min(before, self.size)  # another thread may extend it or cut it back just now
        if now.st_size < size:
            raise TierError(
                f"{self.path} was cut short to {now.st_size:,} bytes by somebody else while"
                f" {size:,} are in use: what was in it is lost. Start again from the last"
                f" checkpoint, and keep clean-up jobs away from {self.path.parent.parent}."
            )
        if now.st_nlink == 0 and not self._missed:
            self._missed = True
            logging.getLogger("onefold").warning(
                "%s was removed by somebody else; nothing is lost, since it is open, but keep"
                " clean-up jobs away from it.",
                self.path,
            )

    def give_up_direct(self) -> None:
        """Use the page cache from now on, and drop the pages after each transfer."""
        with self._lock:
            if not self.direct:
                return
            self.direct = False
        self._buffered()

    def close(self) -> None:
        for file in (self._direct, self._plain):
            if file >= 0:
                with contextlib.suppress(OSError):
                    os.close(file)
        self._direct = self._plain = -1

    def _buffered(self) -> None:
        with contextlib.suppress(OSError):
            if hasattr(os, "posix_fadvise"):
                # No readahead by the kernel: its pages would never be dropped
                os.posix_fadvise(self._plain, 0, 0, os.POSIX_FADV_RANDOM)
            elif hasattr(fcntl, "F_NOCACHE"):
                fcntl.fcntl(self._plain, fcntl.F_NOCACHE, 1)
        logging.getLogger("onefold").warning(
            "the file system at %s takes no direct transfers; reads and writes go through the page"
            " cache, which is slower.",
            self.path.parent,
        )


def _open_direct(path: Path) -> int:
    """Return a descriptor for direct transfers; -1 if there are none. Raises: OSError."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return -1
    try:
        return os.open(path, os.O_RDWR | flag)
    except OSError as error:
        if error.errno not in _NOT_HERE and not str(path).startswith("/proc/"):
            raise
        return -1


def _allocate(file: int, begin: int, nbytes: int) -> None:
    """Reserve disk space for `nbytes` bytes from `begin` on. Raises: OSError."""
    allocate: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)
    if nbytes == 0:
        return
    if allocate is not None:
        try:
            allocate(file, begin, nbytes)
            return
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
    zeros = bytes(min(_ZEROS, nbytes))
    while nbytes > 0:
        written = os.pwrite(file, zeros[: min(len(zeros), nbytes)], begin)
        begin, nbytes = begin + written, nbytes - written
