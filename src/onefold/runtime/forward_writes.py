"""Parameters that a module writes to inside its forward pass: a norm constraint, a clamp.

In a forward pass the whole parameter lies in a buffer that goes back when the unit is released:
what is written there would be lost with it. So it is looked at when the forward pass of a unit
ends, and this rank's part of what was written becomes its masters'.

| how it was written                                   | how that shows                                                                   |
|------------------------------------------------------|----------------------------------------------------------------------------------|
| `self.weight.clamp_()` under no_grad                 | the parameter's version counter                                                  |
| `self.weight.data = renorm(self.weight.data)`        | it lies in another memory                                                        |
| `self.weight.data.clamp_()`                          | its own part differs from the masters: looked at in the first passes, and always |
|                                                      | from then on once a module has looked at `.data` (`Whole` in runtime/flat.py)    |

All ranks have to write the same, as under DDP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onefold.memory import storage_of
from onefold.runtime.flat import point

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry, Flat
    from onefold.runtime.unit import Unit

#: Passes in which parts are compared with masters.
FIRST = 2


def keep_writes(unit: Unit) -> None:
    """At the end of a unit's forward pass, its parameters still whole: keep what was written to
    them.

    Raises:
        RuntimeError: parameters that rest off the device or travel encoded were written to.
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
            continue  # an assignment to `.data` says so too (`Whole` in runtime/flat.py)
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
    if flat.offloaded is not None or flat.route.codec is not None:
        if written:
            raise RuntimeError(
                f"parameter {written[0].slot.name!r} was written to in the forward pass, and it"
                " rests off the device or travels encoded, so that the change would be lost. Write"
                " to it after optimizer.step(), under torch.no_grad()."
            )
        return
    if storage_of(full) == storage_of(flat.master):
        return  # the masters are that part of it
    own, master = full[flat.owned[0] : flat.owned[1]], flat.master
    then = master if own.dtype == master.dtype else master.to(own.dtype)
    if torch.equal(own, then):
        return
    flat.written_in_forward = True
    if own.dtype == master.dtype:
        master.copy_(own)
    else:  # elements that nobody wrote to keep what the compute dtype cannot hold
        master.copy_(torch.where(own == then, master, own.to(master.dtype)))
