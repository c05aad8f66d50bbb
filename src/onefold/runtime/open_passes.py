"""The forward passes of sharded models that are open.

[Note: a pass ends with its call] torch calls a hook after a forward pass that returned, or that raised
an `Exception`. It calls none after Ctrl-C (KeyboardInterrupt) or SystemExit. So an open pass has the
frame of its module's call. Whoever asks which passes are open ends those first whose call is no longer
under way, wherever it was left.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import FrameType

    from onefold.runtime.unit import Unit


class _Ends(Protocol):
    def abort(self, this: OpenPass) -> None: ...


class _Thread(threading.local):
    """What one thread has open, over all models.

    Attributes:
        passes: its open forward passes, the innermost last.
    """

    def __init__(self) -> None:
        self.passes: list[OpenPass] = []


here = _Thread()


class OpenPass:
    """An open forward pass of a unit's module.

    Attributes:
        recompute: it is inside a backward pass.
        call: the frame of the module's call. of: ends the pass if that call was left.
        outermost: it has begun a pass over the model.
        in_use: the unit is in use by it.
        beside: the open passes of its thread. began: when, by `time.perf_counter`.
    """

    __slots__ = ("began", "beside", "call", "in_use", "of", "outermost", "recompute", "unit")

    def __init__(self, unit: Unit, recompute: bool, call: FrameType, of: _Ends) -> None:
        self.unit, self.recompute, self.call, self.of = unit, recompute, call, of
        self.outermost = self.in_use = False
        self.began = time.perf_counter()
        self.beside = here.passes


def still_open(passes: list[OpenPass], frame: FrameType | None = None) -> list[OpenPass]:
    """Return `passes`, an engine's or a thread's, after ending those that were left open. See
    [Note: a pass ends with its call]. `frame`: where the caller's stack is looked at from.
    """
    while passes:
        this, at = passes[-1], frame or sys._getframe(1)
        while at is not this.call:
            if at.f_back is None:
                break
            at = at.f_back
        else:
            break
        if this.beside is not here.passes and _in_any_thread(this.call):
            break
        this.of.abort(this)
    return passes


def _in_any_thread(call: FrameType) -> bool:
    for top in sys._current_frames().values():
        at: FrameType | None = top
        while at is not None and at is not call:
            at = at.f_back
        if at is not None:
            return True
    return False


def in_forward() -> bool:
    """Whether a forward pass of any sharded model is open in this thread."""
    return bool(here.passes) and bool(still_open(here.passes))
