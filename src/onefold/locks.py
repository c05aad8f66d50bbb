"""Files that a process locks. The system lets go of the lock when the process ends, also after a crash.

| file                              | locked by                                 |
|-----------------------------------|-------------------------------------------|
| `owner` of an unfinished folder   | the process that writes the folder        |
| `.lock` of a run's checkpoints    | the first rank of the run                 |
| `run.lock` of an output folder    | all processes of the run, which share it  |

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path


class FileLock:
    """A lock file, open and not locked yet.

    Attributes:
        known: False if the file system has no locks. The lock then excludes nobody.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.known, self._file, self._process = path, True, -1, os.getpid()
        # Not through a link, which may lead to any file: the holder writes into it
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.open(path, flags, 0o644)

    def take(self, shared: bool = False) -> bool:
        """Take the lock, or make it shared. Returns False if another process is in the way."""
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            self.known = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
            return not self.known
        return True

    def read(self) -> bytes:
        return os.pread(self._file, 1 << 16, 0)

    def write(self, data: bytes) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, data, 0)

    def is_there(self) -> bool:
        """Return whether this is still the file at its path: whoever ends may have removed it."""
        try:
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        except OSError:
            return False

    def release(self) -> None:
        """Unlock and close the file. A forked child has it open too: it closes its copy, but must not
        unlock the file for its parent.
        """
        file, self._file = self._file, -1
        if file >= 0:
            if os.getpid() == self._process:
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    __del__ = release


def hold(path: Path) -> FileLock:
    """Lock a file for this process alone, and write there who holds it.
    Raises: BlockingIOError: another process holds it; the text names that process.
    """
    lock = FileLock(path)
    if not lock.take():
        holder = lock.read().decode(errors="replace").strip()
        lock.release()
        raise BlockingIOError(holder or "another process")
    if lock.known:
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return lock
