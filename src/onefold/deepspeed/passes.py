"""What an engine does in backward passes, whoever runs them: its own `backward`, `engine.scale`, or
a loss's `backward()`.

| the backward pass                          | its gradients are                                        |
|--------------------------------------------|----------------------------------------------------------|
| `engine.backward(loss)`                    | left alone: the loss was divided, and scaled in fp16     |
| `other.backward(loss)` of another engine   | left alone: that engine has divided the loss             |
| `engine.scale(loss).backward()`            | divided by the accumulation steps                        |
| `loss.backward()`                          | divided by the accumulation steps; refused in fp16       |
| `torch.autograd.grad(loss, ...)`           | returned as they are                                     |

All of it is decided once a backward pass, at its beginning. The core tells when that is
(runtime/engine.py), also on one rank, where `initialize` asks for flat buffers.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import onefold

if TYPE_CHECKING:
    from onefold.deepspeed.engine import DeepSpeedEngine


class EngineMisuse(RuntimeError, AssertionError):
    """A call of an engine that cannot be followed in its present state. DeepSpeed asserts in some
    places and raises RuntimeError in others, by version. Scripts that catch either are served. Some
    compare the words: a message has those of DeepSpeed where it says the same.
    """


#: Calls a function at the end of the backward pass that runs.
_at_end: Any = torch.autograd.Variable._execution_engine.queue_callback


class _Divided:
    """How many calls of any engine's `backward` run now: their losses have been divided."""

    calls = 0


class Passes:
    """Follows the passes over the module of one engine.

    Attributes:
        stepped: `.grad` holds the gradients of the last step. The next pass drops them.
        since_step: number of backward passes since the last optimizer step.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.stepped, self.since_step = False, 0
        self._engine: Callable[[], DeepSpeedEngine | None] = weakref.ref(engine)
        self._in_backward = 0
        self._loss_scaled = False
        onefold.engine_of(engine.module).follower = self

    # -- what the core asks (runtime/engine.py) ---------------------------------------------------

    @property
    def synchronizes(self) -> bool:
        engine = self._engine()
        return engine is None or engine.reduces_now

    def forward_begins(self) -> None:
        self._loss_scaled = False  # a backward pass that raised did not come to its end
        self._drop_stepped()

    def backward_begins(self) -> float:
        """Note that a backward pass begins. Returns what its gradients are multiplied with.

        Raises:
            EngineMisuse: fp16 needs a scaled loss, and nothing has scaled this one.
        """
        engine = self._engine()
        if engine is None:
            return 1.0
        self._drop_stepped()
        if engine.scales_loss and not (self._in_backward or self._loss_scaled):
            raise EngineMisuse(
                "Loss scaling is required in fp16, and nothing has scaled the loss of this backward"
                " pass: call engine.backward(loss), or engine.scale(loss).backward(), in place of"
                " loss.backward()."
            )
        self.since_step += 1
        return 1.0 if _Divided.calls else 1.0 / engine.gradient_accumulation_steps()

    def _drop_stepped(self) -> None:
        engine = self._engine()
        if not self.stepped or engine is None:
            return
        engine.zero_grad()
        # The core asks with torch functions off, where `.grad` shows nothing to drop to a rank that
        # owns no element of a parameter. It must not go on believing that others have a gradient.
        for entry in onefold.engine_of(engine.module).entries:
            entry.graded_elsewhere = False

    # -- what the engine tells -----------------------------------------------------------------------

    @contextlib.contextmanager
    def of_engine(self) -> Iterator[None]:
        """Backward passes inside are those of `engine.backward`."""
        _Divided.calls += 1
        self._in_backward += 1
        try:
            yield
        finally:
            _Divided.calls -= 1
            self._in_backward -= 1

    def follow_scaled(self, scaled: Tensor) -> Tensor:
        """Return `scaled`, a scaled loss. A backward pass that begins with it is a scaled one."""
        scaled.register_hook(self._scaled_pass)
        return scaled

    def _scaled_pass(self, _: Tensor) -> None:
        self._loss_scaled = True
        _at_end(partial(setattr, self, "_loss_scaled", False))
