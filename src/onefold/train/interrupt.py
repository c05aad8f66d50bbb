"""What Ctrl-C does to a command: it ends at once and without a traceback, or, where something must
be put in order first, as an exception.

    start, imports          `end_at_once`: there is nothing to put in order, and an import does not bear an exception in its middle
    with interruptible():   KeyboardInterrupt, which the command catches
    while ranks run         noted and passed on, see `onefold.train.stop`

All of them end with status 130.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

#: Called by `end_at_once` before the process ends, the last one first.
put_in_order: list[Callable[[], object]] = []


def end_at_once(number: int, frame: FrameType | None) -> None:
    """A signal's handler: end this process with status 128 + `number`."""
    for act in reversed(put_in_order):
        with contextlib.suppress(Exception):
            act()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(128 + number)


def listen() -> None:
    """From now on Ctrl-C and SIGTERM end this process at once. Called before anything else is
    imported.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # somebody else's process, whose signals are its own
    for number in (signal.SIGINT, signal.SIGTERM):
        # Nohup, and shells that start a job in the background
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end_at_once)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt. Import what is needed before: an import may swallow
    it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
