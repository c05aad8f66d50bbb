"""A private, locked folder on a disk that leaves nothing behind.

    /nvme/onefold-rank0-4711-9f3c21aa/lock     held by flock while the process lives, however it ends
    /nvme/onefold-rank0-4711-9f3c21aa/data     the bytes

    being made    mkdir, `lock` made, locked and marked, `data` made
    in use        `lock` is held
    closed        data, lock and folder removed, in this order
    left behind   by a process that was killed: `lock` can be taken. The next start on the same path takes it, then removes the three

A folder without the mark in `lock` may be one that is being made, so it is left alone for a minute.
Only folders with our name, lock and mark are removed, and in them only the files that we make. If
such a folder has other files, it stays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from onefold.memory import TierError, failure
from onefold.offload.nvme.datafile import DataFile

LOCK, DATA = "lock", "data"
MARK = b"onefold nvme store"
#: Seconds. A younger folder without a marked lock may be one that is being made.
YOUNG = 60.0
_NAME = re.compile(r"^[A-Za-z0-9._-]+$")
_OURS = re.compile(r"^onefold-[A-Za-z0-9._-]+-\d+-[0-9a-f]{8}$")
_TRIES = 8


class Folder:
    """A locked folder with one data file.

    Attributes:
        path: the folder. data: its file.
    """

    def __init__(self, parent: Path, name: str) -> None:
        """Make the folder in `parent`, after removing stale folders of crashed runs there.

        Raises:
            ValueError: `name` cannot be a part of a file's name.
            TierError: `parent` does not exist, or is not writable.
        """
        if not _NAME.match(name):
            raise ValueError(
                f"{name!r} cannot be a part of a folder's name; use letters, digits, '.', '_' and"
                " '-'."
            )
        check_folder(parent)
        reclaim(parent)
        self._lock = -1
        for _ in range(_TRIES):
            self.path = parent / f"onefold-{name}-{os.getpid()}-{secrets.token_hex(4)}"
            try:
                if self._make():
                    break
            except OSError as error:
                self._remove_files()
                what = "making the NVMe folder"
                raise failure(what, self.path, error) from None
            self._remove_files()
        else:
            raise TierError(
                f"no folder can be made in {parent}: it disappeared {_TRIES} times. Name another"
                f" folder in nvme=."
            )
        _close_in_children(self)

    def _make(self) -> bool:
        """Make the folder; return False if another start took it for a stale one and removed it.
        Raises: OSError.
        """
        os.mkdir(self.path, 0o700)
        try:
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            with _no_locks_here():
                fcntl.flock(self._lock, fcntl.LOCK_EX)  # another start may look at it for a moment
            os.pwrite(
                self._lock,
                MARK + f"\nprocess {os.getpid()} on {socket.gethostname()}\n".encode(),
                0,
            )
            if not _is_at(self._lock, self.path / LOCK):
                return False
            self.data = DataFile.create(self.path / DATA)
        except FileNotFoundError:
            return False
        return True

    def remove(self) -> None:
        """Remove the folder. Not for a forked child: the folder belongs to its parent."""
        self._remove_files()
        self.data.close()

    def abandon(self) -> None:
        """Close the descriptors that a fork has copied. They would hold the lock and the disk space
        after the parent has ended.
        """
        self.data.close()
        if self._lock >= 0:
            os.close(self._lock)  # keeps the parent's lock; unlocking would release it
            self._lock = -1

    def _remove_files(self) -> None:
        _remove_ours(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def as_paths(paths: Sequence[str | Path] | str | Path) -> list[Path]:
    """Return one or several folders as a list. Raises: ValueError: none was given."""
    given = [Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
    if not given:
        raise ValueError("no folder was given for states on NVMe; name at least one in nvme=.")
    return given


def check_folder(path: Path) -> None:
    """Check that the folder exists. Raises: TierError: it does not.

    The folder is not created: with a mistyped mount point it would be on another disk.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "is not there"
        raise TierError(
            f"the folder {path} for states on NVMe {what}. Create it on the disk that is meant,"
            f" or name another one in nvme=."
        )


def reclaim(parent: Path) -> list[Path]:
    """Remove stale folders of crashed runs from `parent` and return their paths. Several processes
    may do so at once.
    """
    removed = []
    for path in sorted(parent.glob("onefold-*")):
        if not _OURS.match(path.name) or path.is_symlink():
            continue
        with contextlib.suppress(OSError):  # another user's, or another process removed it
            if _remove_if_dead(path):
                removed.append(path)
                logging.getLogger("onefold").info(
                    "removed %s, which a process that was killed had left", path
                )
    return removed


def _remove_if_dead(path: Path) -> bool:
    """Remove the folder if its process is dead; return whether it is gone. Raises: OSError."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        if time.time() - path.stat().st_mtime < YOUNG:
            return False
        os.rmdir(path)  # removes only an empty folder: without a lock we know nothing else
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mark = os.pread(lock, len(MARK), 0)
        unmarked = not mark and time.time() - os.fstat(lock).st_mtime >= YOUNG
        if (mark == MARK or unmarked) and _is_at(lock, path / LOCK):
            _remove_ours(path)
            return not path.exists()
        return False
    finally:
        os.close(lock)


def _remove_ours(path: Path) -> None:
    """Remove the files that we make, and the folder if nothing else is in it."""
    for name in (DATA, LOCK):
        with contextlib.suppress(OSError):
            os.unlink(path / name)
    with contextlib.suppress(OSError):
        os.rmdir(path)


def _is_at(file: int, path: Path) -> bool:
    """Return whether the open file is still at `path`."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _no_locks_here() -> Iterator[None]:
    """Accept a file system without locks. There no folder is ever reclaimed, since that needs the
    lock.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (
            errno.ENOLCK,
            errno.ENOSYS,
            errno.EOPNOTSUPP,
            errno.ENOTSUP,
            errno.EINVAL,
        ):
            raise


def _close_in_children(folder: Folder) -> None:
    living = weakref.ref(folder)

    def close() -> None:
        mine = living()
        if mine is not None:
            mine.abandon()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=close)
