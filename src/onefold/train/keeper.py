"""When a run writes checkpoints.

every --save-every steps, in the background ─► OUTPUT/checkpoints/step-00000100, the last --keep of them
SIGTERM, SIGUSR1, Ctrl-C; the last step     ─► the same, and the run waits for it
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import onefold
from onefold.checkpoint.background import Background, running
from onefold.checkpoint.checkpointer import Checkpointer
from onefold.processes.signals import Stop
from onefold.train.checkpoints import CHECKPOINTS, base_of, kept_beside
from onefold.wording import seconds_of, worded

if TYPE_CHECKING:
    from onefold.train.prepare import Run
    from onefold.train.report import Reporter

#: Assumed write speed in bytes per second, and how many times as long a save may take.
SLOW_DISK, SPARE = 100 << 20, 1.5


class Keeper:
    """Writes the checkpoints of a run.

    Attributes:
        saved: the step of the last checkpoint, None before the first. path: its folder.
    """

    def __init__(self, run: Run, folder: Path, say: Reporter) -> None:
        self.run, self.root, self.say = run, folder / CHECKPOINTS, say
        self.saved: int | None = run.start or None
        self.path: Path | None = None
        self._checkpointer: Checkpointer | None = None
        self._saving: Background | None = None
        if keeps_any(run):
            self._open()

    def after(self, step: int, stopping: Stop, over: bool, skipped: int) -> None:
        """Save if a checkpoint is due after `step` steps, `skipped` of them skipped. Collective.
        Raises CheckpointError if this save failed, or one that was under way.
        """
        self.look()
        if self.saves(step, stopping, over):
            self._save(step, skipped)
        if stopping or over:
            self.wait()

    def saves(self, step: int, stopping: Stop, over: bool) -> bool:
        """Whether `after` would save with these arguments. The same on every rank."""
        every = self.run.config.save_every
        due = bool(every) and (over or step % (every or 1) == 0)
        return (due or bool(stopping)) and self.saved != step

    def look(self) -> None:
        """Take note of a save that has ended. Raises CheckpointError if it failed."""
        if self._saving is not None and self._saving.done:
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. Raises CheckpointError if it failed."""
        saving, self._saving = self._saving, None
        if self._checkpointer is not None:
            self._checkpointer.wait()
        if saving is not None:
            self._saved(saving.path, saving.seconds or saving.stall_s, saving.stall_s)

    def close(self) -> None:
        """Close the checkpointer. Collective."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def _open(self) -> Checkpointer:
        if self._checkpointer is None:
            config = self.run.config
            self._checkpointer = Checkpointer(
                self.root, model=self.run.model, keep=config.keep, asynchronous=config.async_save
            )
        return self._checkpointer

    def _save(self, step: int, skipped: int) -> None:
        run, begun, checkpointer = self.run, time.perf_counter(), self._open()
        path = checkpointer.save(
            step,
            optimizer=run.optimizer,
            scaler=run.scaler,
            data=run.order,
            extra=kept_beside(run, skipped),
            tokenizer=run.loaded.tokenizer,
            frozen=base_of(run) is None,
        )
        assert path is not None  # a save waits for the previous one, so none is dropped
        self.saved = step
        self._saving = running(onefold.engine_of(run.model))
        if self._saving is None:
            self.wait()  # the save is over; this raises if it failed
            seconds = time.perf_counter() - begun
            self._saved(path, seconds, seconds)

    def _saved(self, path: Path, seconds: float, stall: float) -> None:
        self.path = path
        self.say.say("checkpoint", step=self.saved, path=str(path), seconds=seconds, stall_s=stall)


def keeps_any(run: Run) -> bool:
    """Whether the run was asked for checkpoints."""
    return bool(run.config.save_every) or run.config.resume != "none"


def check_time(run: Run) -> str | None:
    """Return a warning if --grace looks too short for a checkpoint."""
    needed = SPARE * (12 * run.trained + 4 * run.frozen) / SLOW_DISK
    if not keeps_any(run) or needed <= seconds_of(run.config.grace):
        return None
    return (
        f"--grace {run.config.grace} may be too short: a checkpoint is expected to take"
        f" {worded(needed)}"
    )


def started_at() -> float:
    """Return when the run first started, in seconds since the epoch. Restarts do not change it."""
    of = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    try:
        with (
            open(f"/proc/{of}/stat", encoding="ascii", errors="replace") as stat,
            open("/proc/uptime", encoding="ascii") as uptime,
        ):
            ticks = int(stat.read().rpartition(")")[2].split()[19])
            return time.time() - float(uptime.read().split()[0]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()
