"""The `Stepper` for shards on the host and on NVMe: see runtime/stepper.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim.optimizer import Optimizer

from onefold.offload.in_backward import InBackwardStepper
from onefold.offload.step import step_apart
from onefold.quant.moments import moment_policy
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat, Unit
from onefold.runtime.stepper import GroupVerdict, Stepper, refuse_cut


class OffloadStepper(Stepper):
    """Steps offloaded shards, with the optimizer's own step or by the rule of low-bit moments."""

    collective = True  # the ranks agree on failures of the disk

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.in_backward = engine.recipe.step_in_backward
        # Created by the first step, which shows which optimizer has which parameters
        self._in_backward: InBackwardStepper | None = None

    def accepts(
        self, optimizer: Optimizer, flat: Flat, verdict: Callable[[], GroupVerdict]
    ) -> bool:
        if not flat.storage.offloaded:
            return False
        moment_policy(optimizer, self.engine.recipe, flat)  # refuses formats that disagree
        refuse_cut(optimizer, flat, verdict)
        return True

    def step(self, optimizer: Optimizer, entries: Sequence[Entry]) -> None:
        if self.in_backward:
            self._in_backward = self._in_backward or InBackwardStepper(self.engine)
            self._in_backward.comes(optimizer)
            self._in_backward.know(optimizer, entries)
        step_apart(optimizer, self.engine, entries)

    def takes(self, flat: Flat, which: list[Entry]) -> bool:
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
