"""Checkpoint folders that appear atomically: a folder has its final name only once it is complete.

    runs/a/step-00000100/                  a complete checkpoint
    runs/a/.step-00000200.4f1c.unfinished/ one that is being written; the writing process holds a
                                           lock on the file `owner` in it

A save writes into a hidden sibling folder, flushes every file and the folder, and renames it. The
rename is the commit. To replace another checkpoint, the two folders exchange names, which is also
one atomic step. A crashed process leaves a hidden folder with an unlocked `owner`, which the next
start removes. `latest` looks at the folders themselves; no file records which one is the latest.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.manifest import MANIFEST, read_manifest
from onefold.checkpoint.progress import moved
from onefold.locks import Lock
from onefold.wording import in_words

OWNER = "owner"
#: The folder of checkpoints in the output folder of `onefold train`.
OF_RUN = "checkpoints"
#: A folder without `owner` that is younger than this (seconds) may be locked any moment: keep it.
YOUNG = 60.0
#: On a file system without locks, an unfinished folder older than this (seconds) is stale.
OLD = 24 * 3600.0
_HIDDEN = re.compile(r"^\.(?P<name>.+)\.[0-9a-f]{8}\.(?P<what>unfinished|removed|replaced)$")
_OF_A_RUN = re.compile(r"^step-\d+$")
#: What the system says of a disk that takes no more.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE, AT_FDCWD


class Unfinished:
    """A folder that is being written, on the rank that creates it. `what`, `kind`: text for messages."""

    what, kind = "no checkpoint can be written at", "checkpoint of Onefold's"

    def __init__(self, target: Path, overwrite: bool) -> None:
        """Create the hidden folder beside `target`.
        Raises: CheckpointError: `target` cannot be written to or is taken.
        """
        self.target = target
        self._check(overwrite)
        self.folder = target.parent / f".{target.name}.{secrets.token_hex(4)}.unfinished"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_litter(target.parent, target.name)
            self.folder.mkdir()
            self._lock = Lock(self.folder / OWNER)
        except OSError as error:
            with contextlib.suppress(OSError):
                shutil.rmtree(self.folder)
            raise CheckpointError(f"{self.what} {target}: {in_words(error)}.") from None

    def _check(self, overwrite: bool) -> None:
        """Raise CheckpointError if no folder can have this name, or if something is there that must not
        be replaced.
        """
        target, own, why = self.target, self.is_own(), ""
        if not target.name:
            raise CheckpointError(
                f"{str(target)!r} is no name for a folder; give one such as runs/a/step-100."
            )
        if target.is_symlink():
            why = "is a link; name the folder itself, or another one"
        elif os.path.ismount(target):
            why = "is where a disk is mounted, which cannot be replaced; name a folder in it"
        elif target.exists() and not target.is_dir():
            why = "is a file; name a folder that does not exist yet"
        elif target.exists() and any(target.iterdir()) and not (own and overwrite):
            why = f"holds files that are no {self.kind}: name another folder"
            if own:
                why = f"is a {self.kind} already; give overwrite=True to replace it, or name another folder"
        if why:
            raise CheckpointError(f"{target} {why}.")

    def is_own(self) -> bool:
        """Return whether what is at `target` may be replaced."""
        return (self.target / MANIFEST).exists()

    def commit(self, overwrite: bool) -> None:
        """Flush the folder and rename it to `target`.
        Raises: CheckpointError: something else was created at `target` meanwhile. OSError: from the
        system.
        """
        # File names reach the disk before the folder's own: after a crash, a folder with its final
        # name is complete
        flush(self.folder)
        undo: Callable[[Path, Path], None] = os.rename
        try:
            os.rename(self.folder, self.target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            if not overwrite:
                raise CheckpointError(
                    f"{self.target} came to be while this checkpoint was written; it was left as"
                    " it is."
                ) from None
            exchange(self.folder, self.target)
            undo = exchange
        try:
            (self.target / OWNER).unlink(missing_ok=True)
            flush(self.target.parent)
        except OSError:
            undo(self.target, self.folder)  # who is told of an error finds what was there
            raise
        self.discard()  # what was replaced, if anything

    def discard(self) -> None:
        """Remove the unfinished folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()

    def __enter__(self) -> Self:
        """Enter a block. If it fails, the unfinished folder is removed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is not None:
            self.discard()
        if isinstance(error, OSError):
            raise CheckpointError(f"{self.what} {self.target}: {in_words(error)}.") from None


class Export(Unfinished):
    """The folder of an export that is being written. It may replace an earlier export."""

    what, kind = "nothing can be exported to", "model"

    def is_own(self) -> bool:
        return any(self.target.glob("*.safetensors")) and not super().is_own()


def exchange(a: Path, b: Path) -> None:
    """Exchange the names of two folders, atomically if the file system can. Raises: OSError."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and rename(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0:
        return
    if rename is not None and ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(a))
    # The file system cannot exchange names: rename three times. If the process is killed after the
    # first rename, the old folder has a hidden name only, and `remove_litter` renames it back.
    aside = b.parent / f".{b.name}.{secrets.token_hex(4)}.replaced"
    os.rename(b, aside)
    os.rename(a, b)
    os.rename(aside, a)


