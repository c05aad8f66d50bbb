"""The `Stepper` for shards on the device whose moments are stored in a format of their own: see
runtime/stepper.py. Offloaded shards with such moments are stepped in offload/step.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim.optimizer import Optimizer

from onefold.quant.moments import moment_policy, step_in_memory
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.stepper import GroupVerdict, Stepper, refuse_cut


class LowBitStepper(Stepper):
    """Steps shards on the device with moments in 16, 8 or 4 bits, or with stochastic rounding."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def accepts(
        self, optimizer: Optimizer, flat: Flat, verdict: Callable[[], GroupVerdict]
    ) -> bool:
        if moment_policy(optimizer, self.engine.recipe, flat) is None:
            return False
        refuse_cut(optimizer, flat, verdict)
        return True

    def step(self, optimizer: Optimizer, entries: Sequence[Entry]) -> None:
        of_flat: dict[Flat, list[Entry]] = {}
        for entry in entries:
            of_flat.setdefault(entry.flat, []).append(entry)
        for flat, mine in of_flat.items():
            how = moment_policy(optimizer, self.engine.recipe, flat)
            assert how is not None  # see `accepts`
            step_in_memory(optimizer, how, mine)

    def wants_unsharded(self, optimizer: Optimizer) -> bool:
        recipe = self.engine.recipe
        return recipe.moments is not None or recipe.stochastic_rounding
