"""Ending a run on Ctrl-C without losing it, whoever delivers the signal.

    terminal ──SIGINT──► onefold train ── file `stop` ──► every rank: finish the step, agree, save, exit 0
       (own launcher)         │ second SIGINT ──SIGKILL──► every rank, at once
                              └ before training began: as the second

    another launcher ──SIGINT or SIGTERM──► every rank: finish the step, agree, save, exit 130

Ranks agree by reducing a flag with each step's loss, so that all leave after the same step. The launcher and its ranks meet
in a temporary folder, the control folder: ranks leave their process ids there, rank 0 says when there is something to
save, and the first rank that fails is the one that speaks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

CONTROL = "ONEFOLD_CONTROL"
INTERRUPTED = 130


class StopSignal:
    """On a rank: has somebody asked this rank to stop?

    Under this package's launcher SIGTERM keeps its default, so that a rank stuck in a collective dies at once when
    torchrun ends it after another rank's failure.
    """

    def __init__(self, rank: int) -> None:
        folder = os.environ.get(CONTROL)
        self.control = Path(folder) if folder else None
        self.rank = rank
        self._signals = 0
        self._worth_saving = False
        signal.signal(signal.SIGINT, self._on_signal)
        if self.control is None:
            signal.signal(signal.SIGTERM, self._on_signal)
        else:
            with contextlib.suppress(OSError):
                (self.control / f"rank-{rank}.pid").write_text(str(os.getpid()))
            follow_parent()

    def arm(self) -> None:
        """From now on there is something to save: a signal lets the step finish instead of ending the process."""
        self._worth_saving = True
        if self.control is not None and self.rank == 0:
            with contextlib.suppress(OSError):
                (self.control / "training").touch()

    @property
    def requested(self) -> bool:
        """True once somebody asked. Other ranks may not know yet: reduce it."""
        return self._signals > 0 or (self.control is not None and (self.control / "stop").exists())

    @property
    def exit_code(self) -> int:
        """What a rank returns after a stop: the launcher of this package turns 0 into 130 itself."""
        return 0 if self.control is not None else INTERRUPTED

    def speak_first(self) -> bool:
        """True for the first rank that asks: it tells of the failure, the ranks that fail after it keep quiet."""
        if self.control is None:
            return True
        try:
            os.close(os.open(self.control / "failed", os.O_CREAT | os.O_EXCL))
        except OSError:
            return False
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if not self._worth_saving or (self._signals > 1 and number == signal.SIGINT):
            os._exit(128 + number)


def follow_parent(interval: float = 1.0) -> None:
    """End this process within about `interval` seconds of its parent's end: nothing is left running."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="onefold-follow-parent", daemon=True).start()
