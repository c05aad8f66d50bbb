"""Who steps a shard, and when.

| shard                                   | stepped by                                   | when                         |
|-----------------------------------------|----------------------------------------------|------------------------------|
| on the device                           | the user's optimizer itself                  | at `optimizer.step()`        |
| with moments in 8 or 4 bits             | its rule, piece by piece (quant/moments.py)  | before the rest of that step |
| on the host                             | the user's optimizer, unit by unit           | before the rest of that step |
| on NVMe                                 | the user's optimizer, chunk by chunk         | before the rest of that step |
| on the host or NVMe, `step_in_backward` | as above, in a thread (offload/in_backward.py) | when its gradient has landed |

What is stepped "before the rest" is out of the user's step: it has no `.grad` while that runs
(optim/watch.py).
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


class Step(ABC):
    """The steps of one engine's shards that the user's optimizer is not left to do by itself."""

    # -- at optimizer.step() -----------------------------------------------------------------------

    @abstractmethod
    def keeps_own_format(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer keeps its moments in fewer bits by itself (torchao's)."""

    @abstractmethod
    def apart(self, optimizer: Optimizer, entries: Sequence[Entry]) -> list[Entry]:
        """Those of `entries`, which `optimizer` steps, that `step` is to be called for.

        Raises:
            ValueError: what recipe and optimizer say of moments cannot go together.
        """

    @abstractmethod
    def step(self, optimizer: Optimizer, entries: Sequence[Entry]) -> None:
        """Step `entries`, which `apart` has given. Collective where any rests on NVMe.

        Raises:
            TierError: on every rank, if a disk failed on one.
        """

    # -- in the backward pass ----------------------------------------------------------------------

    def takes(self, flat: Flat, which: list[bool]) -> bool:
        """Whether `flat` is stepped as soon as the gradients of the entries `which` are there."""
        return False

    def landed(self, flat: Flat) -> None:
        """The gradients of a flat buffer that `takes` has taken are `.grad` of its parameters."""

    def has_stepped(self, unit: Unit) -> bool:
        """Whether part of the unit was stepped in the backward pass under way."""
        return False

    def join(self) -> None:
        """Wait for what is stepped in the backward pass."""

    def close(self) -> None:
        """End what runs behind the training."""
