"""Which copies of masters are stale after the masters were written to.

    master ──┬── the resident whole (stages 0 to 2)                          ► refreshed before it is used
             ├── a cached shard: secondary or encoded (runtime/gather_paths.py)   ► made anew by the next gather
             └── a gathered unit whose backward pass never came              ► released

A flat buffer's masters have a number, `Flat.version`. Whoever has made a copy of them notes the number
that it was made of, and compares: `Flat.copied`, `Gather.cached_of`. Stage 3 has no resident copies:
each gather begins with the masters as they are. Only units that stay gathered must notice a write.

| who writes                    | raises                              | a late backward pass                      |
|-------------------------------|-------------------------------------|-------------------------------------------|
| an optimizer's step           | `bumps`, on all ranks alike; and    | is refused (`WriteCounters` in            |
|                               | `last_write` of what has a gradient | parameters/values.py)                     |
| the engine, a load            | `bumps`, all `last_write`s          | is refused                                |
| code, also through `.data`    | torch's version counters            | is not: what it reads has the old values, |
|                               |                                     | or as `.data` of plain PyTorch the new    |
| a module, in its forward pass | nothing: `keep_writes` gives masters| is as in plain PyTorch                    |
|                               | what the whole has already          |                                           |
"""

from __future__ import annotations

from collections.abc import Iterable

from onefold.memory import storage_of
from onefold.runtime.flat import Entry
from onefold.runtime.gather import Gatherer
from onefold.runtime.parameters.access import point
from onefold.runtime.storage import refuse_written
from onefold.runtime.unit import Unit


def refresh(gather: Gatherer, units: Iterable[Unit]) -> None:
    """Gather the stale resident copies among `units`, in the order of use. Release units that a
    forward pass without a backward pass has left gathered, if their masters have new values now.
    """
    for unit in units:
        if unit.ungathered or not any(flat.stale for flat in unit.flats):
            continue
        if unit.resident:
            gather.wait(unit)
            gather.launch(unit)
        elif not unit.in_use and not gather.progress.backward_open:
            gather.release(unit, kept_too=True)


# -- what a forward pass writes to its parameters --------------------------------------------------
#
# Parameters that a module writes to inside its forward pass: a norm constraint, a clamp.
#
# In a forward pass the whole parameter lies in a buffer that goes back to the pool when the unit is
# released. What was written there would be lost. So the engine looks for writes when the forward pass
# of a unit ends, and copies this rank's part of what was written into its masters.
#
# | how it was written                               | how that shows                                                      |
# |--------------------------------------------------|---------------------------------------------------------------------|
# | `self.weight.clamp_()` under no_grad             | the parameter's version counter                                     |
# | `self.weight.data.clamp_()`                      | that of the alias that all who read `.data` share (`Entry.alias`)   |
# | `self.weight.data = renorm(self.weight.data)`    | the setter says so (`Whole`); the parameter lies in other memory    |
#
# All ranks have to write the same, as under DDP.


def keep_writes(unit: Unit) -> None:
    """Copy what was written to a unit's parameters into the masters. Called at the end of the
    unit's forward pass, while its parameters are whole.

    Raises:
        RuntimeError: parameters that are stored off the device or travel encoded were written to.
    """
    for flat in unit.flats:
        full, written = flat.full, list[Entry]()
        if full is None or flat.unsharded:
            continue
        for entry in flat.entries:
            version, alias = entry.local._version, entry.alias
            if entry.box is not None:  # a write to a DTensor counts there
                version += entry.compute._version
            if version == entry.seen_version and alias is None:
                continue
            if version != entry.seen_version or (alias is not None and alias._version):
                written.append(entry)
                if entry.slot.numel and storage_of(entry.local) != storage_of(full):
                    flat.view(full, entry).copy_(entry.local.detach())
                    point(entry.local, flat.view(full, entry))
            entry.seen_version, entry.alias = version, None
        if written and not flat.gather.exact:
            refuse_written(written)
        elif written:
            flat.storage.keep_written(full[slice(*flat.owned)], written)
            flat.gather.cached_of = -1
