"""Folders that are whole or absent.

    runs/a/step-00000100/                  a checkpoint: it has this name only since it is whole
    runs/a/.step-00000200.4f1c.unfinished/ one that is being written; `owner` in it is locked by the
    process that writes

A save writes into a hidden sibling, flushes every file and the folder, and renames. One rename is
the commit; where another checkpoint is to be replaced the two exchange their names, which is one
step as well. A process that dies leaves a hidden folder whose `owner` nobody
holds a lock on: the next start removes it. `latest` reads what is there; no file says which is the
latest.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.manifest import MANIFEST, read_manifest

OWNER = "owner"
#: The folder of checkpoints in the output folder of `onefold train`.
OF_RUN = "checkpoints"
#: Seconds in which a folder without an owner may be one whose owner is about to lock it.
YOUNG = 60.0
#: Seconds after which an unfinished folder is litter where the file system cannot tell who holds
#: it.
OLD = 24 * 3600.0
_HIDDEN = re.compile(r"^\.(?P<name>.+)\.[0-9a-f]{8}\.(?P<what>unfinished|removed|replaced)$")
_OF_A_RUN = re.compile(r"^step-\d+$")
_HINTS = {
    errno.ENOSPC: "free space there, or choose another disk",
    errno.EDQUOT: "the quota is used up: free space, or choose another disk",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EACCES: "choose a folder that this user may write to",
    errno.ENOTDIR: "a part of the path is a file: choose another folder",
    errno.EEXIST: "a file of this name is in the way: choose another folder",
}
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE, AT_FDCWD


class Lock:
    """A file that one process at a time holds; the system lets go of it when the process ends,
    however it ends.

    Attributes:
        known: False where the file system has no locks: then nobody is kept out.

    Raises:
        BlockingIOError: somebody else holds it; its text says who.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.known, self._file = path, True, -1
        self._process = os.getpid()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                self.known = False
                return
            holder = os.pread(self._file, 200, 0).decode(errors="replace").strip()
            os.close(self._file)
            self._file = -1
            raise BlockingIOError(holder or "another process") from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        if self._file >= 0:
            # A forked child has the descriptor too: it must neither keep the lock nor take it away
            if os.getpid() == self._process:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = -1


class Unfinished:
    """A folder in the making, on the rank that makes it. `what`: for messages."""

    what = "no checkpoint can be written at"

    def __init__(self, target: Path, overwrite: bool) -> None:
        """Make it beside `target`. Raises: CheckpointError: there cannot be one at `target`."""
        self.target = target
        self.check(target, overwrite)
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

    @staticmethod
    def check(target: Path, overwrite: bool) -> None:
        """Raises: CheckpointError: something is there that a checkpoint must not replace."""
        check_place(target)
        is_checkpoint = (target / MANIFEST).exists()
        if target.exists() and any(target.iterdir()) and not (overwrite and is_checkpoint):
            raise CheckpointError(
                f"{target} is a checkpoint already; give overwrite=True to replace it, or name"
                " another folder."
                if is_checkpoint
                else f"{target} holds files that are no checkpoint of Onefold's: name another"
                " folder."
            )

    def commit(self, overwrite: bool) -> None:
        """Flush the folder and give it its name. Raises: CheckpointError: somebody else put
        something there meanwhile. OSError: as the system says it.
        """
        # The names of its files, then its own: what is seen under its name is whole after a crash
        flush(self.folder)
        replaced = False
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
            replaced = True
        (self.target / OWNER).unlink(missing_ok=True)
        flush(self.target.parent)
        if replaced:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()

    def discard(self) -> None:
        """Leave nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()

    def __enter__(self) -> Self:
        """Inside, whatever goes wrong leaves nothing."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is not None:
            self.discard()
        if isinstance(error, OSError):
            raise CheckpointError(f"{self.what} {self.target}: {in_words(error)}.") from None


class Export(Unfinished):
    """The folder of an export in the making, which may replace an earlier export."""

    what = "nothing can be exported to"

    @staticmethod
    def check(target: Path, overwrite: bool) -> None:
        """Raises: CheckpointError: something is there that an export must not replace."""
        check_place(target)
        if target.is_dir() and any(target.iterdir()):
            known = any(target.glob("*.safetensors")) and not (target / MANIFEST).exists()
            if not (overwrite and known):
                what = "a model" if known else "something else than a model"
                hint = "give overwrite=True to replace it, or " if known else ""
                raise CheckpointError(
                    f"{target} is there already and holds {what}: {hint}name another folder."
                )


