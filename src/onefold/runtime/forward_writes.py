"""Parameters that a module writes to inside its forward pass: a norm constraint, a clamp.

In a forward pass the whole parameter lies in a buffer that goes back to the pool when the unit is
released. What was written there would be lost. So the engine looks for writes when the forward pass
of a unit ends, and copies this rank's part of what was written into its masters.

| how it was written                                   | how that shows                                                                   |
|------------------------------------------------------|----------------------------------------------------------------------------------|
| `self.weight.clamp_()` under no_grad                 | the parameter's version counter                                                  |
| `self.weight.data = renorm(self.weight.data)`        | the parameter lies in other memory                                               |
| `self.weight.data.clamp_()`                          | this rank's part differs from the masters: compared in the first passes, and in  |
|                                                      | all later ones once a module has read `.data` (`Whole` in runtime/entry.py)      |

All ranks have to write the same, as under DDP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onefold.memory import storage_of
from onefold.runtime.entry import point
from onefold.runtime.storage import refuse_written

if TYPE_CHECKING:
    from onefold.runtime.entry import Entry
    from onefold.runtime.flat import Flat
    from onefold.runtime.unit import Unit

#: The number of first passes in which parts are compared with masters.
FIRST = 2


def keep_writes(unit: Unit) -> None:
    """Copy what was written to a unit's parameters into the masters. Called at the end of the
    unit's forward pass, while its parameters are whole.

    Raises:
        RuntimeError: parameters that are stored off the device or travel encoded were written to.
    """
    for flat in unit.flats:
        full = flat.full
        if flat.unsharded or full is None:
            continue
        versions = sum([entry.compute._version for entry in flat.entries])
        if (
            versions == flat.seen_versions
            and not flat.written_in_forward
            and flat.compared >= FIRST
        ):
            continue  # an assignment to `.data` sets the flag too (`Whole` in runtime/entry.py)
        flat.seen_versions = versions
        written = []
        for entry in flat.entries:
            version = entry.compute._version
            if version != entry.seen_version:
                entry.seen_version = version
                written.append(entry)
            if entry.slot.numel and storage_of(entry.compute) != storage_of(full):
                flat.view(full, entry).copy_(entry.compute.detach())
                point(entry.compute, flat.view(full, entry))
                written.append(entry)
        if written or flat.written_in_forward or flat.compared < FIRST:
            flat.compared += 1
            _keep(flat, full, written)


def _keep(flat: Flat, full: torch.Tensor, written: list[Entry]) -> None:
    if not flat.gather.exact:
        refuse_written(written)
    elif flat.storage.keep_written(full[slice(*flat.owned)], written):
        flat.written_in_forward = True