def flush(path: Path) -> None:
    """Flush the contents of a file, or the names in a folder, to disk (fsync)."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        moved()
    finally:
        os.close(file)


def remove_litter(root: Path, name: str | None = None) -> list[Path]:
    """Remove stale folders of crashed saves from `root`, and return them. `name`: only those of
    this checkpoint.

    Folders of saves under way, in this process or another, are kept.
    """
    removed = []
    for folder in sorted(root.glob(".*")):
        found = _HIDDEN.match(folder.name)
        if found is None or (name is not None and found["name"] != name):
            continue
        if found["what"] == "replaced" and not (root / found["name"]).exists():
            os.rename(folder, root / found["name"])
        elif not _is_held(folder):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _is_held(folder: Path) -> bool:
    """Return whether a running process writes into `folder`. A young folder without an `owner` file
    counts as held: its process is about to lock it.
    """
    try:
        age = time.time() - folder.stat().st_mtime
        if not (folder / OWNER).exists():
            return folder.name.endswith(".unfinished") and age < YOUNG
        lock = Lock(folder / OWNER)
        lock.release()
        return not lock.known and age < OLD
    except BlockingIOError:
        return True
    except OSError:
        return False


def newest_first(root: Path, damaged: bool = False) -> list[Path]:
    """Return the checkpoints in `root`, the folders with a manifest, by descending step. `damaged`: append
    those whose manifest has none or cannot be read.
    """
    found: list[tuple[int, str, Path]] = []
    for folder in root.iterdir() if root.is_dir() else ():
        if folder.name.startswith(".") or not (folder / MANIFEST).is_file():
            continue
        step = None
        with contextlib.suppress(CheckpointError):
            step = read_manifest(folder).step
        if damaged or step is not None:
            found.append((-1 if step is None else step, folder.name, folder))
    return [folder for *_, folder in sorted(found, reverse=True)]


def latest(root: Path | str) -> Path | None:
    """Return the checkpoint with the greatest step in `root`, if any. Checkpoints with a damaged
    manifest do not count.
    """
    return next(iter(newest_first(Path(root))), None)


def of_run(path: Path) -> Path:
    """Return `path`, or the folder of checkpoints in it if `path` is a run's output folder."""
    inside = not (path / MANIFEST).exists() and (path / OF_RUN).is_dir()
    return path / OF_RUN if inside else path


def prune(root: Path, keep: int, just_saved: Path) -> None:
    """Remove all but the `keep` newest of a run's checkpoints in `root`.

    Never removed: the checkpoint just saved, even if others have greater steps; folders whose name
    is not step-<number>; checkpoints with a damaged manifest.
    """
    of_a_run = [folder for folder in newest_first(root) if _OF_A_RUN.match(folder.name)]
    for folder in reversed(of_a_run[keep:]):
        if folder.name != just_saved.name:
            remove(folder)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint. It first gets a hidden name: a kill in the middle then leaves a stale
    folder, not half a checkpoint. Raises: OSError.
    """
    aside = checkpoint.with_name(f".{checkpoint.name}.{secrets.token_hex(4)}.removed")
    os.rename(checkpoint, aside)
    shutil.rmtree(aside, ignore_errors=True)
