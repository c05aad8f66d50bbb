"""What a parameter, and an interval made of it, asks of the engine that it belongs to.

The engine is `Engine` (runtime/engine.py); parameters lie below it and refer to it weakly.

| code                                              | asks for                                                  |
|---------------------------------------------------|-----------------------------------------------------------|
| in a pass of the model, with a sharded parameter  | `computing`, `in_pass`, `use`                             |
| between passes, with gradients (outside.py)       | `begin_outside` to `release_outside`, `backward_event`    |
| between passes, that reads or writes values       | `whole`, `masters`                                        |
| torch.amp.GradScaler                              | `agree_on_overflow`                                       |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from onefold.runtime.progress import MasterAccess, Progress

if TYPE_CHECKING:
    from onefold.runtime.entry import Entry
    from onefold.runtime.flat import Flat
    from onefold.runtime.parameters.write_counters import WriteCounters
    from onefold.runtime.unit import Unit


class OwningEngine(Protocol):
    """See this module. `device` is where the model computes."""

    device: torch.device
    progress: Progress
    masters: MasterAccess
    write_counters: WriteCounters

    @property
    def computing(self) -> bool:
        """Code that runs now computes with whole parameters: a forward pass, or its recomputation
        in backward.
        """
        ...

    @property
    def in_pass(self) -> bool:
        """A forward or backward pass of the model is under way."""
        ...

    def use(self, entry: Entry) -> nn.Parameter:
        """The whole parameter for code in a forward pass that does not own it."""
        ...

    def whole(self, entry: Entry) -> torch.Tensor:
        """A new tensor of the whole parameter in master precision. Collective."""
        ...

    def agree_on_overflow(self, found: torch.Tensor) -> None:
        """`found` becomes every rank's. Collective."""
        ...

    def backward_event(self, accumulates: bool = False) -> None:
        """Something of this engine happens in a backward pass."""
        ...

    @property
    def gathered_buffers(self) -> dict[int, tuple[Unit, Flat]]:
        """Whose whole parameters lie in which memory, by its address."""
        ...

    def begin_outside(self, entry: Entry) -> Unit:
        """An operation with gradients outside a forward pass is about to use the whole parameters
        of the unit that is returned.
        """
        ...

    def gather_outside(self, unit: Unit) -> bool:
        """They are here. True if that took a gather of its own, after which `release_outside` is to
        be called. Collective at stage 3.
        """
        ...

    def release_outside(self, unit: Unit) -> None: ...
