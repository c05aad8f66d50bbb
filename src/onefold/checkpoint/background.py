"""Work that goes on behind the training: a thread on each rank, whose failure is told at the next step and never lost."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from onefold.runtime.engine import Engine

# Weak on both sides: a load under way holds its model, which must not keep itself alive through this table.
_running: weakref.WeakKeyDictionary[Engine, weakref.ref[Background]] = weakref.WeakKeyDictionary()


class Background:
    """A save or a load under way.

    Attributes:
        path: the checkpoint. stall_s: seconds that the training stood still for it. seconds: from its start to its end; None until then.
    """

    tell_steps = True  # the next optimizer step raises what it fails with

    def __init__(self, engine: Engine, path: Path, work: Callable[[], None], begun: float) -> None:
        self.path = path
        self.seconds: float | None = None
        self._error: BaseException | None = None
        self._told = False
        self._engine = weakref.ref(engine)
        self._work: Callable[[], None] | None = work
        self._begun = begun
        # Not a daemon: a program that ends while a checkpoint is written waits for it.
        self._thread = threading.Thread(target=self._run, name=f"onefold {path.name}", daemon=False)
        _running[engine] = weakref.ref(self)
        engine.settle = self._thread.join  # the engine lets nothing go under it
        self.stall_s = time.perf_counter() - begun
        self._thread.start()

    def _run(self) -> None:
        try:
            assert self._work is not None
            self._work()
        except BaseException as error:
            self._error = error
            logging.getLogger("onefold").error("%s: %s", self.path, error)  # also where the program ends without another step
            engine = self._engine()
            if engine is not None and self.tell_steps:
                engine.failure = self._take
        finally:
            self._work = None  # what it read is free from here
            self.seconds = time.perf_counter() - self._begun

    def _take(self) -> BaseException | None:
        """The failure, the first time it is asked for."""
        told, self._told = self._told, True
        return None if told else self._error

    @property
    def done(self) -> bool:
        """Whether it has ended on this rank, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Until it has ended; returns the checkpoint.

        Raises:
            CheckpointError: it failed (unless a step has told so already).
            TimeoutError: it goes on after `timeout` seconds.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.path} is still being worked on after {timeout:g} s.")
        error = self._take()
        if error is not None:
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
    if found is not None and found._thread is not threading.current_thread():
        found._thread.join()
