"""When a run writes checkpoints, and how it goes back to one.

every --save-every steps, in the background            ─► OUTPUT/checkpoints/step-00000100, the last --keep of them
SIGTERM, SIGUSR1, --save-before; Ctrl-C; the last step ─► the same, and the run waits for it
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onefold
from onefold.checkpoint.background import Background, running
from onefold.checkpoint.checkpointer import Checkpointer
from onefold.checkpoint.folder import newest_first, remove
from onefold.processes.signals import STARTED, Stop
from onefold.train.checkpoints import (
    CHECKPOINTS,
    Point,
    base_of,
    kept_beside,
    read_point,
    take_over,
)
from onefold.train.report import totals
from onefold.train.stage_checkpoints import SavingStages, StageCheckpointer
from onefold.wording import TrainError, seconds_of, worded

if TYPE_CHECKING:
    from onefold.train.prepare import Run
    from onefold.train.report import Reporter

#: Assumed write speed in bytes per second, until a save has been measured.
SLOW_DISK = 100 << 20
#: Seconds from the end of the last save to the end of the process, with some to spare.
LEAVING = 5.0
#: The next save may take this many times as long as the longest so far.
SPARE = 1.5


class Keeper:
    """Writes the checkpoints of a run, and loads one to go back to.

    Args:
        begun: when the run started, seconds since the epoch. --save-before counts from there.

    Attributes:
        saved: the step of the last checkpoint, None before the first. path: its folder.
    """

    def __init__(self, run: Run, folder: Path, say: Reporter, begun: float) -> None:
        self.run, self.root, self.say, self.begun = run, folder / CHECKPOINTS, say, begun
        config = run.config
        self.saved: int | None = run.start or None
        self.path: Path | None = None
        self.limit = seconds_of(config.save_before) if config.save_before else None
        self.on = bool(config.save_every) or config.resume != "none" or self.limit is not None
        self._checkpointer: Checkpointer | None = None
        self._saving: Background | SavingStages | None = None
        self._steps: deque[float] = deque(maxlen=50)
        self._last = time.perf_counter()
        self._save_s: float | None = None
        if self.on:
            self._open()

    # -- time --------------------------------------------------------------------------------------

    @property
    def save_seconds(self) -> float:
        """Seconds of the longest save so far; before the first, an estimate for a slow disk."""
        if self._save_s is not None:
            return self._save_s
        return (12 * self.run.trained + 4 * self.run.frozen) / SLOW_DISK

    def time_is_up(self) -> bool:
        """Whether another step might leave no time for a checkpoint before --save-before."""
        if self.limit is None:
            return False
        step = max(self._steps, default=0.0)
        needed = 2 * step + SPARE * self.save_seconds + LEAVING
        return time.time() - self.begun + needed > self.limit

    # -- saving ------------------------------------------------------------------------------------

    def after(self, step: int, stopping: Stop, over: bool, skipped: int) -> None:
        """Save if a checkpoint is due after `step` steps, `skipped` of them skipped. Collective.
        Raises CheckpointError if this save failed, or one that was under way.
        """
        self.look()
        if self.saves(step, stopping, over):
            self._save(step, skipped)
        if stopping or over:
            self.wait()
        now = time.perf_counter()
        self._steps.append(now - self._last)
        self._last = now

    def saves(self, step: int, stopping: Stop, over: bool) -> bool:
        """Whether `after` would save with these arguments. The same on every rank."""
        every = self.run.config.save_every
        urgent = bool(stopping & (Stop.PREEMPT | Stop.TIME))
        due = bool(every) and (over or step % (every or 1) == 0)
        return (urgent or due or (self.on and bool(stopping))) and self.saved != step

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
            run, config = self.run, self.run.config
            how: dict[str, Any] = {"keep": config.keep, "asynchronous": config.async_save}
            self._checkpointer = (
                Checkpointer(self.root, model=run.model, **how)
                if run.pipeline is None
                else StageCheckpointer(self.root, run.ranks, run.part.stage, run.model, **how)
            )
        return self._checkpointer

    def _save(self, step: int, skipped: int) -> None:
        run, begun, checkpointer = self.run, time.perf_counter(), self._open()
        path = checkpointer.save(
            step,
            optimizer=run.optimizer,
            scaler=run.scaler,
            data=run.order,
            extra=kept_beside(run, totals(run), skipped),
            tokenizer=run.loaded.tokenizer,
            frozen=base_of(run) is None,
        )
        assert path is not None  # a save waits for the previous one, so none is dropped
        self.saved = step
        self._saving = (
            checkpointer.saving
            if isinstance(checkpointer, StageCheckpointer)
            else running(onefold.engine_of(run.model))
        )
        if self._saving is None:
            self.wait()  # the save is over; this raises if it failed
            seconds = time.perf_counter() - begun
            self._saved(path, seconds, seconds)

    def _saved(self, path: Path, seconds: float, stall: float) -> None:
        self.path = path
        self._save_s = max(self._save_s or 0.0, seconds)
        self.say.say("checkpoint", step=self.saved, path=str(path), seconds=seconds, stall_s=stall)

    # -- going back --------------------------------------------------------------------------------

    def roll_back(self, bad_step: int, times: int) -> int:
        """Load a checkpoint, and go on with the samples after those of `bad_step` (from 0).
        `times`: rollbacks in a row. The first loads the newest checkpoint, each further one the
        checkpoint before. Returns the step to go on with. Collective.
        Raises TrainError if there is no checkpoint yet.
        """
        self.wait()
        run, ranks = self.run, self.run.ranks
        point = ranks.on_first(lambda: self._nth_newest(times))
        if point is None:
            raise TrainError(
                f"step {bad_step + 1} was not finite, and there is no checkpoint to go back to yet:"
                " use a smaller --save-every, or --on-nonfinite skip."
            )
        bad_batch = bad_step + run.order.skipped
        take_over(run, point)
        run.order.skipped = bad_batch + 1 - point.step
        run.optimizer.zero_grad()
        self.saved = point.step
        return point.step

    def _nth_newest(self, times: int) -> Point | None:
        found = newest_first(self.root)
        if not found:
            return None
        nth = min(times, len(found)) - 1
        for path in found[:nth]:
            remove(path)
        return read_point(found[nth])


def check_time(run: Run, keeper: Keeper) -> str | None:
    """Return a warning if --save-before or --grace looks too short for a checkpoint."""
    need, config = SPARE * keeper.save_seconds, run.config
    if keeper.limit is not None and need + LEAVING > keeper.limit:
        short = f"--save-before {config.save_before}"
    elif keeper.on and need > seconds_of(config.grace):
        short = f"--grace {config.grace}"
    else:
        return None
    return f"{short} may be too short: a checkpoint is expected to take {worded(need)}"


def started_at() -> float:
    """Return when the run first started, in seconds since the epoch. Restarts do not change it."""
    if STARTED in os.environ:
        return float(os.environ[STARTED])
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
