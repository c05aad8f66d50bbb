"""What a thread is doing: the forward passes of sharded models that are open, and calls of optimizers.

[Note: a pass ends with its call] torch calls a hook after a forward pass that returned, or that raised
an `Exception`. It calls none after Ctrl-C (KeyboardInterrupt) or SystemExit. So an open pass has the
frame of its module's call. Whoever asks which passes are open ends those first whose call is no longer
under way, wherever it was left.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

    from onefold.runtime.flat import Unit


class _Thread(threading.local):
    """What one thread does, over all models.

    Attributes:
        passes: its open forward passes, the innermost last.
        stepping: optimizer steps under way. Inside one, a plain tensor may hold this rank's elements
            only (an optimizer state) and be combined with an interval.
        casts_states: it is in `optimizer.load_state_dict`, which casts states to `param.dtype`. It
            must see the master dtype, which is what the optimizer steps.
        drops_gradients: it is in `zero_grad`, which reads `.grad` only to drop it or to fill it with
            zeros. It needs no interval.
    """

    stepping = 0
    casts_states = drops_gradients = False

    def __init__(self) -> None:
        self.passes: list[OpenPass] = []


here = _Thread()


@dataclass(eq=False, slots=True)
class OpenPass:
    """An open forward pass of a unit's module.

    Attributes:
        recompute: it is inside a backward pass.
        call: the frame of the module's call. abort: ends the pass if that call was left.
        outermost: it has begun a pass over the model.
        in_use: the unit is in use by it.
        beside: the open passes of its thread. began: when, by `time.perf_counter`.
    """

    unit: Unit
    recompute: bool
    call: FrameType
    abort: Callable[[OpenPass], None]
    outermost: bool = False
    in_use: bool = False
    began: float = field(default_factory=time.perf_counter)
    beside: list[OpenPass] = field(default_factory=lambda: here.passes)


def still_open(passes: list[OpenPass], frame: FrameType | None = None) -> list[OpenPass]:
    """Return `passes`, an engine's or a thread's, after ending those that were left open. See
    [Note: a pass ends with its call]. `frame`: where the caller's stack is looked at from.
    """
    frame = frame or sys._getframe(1)
    while passes and not _is_inside(passes[-1].call, frame):
        this = passes[-1]
        tops = sys._current_frames().values() if this.beside is not here.passes else ()
        if any(_is_inside(this.call, top) for top in tops):  # of another thread
            break
        this.abort(this)
    return passes


def _is_inside(call: FrameType, frame: FrameType) -> bool:
    """Whether `frame` was called from `call`, or is it."""
    at: FrameType | None = frame
    while at is not None and at is not call:
        at = at.f_back
    return at is not None


def in_forward() -> bool:
    """Whether a forward pass of any sharded model is open in this thread."""
    return bool(here.passes) and bool(still_open(here.passes))
