"""Saves in the background: one thread per rank. `wait` raises the error of a failed save. If nobody
waits for it, the next optimizer step raises its error.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onefold.runtime.engine import Engine

if TYPE_CHECKING:
    from onefold.checkpoint.copying import Copying

# Weak on both sides: a save under way refers to its model, and this table must not keep that model
# alive.
_running: weakref.WeakKeyDictionary[Engine, weakref.ref[Background]] = weakref.WeakKeyDictionary()


class Background:
    """A save under way.

    Attributes:
        path: the checkpoint.
        seconds: from start to end of the work; None until it has ended.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        path: Path,
        work: Callable[[], None],
        begun: float,
        copying: Copying | None = None,
    ) -> None:
        self.path, self._begun, self._engines = path, begun, weakref.WeakSet(engines)
        self.seconds: float | None = None
        self._error: BaseException | None = None
        self._work: Callable[[], None] | None = work
        # Not a daemon: a program that ends during a save waits until the checkpoint is written.
        self._thread = threading.Thread(target=self._run, name=f"onefold {path.name}", daemon=False)
        self._copying = copying
        for engine in engines:
            _running[engine] = weakref.ref(self)
            # The engine joins the thread before it frees anything that the thread may read
            engine.settle = partial(_join, self._thread)
            if copying is not None:
                engine.copying = copying.wait
        self._stall_s = time.perf_counter() - begun
        self._thread.start()

    def _run(self) -> None:
        try:
            assert self._work is not None
            self._work()
        except BaseException as error:
            # Logged at once: the program may end without another step
            logging.getLogger("onefold").error("%s: %s", self.path, error)
            self._failed(error)
        finally:
            self._work = None  # frees the tensors that the work referred to
            self.seconds = time.perf_counter() - self._begun

    def _failed(self, error: BaseException) -> None:
        self._error = error
        for engine in self._engines:
            engine.failure = engine.last_failure = error

    @property
    def stall_s(self) -> float:
        """Seconds that the training has waited for this work so far, in the call and in steps."""
        return self._stall_s + (self._copying.waited if self._copying is not None else 0.0)

    @property
    def done(self) -> bool:
        """Whether the work has ended on this rank, with or without an error."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait for the end of the work. Returns the checkpoint's path.

        Raises:
            CheckpointError: the work failed. Once `wait` has raised this on every rank, no step
                raises it again.
            TimeoutError: the work has not ended after `timeout` seconds.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.path} is still being worked on after {timeout:g} s.")
        if self._error is not None:
            for engine in self._engines:
                if engine.failure is self._error:
                    engine.failure = None
            raise self._error
        return self.path


def running(engine: Engine) -> Background | None:
    """Return the work under way on this engine, if any."""
    known = _running.get(engine)
    found = known() if known is not None else None
    return found if found is not None and not found.done else None


def settle(engine: Engine) -> None:
    """Wait for the work under way. A failure is not raised here: see `Background.wait`."""
    found = running(engine)
    if found is not None:
        _join(found._thread)


def _join(thread: threading.Thread) -> None:
    if thread is not threading.current_thread():
        thread.join()
