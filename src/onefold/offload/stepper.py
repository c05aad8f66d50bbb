"""The `Stepper` for shards that the user's optimizer cannot step by itself: see runtime/stepper.py."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim.optimizer import Optimizer

from onefold.offload.in_backward import InBackwardStepper
from onefold.offload.step import step_apart, stepped_apart
from onefold.quant.moments import torchao_format
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.stepper import Stepper
from onefold.runtime.unit import Unit


class OffloadStepper(Stepper):
    """Steps offloaded shards, and shards with moments in a format of their own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Created by the first step, which shows which optimizer has which parameters
        self._in_backward: InBackwardStepper | None = None

    def keeps_own_format(self, optimizer: Optimizer) -> bool:
        return torchao_format(optimizer) is not None

    def apart(self, optimizer: Optimizer, entries: Sequence[Entry]) -> list[Entry]:
        return stepped_apart(optimizer, self.engine, entries)

    def step(self, optimizer: Optimizer, entries: Sequence[Entry]) -> None:
        if self.engine.recipe.step_in_backward:
            self._in_backward = self._in_backward or InBackwardStepper(self.engine)
            self._in_backward.comes(optimizer)
            self._in_backward.know(optimizer, entries)
        step_apart(optimizer, self.engine, entries)

    def takes(self, flat: Flat, which: list[bool]) -> bool:
        return self._in_backward is not None and self._in_backward.takes(flat, which)

    def landed(self, flat: Flat) -> None:
        assert self._in_backward is not None
        self._in_backward.landed(flat)

    def has_stepped(self, unit: Unit) -> bool:
        return self._in_backward is not None and self._in_backward.has_stepped(unit)

    def join(self) -> None:
        if self._in_backward is not None:
            self._in_backward.join()

    def close(self) -> None:
        if self._in_backward is not None:
            self._in_backward.close()