def check_place(target: Path) -> None:
    """Raises: CheckpointError: no folder can have this name."""
    if not target.name:
        raise CheckpointError(
            f"{str(target)!r} is no name for a folder; give one such as runs/a/step-100."
        )
    if target.is_symlink():
        raise CheckpointError(f"{target} is a link; name the folder itself, or another one.")
    if os.path.ismount(target):
        raise CheckpointError(
            f"{target} is where a disk is mounted, which cannot be replaced; name a folder in it."
        )
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; name a folder that does not exist yet.")


def exchange(a: Path, b: Path) -> None:
    """Two folders swap names in one step. Raises: OSError."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and rename(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0:
        return
    if rename is not None and ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(a))
    # A file system without it: for a moment the old one lies under a hidden name, from where
    # `remove_litter` brings it back.
    aside = b.parent / f".{b.name}.{secrets.token_hex(4)}.replaced"
    os.rename(b, aside)
    os.rename(a, b)
    os.rename(aside, a)


def flush(path: Path) -> None:
    """Have the disk know the contents of a file, or the names in a folder."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def remove_litter(root: Path, name: str | None = None) -> list[Path]:
    """Remove what dead saves have left in `root` (of checkpoint `name` alone, if given) and say
    what it was.

    A save that is under way, of this process or another, is left alone.
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


def is_unfinished(folder: Path) -> bool:
    """Whether it is a hidden folder of a save, under way or dead."""
    return folder.is_dir() and _HIDDEN.match(folder.name) is not None


def _is_held(folder: Path) -> bool:
    """Whether a living process writes into it. One without an `owner` that is young was made just
    now, and will be locked next.
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


def checkpoints(root: Path) -> Iterator[tuple[int, Path]]:
    """(step, folder) of every folder in `root` with a manifest; step -1: none can be read."""
    for folder in root.iterdir() if root.is_dir() else ():
        if not folder.name.startswith(".") and (folder / MANIFEST).is_file():
            try:
                step = read_manifest(folder).step
            except CheckpointError:
                step = None
            yield (-1 if step is None else step), folder


def newest_first(root: Path, damaged: bool = False) -> list[Path]:
    """The checkpoints in `root`, the one of the greatest step first; `damaged`: also those whose
    step cannot be read, behind the others.
    """
    found = [(step, folder.name, folder) for step, folder in checkpoints(root)]
    return [folder for step, _, folder in sorted(found, reverse=True) if damaged or step >= 0]


def latest(root: Path | str) -> Path | None:
    """The checkpoint of the greatest step in `root` whose manifest is sound, if there is one."""
    return next(iter(newest_first(Path(root))), None)


def of_run(path: Path) -> Path:
    """`path`, or the folder of checkpoints in it where `path` is a run's output folder.
    Raises: CheckpointError: the run kept none.
    """
    if (path / MANIFEST).exists():
        return path
    if (path / OF_RUN).is_dir():
        return path / OF_RUN
    if (path / "train.yaml").is_file() and (path / "metrics.jsonl").is_file():
        model = f" Its model is in {path / 'model'}." if (path / "model").is_dir() else ""
        raise CheckpointError(
            f"the run in {path} has kept no checkpoint; --save-every N keeps some.{model}"
        )
    return path


def prune(root: Path, keep: int, just_saved: Path) -> list[Path]:
    """Remove all but the `keep` newest of a run's checkpoints in `root`, and say which.

    Left alone: the one just saved, also if others have greater steps; folders of other names than a
    run gives; damaged manifests.
    """
    of_a_run = [folder for folder in newest_first(root) if _OF_A_RUN.match(folder.name)]
    old = [folder for folder in reversed(of_a_run[keep:]) if folder.name != just_saved.name]
    for folder in old:
        remove(folder)
    return old


def remove(checkpoint: Path) -> None:
    """Out of sight under one rename first: a kill in the middle leaves litter, not half a
    checkpoint. Raises: OSError.
    """
    aside = checkpoint.with_name(f".{checkpoint.name}.{secrets.token_hex(4)}.removed")
    os.rename(checkpoint, aside)
    shutil.rmtree(aside, ignore_errors=True)


def in_words(error: OSError) -> str:
    """An OSError for people, with what to do."""
    where = f" ({error.filename})" if error.filename else ""
    hint = _HINTS.get(error.errno or 0)
    return f"{error.strerror or error}{where}" + (f"; {hint}" if hint else "")
