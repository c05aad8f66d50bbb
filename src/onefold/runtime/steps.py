"""Who steps a shard, and when.

| shard                                   | stepped by                                   | when                         |
|-----------------------------------------|----------------------------------------------|------------------------------|
| on the device                           | the user's optimizer itself                  | at `optimizer.step()`        |
| with moments in 8 or 4 bits             | its rule, piece by piece (quant/moments.py)  | before the rest of that step |
| on the host                             | the user's optimizer, unit by unit           | before the rest of that step |
| on NVMe                                 | the user's optimizer, chunk by chunk         | before the rest of that step |
| on the host or NVMe, `step_in_backward` | as above, in a thread (offload/in_backward.py) | when its gradient has landed |

The user's step leaves out what was stepped "before the rest": such parameters have no `.grad` while
it runs (optim/watch.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from onefold.runtime.entry import Entry
    from onefold.runtime.flat import Flat
    from onefold.runtime.unit import Unit


class Stepper(ABC):
    """Steps those shards of one engine that the user's optimizer does not step by itself."""

    # -- at optimizer.step() -----------------------------------------------------------------------

    @abstractmethod
    def keeps_own_format(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer itself keeps its moments in fewer bits (as torchao's do)."""

    @abstractmethod
    def apart(self, optimizer: Optimizer, entries: Sequence[Entry]) -> list[Entry]:
        """Return those of `entries` that `step` is to be called for. `optimizer` steps them all.

        Raises:
            ValueError: the recipe and the optimizer disagree on the format of moments.
        """

    @abstractmethod
    def step(self, optimizer: Optimizer, entries: Sequence[Entry]) -> None:
        """Step `entries`, which `apart` has returned. Collective if any is stored on NVMe.

        Raises:
            TierError: on every rank, if a disk failed on one.
        """

    # -- in the backward pass ----------------------------------------------------------------------

    def takes(self, flat: Flat, which: list[bool]) -> bool:
        """Whether `flat` is stepped as soon as the gradients of the entries `which` are there."""
        return False

    def landed(self, flat: Flat) -> None:
        """Called for a flat buffer that `takes` accepts, once its gradients are `.grad` of its
        parameters.
        """

    def has_stepped(self, unit: Unit) -> bool:
        """Whether part of the unit was stepped in the backward pass under way."""
        return False

    def join(self) -> None:
        """Wait for the steps in the backward pass that are under way."""

    def close(self) -> None:
        """End the work in the background."""
