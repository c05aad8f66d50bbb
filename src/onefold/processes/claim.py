"""Reserve an output folder for one run at a time.

    OUTPUT/run.lock        the run that has claimed the folder, as JSON; locked (flock) by every process of the run

    claim       take an exclusive lock, if there is no other ─► write the record ─► turn the lock into a shared one
    join        take a shared lock; the record names the same run: ranks, other machines, restarted ranks
    refused     the record names another run: the error tells its process and machine

The system releases the lock of a process that ends, also after a crash. A killed run therefore
frees the folder when its last rank has ended, and nobody has to remove a file. After a normal end,
the last process of the run removes the file. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onefold.wording import TrainError

LOCK = "run.lock"
#: Seconds to wait for the folder: until the remaining ranks of a killed run have ended, or until
#: another process has written its record.
PATIENCE = 10.0
_INTERVAL = 0.02


class HeldError(TrainError):
    """Another run uses the folder."""


class Claim:
    """This process's claim on an output folder.
    `known` is False if the file system has no locks: another run would not be noticed.
    """

    def __init__(self, folder: Path, file: int, known: bool, made: list[Path]) -> None:
        self.folder, self.known = folder, known
        self._file, self._made = file, made

    @classmethod
    def take(cls, folder: Path, run: str, patience: float = PATIENCE, new: bool = False) -> Claim:
        """Claim `folder` for `run`, or join the processes of `run` that have claimed it. Creates
        the folder, unless `new` says that the caller has just created it.
        Raises HeldError if another run uses it, or if the remaining processes of a killed run do
        not end within `patience` seconds; TrainError if the folder cannot be written to.
        """
        try:
            made = [folder.parent, folder] if new else _make(folder)
        except OSError as error:
            raise TrainError(cannot_be_written(folder, error)) from None
        try:
            return cls(folder, *_locked(folder / LOCK, run, time.monotonic() + patience), made)
        except OSError as error:
            cls(folder, -1, False, made).undo()
            raise TrainError(cannot_be_written(folder, error)) from None

    def release(self) -> None:
        """Release the claim. The last process of the run removes the lock file."""
        if self._file < 0:
            return
        with contextlib.suppress(OSError):
            if self.known:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(self._file, self.folder / LOCK):
                (self.folder / LOCK).unlink()
        os.close(self._file)
        self._file = -1

    def undo(self) -> None:
        """Release the claim and remove the folders that were created for the run, if empty."""
        self.release()
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                folder.rmdir()
        self._made = []


def cannot_be_written(folder: Path, error: OSError) -> str:
    """Return an error message that says what to do."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        return f"--output {folder} is a file; name a folder."
    part = "a part of the path is a file; name another folder"
    hint = {
        errno.ENOSPC: "free space there, or name a folder on another disk",
        errno.EDQUOT: "the quota is used up; name a folder elsewhere",
        errno.ENOTDIR: part,
        errno.EEXIST: part,
    }.get(error.errno or 0, "name a folder that this user may write to")
    return f"--output {folder} cannot be written ({error.strerror or error}): {hint}."


def _make(folder: Path) -> list[Path]:
    """Create a folder. Returns the folders that did not exist, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _locked(path: Path, run: str, end: float) -> tuple[int, bool]:
    """Claim or join, as described above. Returns (the open file, whether it is locked)."""
    mine = {
        "run": run,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%H:%M:%S"),
        "command": " ".join(["onefold", *sys.argv[1:]])[:200],
    }
    while True:
        record = None
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, file)
            claimed = _try(file, fcntl.LOCK_EX)
            if claimed is not False and _is_at(file, path):
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(mine).encode() + b"\n", 0)
            # flock changes the lock in two steps, so another process may have claimed it in between
            if claimed is None or (_try(file, fcntl.LOCK_SH) and _is_at(file, path)):
                record = _read(file)
                if claimed is None or (record is not None and record.get("run") == run):
                    undo.pop_all()
                    return file, claimed is not None
        if record is not None and (_is_there(record) or time.monotonic() > end):
            raise HeldError(_held(path.parent, record))
        if time.monotonic() > end:
            raise HeldError(
                f"--output {path.parent}: another process is about to train into it. Wait for it,"
                " or name another folder."
            )
        time.sleep(_INTERVAL)


def _try(file: int, kind: int) -> bool | None:
    """Return whether the lock was taken; None if the file system has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _is_at(file: int, path: Path) -> bool:
    """Return whether `file` is still the file at `path`. A run that ends removes its lock file."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False


def _read(file: int) -> dict[str, Any] | None:
    try:
        found = json.loads(os.pread(file, 1 << 16, 0))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _is_there(record: Mapping[str, Any]) -> bool:
    """Return whether the claiming process may still run. One on another machine may."""
    if record.get("host") != socket.gethostname():
        return True
    with contextlib.suppress(PermissionError, KeyError, TypeError, ValueError):
        try:
            os.kill(int(record["pid"]), 0)
        except ProcessLookupError:
            return False
    return True


def _held(folder: Path, record: Mapping[str, Any]) -> str:
    who = f"process {record.get('pid')} on {record.get('host')}"
    if not _is_there(record):
        who = f"what {who} has started and left behind"
    return (
        f"--output {folder} is in use by {who}, since {record.get('since')}"
        f" ({record.get('command')}). Wait for it, end it, or name another folder."
    )
