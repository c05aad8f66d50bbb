"""Reserve an output folder for one run at a time.

    OUTPUT/run.lock        locked (flock) by the command that starts the ranks; under another launcher by the first rank

The system releases the lock of a process that ends, also after a crash. A killed run therefore
frees the folder, and nobody has to remove a file. After a normal end, the file is removed. Importing
this module does not import torch.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from pathlib import Path

from onefold.locks import Lock
from onefold.wording import TrainError, in_words

LOCK = "run.lock"


class Claim:
    """This process's claim on an output folder. A file system without locks gets a warning."""

    def __init__(self, folder: Path, new: bool = False) -> None:
        """Claim `folder`. Creates it, unless `new` says that the caller has just created it.
        Raises TrainError if another run uses it, or if it cannot be written to.
        """
        self.folder, self._made = folder, [folder.parent, folder] if new else []
        self._lock: Lock | None = None
        about = (
            f", since {time.strftime('%H:%M:%S')} ({' '.join(['onefold', *sys.argv[1:]])[:200]})"
        )
        try:
            self._made += [path for path in (*folder.parents[::-1], folder) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(folder / LOCK, about)
        except BlockingIOError as holder:
            raise TrainError(
                f"--output {folder} is in use by {holder}. Wait for it, end it, or name another"
                " folder."
            ) from None
        except OSError as error:
            self.undo()
            raise TrainError(cannot_be_written(folder, error)) from None
        if not self._lock.known:
            warnings.warn(
                f"the file system of {folder} has no locks: another run that writes there would not"
                " be noticed",
                stacklevel=2,
            )

    def release(self) -> None:
        """Release the claim, and remove the lock file."""
        if self._lock is not None:
            self._lock.release(remove=True)

    def undo(self) -> None:
        """Release the claim and remove the folders that were created for the run, if empty."""
        self.release()
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                folder.rmdir()
        self._made = []


def cannot_be_written(folder: Path, error: OSError) -> str:
    """Return an error message that says what to do."""
    return f"--output {folder} cannot be written: {in_words(error)}."
