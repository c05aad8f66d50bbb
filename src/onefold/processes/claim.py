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
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onefold.locks import FileLock
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

    def __init__(self, folder: Path, lock: FileLock | None, made: list[Path]) -> None:
        self.folder, self.known = folder, lock is not None and lock.known
        self._lock, self._made = lock, made

    @classmethod
    def take(cls, folder: Path, run: str, patience: float = PATIENCE, new: bool = False) -> Claim:
        """Claim `folder` for `run`, or join the processes of `run` that have claimed it. Creates
        the folder, unless `new` says that the caller has just created it.
        Raises HeldError if another run uses it, or if the remaining processes of a killed run do
        not end within `patience` seconds; TrainError if the folder cannot be written to.
        """
        try:
            missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
            folder.mkdir(parents=True, exist_ok=True)
            made = [folder.parent, folder] if new else missing  # outermost first
        except OSError as error:
            raise TrainError(cannot_be_written(folder, error)) from None
        try:
            return cls(folder, _locked(folder / LOCK, run, time.monotonic() + patience), made)
        except OSError as error:
            cls(folder, None, made).undo()
            raise TrainError(cannot_be_written(folder, error)) from None

    def release(self) -> None:
        """Release the claim. The last process of the run removes the lock file."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        with contextlib.suppress(OSError):
            if lock.take() and lock.is_there():
                lock.path.unlink()
        lock.release()

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


def _locked(path: Path, run: str, end: float) -> FileLock:
    """Claim or join, as described above."""
    mine = {
        "run": run,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%H:%M:%S"),
        "command": " ".join(["onefold", *sys.argv[1:]])[:200],
    }
    while True:
        record = None
        lock = FileLock(path)
        with contextlib.ExitStack() as undo:
            undo.callback(lock.release)
            if lock.take() and lock.is_there():
                lock.write(json.dumps(mine).encode() + b"\n")
            # flock changes the lock in two steps, so another process may have claimed it in between
            if not lock.known or (lock.take(shared=True) and lock.is_there()):
                record = _record(lock)
                if not lock.known or (record is not None and record.get("run") == run):
                    undo.pop_all()
                    return lock
        if record is not None and (_is_there(record) or time.monotonic() > end):
            raise HeldError(_held(path.parent, record))
        if time.monotonic() > end:
            raise HeldError(
                f"--output {path.parent}: another process is about to train into it. Wait for it,"
                " or name another folder."
            )
        time.sleep(_INTERVAL)


def _record(lock: FileLock) -> dict[str, Any] | None:
    try:
        found = json.loads(lock.read())
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
