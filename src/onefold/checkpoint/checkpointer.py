"""The checkpoints of a run: save in the background, keep the newest few, resume from the newest."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn

from onefold.checkpoint.background import Background
from onefold.checkpoint.errors import CheckpointError, DamagedCheckpoint
from onefold.checkpoint.folder import newest_first, prune, remove_litter
from onefold.checkpoint.loading import Loaded, load
from onefold.checkpoint.progress import moved
from onefold.checkpoint.saving import save, save_async, step_of
from onefold.checkpoint.together import Together, meet
from onefold.locks import Lock
from onefold.runtime.hooks import engine_of
from onefold.wording import in_words

LOCK = ".lock"
#: Seconds that a start waits for the lock. The system may take a moment to release the lock of a
#: killed process.
LOCK_PATIENCE = 10.0


class Checkpointer:
    """The folder `root`, with one checkpoint per save, named step-00000100. Only one run at a time
    can use the folder.

        checkpoints = onefold.Checkpointer("runs/a/checkpoints", model=model, keep=3)
        begun = checkpoints.load(optimizer=optimizer)          # the newest undamaged one; None in an empty folder
        for step in range(begun.step if begun else 0, steps):
            ...
            if (step + 1) % 100 == 0:
                checkpoints.save(step + 1, optimizer=optimizer)
        checkpoints.close()

    Args:
        model: the return value of `onefold.shard`.
        keep: number of checkpoints to keep. Older ones are removed after a newer one is complete.
        asynchronous: save in the background, as `save_async` does.
        busy: what `save` does while another save into this folder is under way: "wait" for that one, or "skip" the
            new one.

    Raises:
        CheckpointError: on every rank: another run uses the folder, or it cannot be written to.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        model: nn.Module,
        keep: int = 3,
        asynchronous: bool = True,
        busy: Literal["wait", "skip"] = "wait",
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise CheckpointError(f"keep={keep!r}: expected how many checkpoints stay, 1 or more.")
        if busy not in ("wait", "skip"):
            raise CheckpointError(f"busy={busy!r}: expected 'wait' or 'skip'.")
        self.root, self.keep = Path(root).absolute(), keep
        self.asynchronous, self.busy = asynchronous, busy
        self.model, self._engine = model, engine_of(model)
        meet(self._engine, "Checkpointer(...)")
        self._together = Together.of(self._engine)
        self._saving: Background | None = None
        self._lock: Lock | None = None
        with self._together.each_rank():
            if self._together.rank == 0:
                self._take()

    def _take(self) -> None:
        """Lock the folder for this run and remove stale folders of crashed runs."""
        end = time.monotonic() + LOCK_PATIENCE
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            while self._lock is None:
                try:
                    self._lock = Lock(self.root / LOCK)
                except BlockingIOError as holder:
                    if time.monotonic() > end:
                        raise CheckpointError(
                            f"{self.root} is in use by {holder}: two runs cannot save into one"
                            " folder. Name another, or end that run."
                        ) from None
                    time.sleep(0.1)
                    moved()  # this wait has a limit of its own
            for left in remove_litter(self.root):
                logging.getLogger("onefold").info(
                    "removed %s, which a save that was killed had left", left
                )
        except OSError as error:
            raise CheckpointError(
                f"no checkpoints can be kept in {self.root}: {in_words(error)}."
            ) from None

    def save(self, step: int, **parts: Any) -> Path | None:
        """Save a checkpoint for `step`, replacing one of the same step. `parts`: further arguments
        of `onefold.save`, such as optimizer. Collective.

        Returns:
            The checkpoint's path; None if the save was skipped. An asynchronous save may still be
            writing it.

        Raises:
            CheckpointError: this save failed, or the previous asynchronous one did.
        """
        if self._saving is not None and self.busy == "skip":
            # All ranks must decide alike, and the save under way uses the checkpoint's communicator
            mine = bytes([255, self.under_way])  # no other message has this length
            context = self._engine.context("control", "(checkpoint)", "state")
            if self._engine.group.any_of(mine, context)[1]:
                return None
        self.wait()
        number = step_of(step)
        if number is None:
            raise CheckpointError(
                "Checkpointer.save() was given no step: expected the number of steps done."
            )
        path = self.root / f"step-{number:08d}"
        if self.asynchronous:
            self._saving = save_async(path, model=self.model, step=step, overwrite=True, **parts)
        else:
            save(path, model=self.model, step=step, overwrite=True, **parts)
            self._prune(path)
        return path

    @property
    def under_way(self) -> bool:
        """Whether a save into this folder is being written."""
        return self._saving is not None and not self._saving.done

    def wait(self) -> None:
        """Wait until no save is under way. Raises: CheckpointError: the last save failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            self._prune(saving.wait())

    def _prune(self, just_saved: Path) -> None:
        if self._together.rank == 0:
            try:
                prune(self.root, self.keep, just_saved)
            except OSError as error:
                logging.getLogger("onefold").warning(
                    "an old checkpoint could not be removed: %s", in_words(error)
                )

    def load(self, **parts: Any) -> Loaded | None:
        """Load the newest undamaged checkpoint. Returns None if the folder has none. Collective.

        Raises:
            CheckpointError: it is of another model or optimizer, or all checkpoints are damaged.
        """
        meet(self._engine, "Checkpointer.load")
        self.wait()
        errors = []
        ask = partial(newest_first, self.root, damaged=True)
        for path in self._together.said_by_first(ask):
            try:
                return load(path, model=self.model, **parts)
            except DamagedCheckpoint as error:
                errors.append(str(error))
                if self._together.rank == 0:
                    logging.getLogger("onefold").warning("%s Trying the one before.", error)
        if errors:
            raise CheckpointError(
                f"none of the {len(errors)} checkpoints in {self.root} can be loaded. The newest:"
                f" {errors[0]}"
            )
        return None

    def close(self) -> None:
        """Wait for the save under way, then unlock the folder. Raises: CheckpointError."""
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
