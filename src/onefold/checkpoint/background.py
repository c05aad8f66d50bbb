"""Work that goes on behind the training: a thread on each rank, whose failure is told at the next
step and never lost.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onefold.runtime.engine import Engine

if TYPE_CHECKING:
    from onefold.checkpoint.copying import Copying

# Weak on both sides: a load under way holds its model, which must not keep itself alive through
# this table.
_running: weakref.WeakKeyDictionary[Engine, weakref.ref[Background]] = weakref.WeakKeyDictionary()


class Background:
    """A save or a load under way.

    Attributes:
        path: the checkpoint. seconds: from its start to its end; None until then.
    """

    tell_steps = True  # the next optimizer step raises what it fails with

    def __init__(
        self,
        engine: Engine,
        path: Path,
        work: Callable[[], None],
        begun: float,
        copying: Copying | None = None,
    ) -> None:
        self.path, self._begun, self._engine = path, begun, weakref.ref(engine)
        self.seconds: float | None = None
        self._error: BaseException | None = None
        self._work: Callable[[], None] | None = work
        # Not a daemon: a program that ends while a checkpoint is written waits for it.
        self._thread = threading.Thread(target=self._run, name=f"onefold {path.name}", daemon=False)
        _running[engine] = weakref.ref(self)
        engine.settle = partial(_join, self._thread)  # the engine lets nothing go under it
        self._copying = copying
        if copying is not None:
            engine.masters.copying = copying.wait
        self._stall_s = time.perf_counter() - begun
        self._thread.start()

    def _run(self) -> None:
        try:
            assert self._work is not None
            self._work()
        except BaseException as error:
            # Also where the program ends without another step
            logging.getLogger("onefold").error("%s: %s", self.path, error)
            self._failed(error)
        finally:
            self._work = None  # what it read is free from here
            self.seconds = time.perf_counter() - self._begun

    def _failed(self, error: BaseException) -> None:
        self._error = error
        engine = self._engine()
        if engine is not None and self.tell_steps:
            engine.progress.failure = engine.progress.last_failure = error

    @property
    def stall_s(self) -> float:
        """Seconds that the training stood still for it so far: in the call, and in a step."""
        return self._stall_s + (self._copying.waited if self._copying is not None else 0.0)

    @property
    def done(self) -> bool:
        """Whether it has ended on this rank, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Until it has ended; returns the checkpoint.

        Raises:
            CheckpointError: it failed. Where it was told so by `wait` on every rank, no step tells
                it again.
            TimeoutError: it goes on after `timeout` seconds.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.path} is still being worked on after {timeout:g} s.")
        error, engine = self._error, self._engine()
        if error is not None:
            if engine is not None and engine.progress.failure is error:
                engine.progress.failure = None
            raise error
        return self.path


def running(engine: Engine) -> Background | None:
    """The work under way on this engine, if any."""
    known = _running.get(engine)
    found = known() if known is not None else None
    return found if found is not None and not found.done else None


def settle(engine: Engine) -> None:
    """Wait for what is under way. Its failure is told by itself."""
    found = running(engine)
    if found is not None:
        _join(found._thread)


def _join(thread: threading.Thread) -> None:
    if thread is not threading.current_thread():
        thread.join()
