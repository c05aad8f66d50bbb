"""Files that a process locks. The system lets go of the lock when the process ends, also after a crash.

| file                              | locked by                                                            |
|-----------------------------------|----------------------------------------------------------------------|
| `owner` of an unfinished folder   | the process that writes the folder                                   |
| `.lock` of a run's checkpoints    | the first rank of the run                                            |
| `run.lock` of an output folder    | the command that starts the ranks; under torchrun, the first rank    |

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path


class Lock:
    """A lock file that one process at a time holds. Who holds it is written there.

    Args:
        about: more to say of this process than its number and its machine.

    Attributes:
        known: False if the file system has no locks. The lock then excludes nobody.

    Raises:
        BlockingIOError: another process holds it; the text names that process.
    """

    def __init__(self, path: Path, about: str = "") -> None:
        self.path, self.known, self._file, self._process = path, True, -1, os.getpid()
        while not self._taken():
            self.release()
        if self.known:
            text = f"process {self._process} on {socket.gethostname()}{about}\n"
            os.ftruncate(self._file, os.pwrite(self._file, text.encode(), 0))

    def _taken(self) -> bool:
        """Return whether the locked file is still at its path: whoever ends may have removed it."""
        # Not through a link, which may lead to any file: the holder's name is written into it
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.open(self.path, flags, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                self.known = False
                return True
            patience = time.monotonic() + 1.0  # the holder may not have written its name yet
            while not (holder := os.pread(self._file, 1000, 0)) and time.monotonic() < patience:
                time.sleep(0.01)
            self.release()
            said = holder.decode(errors="replace").strip()
            raise BlockingIOError(said or "another process") from None
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        return False

    def __del__(self) -> None:
        self.release()

    def release(self, remove: bool = False) -> None:
        """Unlock and close the file. A forked child has it open too: it closes its copy, but must not
        unlock the file for its parent.
        """
        file, self._file = self._file, -1
        if file >= 0:
            if os.getpid() == self._process:
                with contextlib.suppress(OSError):
                    if remove:
                        self.path.unlink()
                    fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)
