"""`OwningEngine`: what sharded parameters and intervals use of the engine that they belong to.

The engine is `Engine` (runtime/engine.py). Parameters refer to it weakly, and only by this
protocol: their modules must not import the engine's.

| user code                                         | needs                                                     |
|---------------------------------------------------|-----------------------------------------------------------|
| in a pass of the model, with a sharded parameter  | `computing`, `in_pass`, `use`                             |
| between passes, with gradients (outside.py)       | `begin_outside` to `release_outside`, `backward_event`    |
| between passes, reading or writing values         | `whole`, `masters`                                        |
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
    """See the docstring of this module. `device` is where the model computes."""

    device: torch.device
    progress: Progress
    masters: MasterAccess
    write_counters: WriteCounters

    @property
    def computing(self) -> bool:
        """Whether code now computes with whole parameters: in a forward pass, or in its
        recomputation in backward.
        """
        ...

    @property
    def in_pass(self) -> bool:
        """Whether a forward or backward pass of the model is under way."""
        ...

    def use(self, entry: Entry, keeps: bool = False) -> nn.Parameter:
        """Return the whole parameter, for code in a forward pass outside the unit that owns it.
        `keeps`: it stays whole until the pass ends.
        """
        ...

    def whole(self, entry: Entry) -> torch.Tensor:
        """Return the whole parameter in master precision as a new tensor. Collective."""
        ...

    def agree_on_overflow(self, found: torch.Tensor) -> None:
        """Set `found` on every rank, in place, if it is set on any. Collective."""
        ...

    def backward_event(self, accumulates: bool = False) -> None:
        """Tell the engine that a backward pass has reached something of its own."""
        ...

    @property
    def gathered_buffers(self) -> dict[int, tuple[Unit, Flat]]:
        """The unit and the flat buffer of each gathered buffer, by `storage_of` its memory."""
        ...

    def begin_outside(self, entry: Entry) -> Unit:
        """Begin an operation with gradients outside a forward pass. Returns the unit whose whole
        parameters it uses.
        """
        ...

    def gather_outside(self, unit: Unit) -> bool:
        """Make the unit's whole parameters available. Returns True if that took a gather; the
        caller must then call `release_outside`. Collective at stage 3.
        """
        ...

    def release_outside(self, unit: Unit) -> None: ...
