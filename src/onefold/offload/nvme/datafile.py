"""One file of bytes past the page cache.

    descriptor   opened with                   used for
    direct       O_DIRECT, where it is had     reads and writes, as long as the file system takes them
    plain        nothing special               space, sizes; reads and writes where it does not, each followed by dropping its pages

Not every file system that opens a file for direct transfers also takes them: the first that answers
EINVAL switches the file over, once.
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

from onefold.memory.tier_error import TierError

READ, WRITE, ALLOCATE = "read", "write", "allocate"
_ZEROS = 1 << 20
_NOT_HERE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


class DataFile:
    """A file that grows by whole extents and shrinks only when an allocation is taken back.

    Attributes:
        size: bytes that were allocated, all of them really on the disk.
        direct: whether transfers go past the page cache by themselves.
    """

    def __init__(self, path: Path, plain: int, direct: int, named: bool = True) -> None:
        self.path, self.size, self.direct = path, 0, direct >= 0
        self._plain, self._direct = plain, direct
        self._lock = threading.Lock()
        self._missed = not named  # whether it was said that the file has no name any more
        if not self.direct:
            self._buffered()

    @classmethod
    def create(cls, path: Path) -> DataFile:
        """A new file at `path`. Raises: OSError."""
        plain = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            return cls(path, plain, _open_direct(path))
        except OSError:
            os.close(plain)
            raise

    @classmethod
    def nameless(cls, folder: Path) -> DataFile:
        """A file that nothing is left of, however this process ends. Raises: OSError."""
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            plain = os.dup(file.fileno())
        return cls(
            folder / "(a file without a name)",
            plain,
            _open_direct(Path(f"/proc/self/fd/{plain}")),
            named=False,
        )

    def extend(self, nbytes: int) -> int:
        """Allocate `nbytes` more, really, and say where they begin. Raises: OSError, and then the
        file is as it was.
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
        """Give back what was allocated behind `size`."""
        self.size = size
        with contextlib.suppress(OSError):
            os.ftruncate(self._plain, size)

    def move(self, op: str, view: memoryview, offset: int, direct: bool) -> int:
        """Read into or write from `view` at `offset`, once: bytes moved, which may be fewer.
        Raises: OSError.
        """
        file = self._direct if direct else self._plain
        moved = os.preadv(file, [view], offset) if op == READ else os.pwritev(file, [view], offset)
        if not direct and moved and hasattr(os, "posix_fadvise"):
            if op == WRITE:
                os.fdatasync(file)  # pages that are not on the disk yet cannot be dropped
            os.posix_fadvise(file, offset, moved, os.POSIX_FADV_DONTNEED)
        return moved

    def flush(self) -> None:
        """Return when what was written is on the disk. Raises: OSError."""
        os.fsync(self._plain)

    def check(self) -> None:
        """Look whether the file is still whole; once it has lost its name, say so.

        Raises:
            TierError: somebody cut it short: what is missing would read as zeros once it has grown
                again.
        """
        before = self.size
        now = os.fstat(self._plain)
        size = min(before, self.size)  # it may be growing, or an allocation be taken back, just now
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
        """From now on through the page cache, each transfer's pages dropped after it."""
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
                # Nothing is read ahead: nobody would drop those pages
                os.posix_fadvise(self._plain, 0, 0, os.POSIX_FADV_RANDOM)
            elif hasattr(fcntl, "F_NOCACHE"):
                fcntl.fcntl(self._plain, fcntl.F_NOCACHE, 1)
        logging.getLogger("onefold").warning(
            "the file system at %s takes no direct transfers; reads and writes go through the page"
            " cache, which is slower.",
            self.path.parent,
        )


def _open_direct(path: Path) -> int:
    """A descriptor for direct transfers; -1 where there are none. Raises: OSError."""
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
    """Have the disk really set bytes aside. Raises: OSError."""
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
