"""`TierError`: the error of a failed file operation on the NVMe tier, in a sentence with a hint."""

from __future__ import annotations

import errno
from pathlib import Path

_ANOTHER = "name another disk in nvme=, or store more on the host"
_HINTS = {
    errno.ENOSPC: f"free space there, {_ANOTHER}",
    errno.EDQUOT: f"the quota is used up: free space, {_ANOTHER}",
    errno.EFBIG: (
        "files may not grow that large here (`ulimit -f`, or the file system's own limit):"
        f" {_ANOTHER}"
    ),
    errno.EIO: (
        "the disk itself reports an error (the system's log has more): name another disk in nvme="
    ),
    errno.EROFS: "the file system is read-only: name another folder in nvme=",
    errno.EACCES: "name a folder in nvme= that this user may write to",
    errno.EPERM: "name a folder in nvme= that this user may write to",
    errno.ENOTDIR: "a part of the path is a file: name a folder in nvme=",
    errno.ENOENT: "create it, or name another folder in nvme=",
    errno.EMFILE: "too many files are open (`ulimit -n`)",
    errno.ESTALE: (
        "the network file system has lost the file: name a folder in nvme= on a disk of this"
        " machine"
    ),
}


class TierError(RuntimeError):
    """A file operation failed. The message has the operation, path, system's error and a hint."""


def in_words(error: OSError) -> str:
    """Return the system's error message, and a hint what to do about it if there is one."""
    said = error.strerror or str(error) or type(error).__name__
    hint = _HINTS.get(error.errno or 0)
    return f"{said}; {hint}" if hint else said


def failure(what: str, path: Path, error: OSError) -> TierError:
    """Return the error for an operation `what` on `path` that the system refused."""
    return TierError(f"{what} {path} failed: {in_words(error)}.")
