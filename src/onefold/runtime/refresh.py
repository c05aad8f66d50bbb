"""Which copies of masters are stale after the masters were written to.

    master ──┬── the resident whole (stages 0 to 2)                          ► refreshed before it is used
             ├── a cached shard: secondary or encoded (runtime/gather_paths.py)   ► made anew by the next gather
             └── a gathered unit whose backward pass never came              ► released

Masters are written to by an optimizer step, by code outside a step (torch's version counters tell),
and by the engine itself. All writes are counted together (`WriteCounters`). A flat buffer has the
number of the last write to its masters (`epoch`) and of the last that its resident copy has
(`copied`): the copy is stale while `copied < epoch`. Stage 3 has no such copies: each gather begins
with the masters as they are. Only the units that stay gathered until their backward pass, or that
`keep_gathered` keeps, must notice a write.

| who writes                    | raises                       | noticed by                          | a late backward pass          |
|-------------------------------|------------------------------|-------------------------------------|-------------------------------|
| an optimizer's step           | the count, and `last_write`  | the hook after the step; here, at   | is refused (`WriteCounters`   |
|                               | of entries with a gradient   | the next forward pass               | in parameters/values.py)      |
| the engine, a load            | the count, all `last_write`s | `all_written`                       | is refused                    |
| code, also through `.data`    | torch's version counters     | `Copies._look_at`, at the next pass;| is not: what it reads has the |
|                               |                              | of kept units, `Gatherer._writes`   | old values, or as `.data` of  |
|                               |                              |                                     | plain PyTorch the new ones    |
| a module, in its forward pass | counters of the whole        | `keep_writes`, when it returns      | is as in plain PyTorch        |
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import TYPE_CHECKING

import torch

from onefold.comm import Group
from onefold.memory import GATHERED, nbytes_of, storage_of
from onefold.recipe.core import SMALL_TRAFFIC
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.gather import Gatherer
from onefold.runtime.gather_paths import Gather
from onefold.runtime.parameters.values import written
from onefold.runtime.parameters.whole import point
from onefold.runtime.storage import refuse_written
from onefold.runtime.unit import State, Unit

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine


class Copies:
    """The copies of one engine's masters."""

    def __init__(self, engine: Engine) -> None:
        self.units, self.entries, self.progress = engine.units, engine.entries, engine.progress
        self.gather, self.write_counters = engine.gather, engine.write_counters

    def look_for_writes(self) -> None:
        """Mark copies stale if their masters were written to since the last look: by an optimizer
        step or by other code.
        """
        progress = self.progress
        trained = progress.stepped or (
            progress.reduced_since_gather and not progress.optimizer_seen
        )
        for unit in self.units:
            self._look_at(unit, trained)
        # Not before: a look that was interrupted is made again
        progress.stepped = progress.reduced_since_gather = False

    def look_before_use(self, unit: Unit) -> None:
        """Do the same for one unit, or for all units if an optimizer may have stepped."""
        progress = self.progress
        if progress.stepped or (progress.reduced_since_gather and not progress.optimizer_seen):
            self.look_for_writes()
        else:
            self._look_at(unit, trained=False)

    def all_written(self) -> None:
        """Mark every copy stale: the engine, or a load, has written to the masters."""
        self.write_counters.all_of(self.entries)
        for unit in self.units:
            for flat in unit.flats:
                self._written(flat)
                flat.storage.masters_written()
            self._let_go(unit)
            if unit.resident:
                self._note(unit)

    def _written(self, flat: Flat) -> None:
        """Note a write to the masters of `flat`."""
        flat.epoch = self.write_counters.count
        if not _is_copy(flat):
            flat.copied = flat.epoch
        flat.gather.fresh = False

    def _look_at(self, unit: Unit, trained: bool) -> None:
        """Mark the unit's copies stale if its masters were written to. `trained`: an optimizer has
        stepped since the last look.
        """
        stays = unit in self.gather.kept or not self.gather.recipe.reshard_after_forward
        looked_at = unit.resident or stays or any(f.gather.cached is not None for f in unit.flats)
        for flat in unit.flats if looked_at else ():
            versions = sum(written(e.param) for e in flat.entries)
            if versions != flat.versions or (trained and _stepped(flat)):
                if flat.epoch == self.write_counters.count:  # no step has counted this write
                    self.write_counters.count += 1
                self._written(flat)
                self._let_go(unit)
                flat.versions = versions
        if unit.resident:
            self._note(unit)

    def _let_go(self, unit: Unit) -> None:
        """Release the unit if a forward pass without a backward pass left it gathered: its masters
        have new values now.
        """
        if (
            not unit.resident
            and not unit.ungathered
            and not unit.in_use
            and not self.progress.backward_open
        ):
            kept, unit.kept = unit.kept, False
            self.gather.release(unit)
            unit.kept = kept  # from its next gather on

    def _note(self, unit: Unit) -> None:
        self.gather.wait(unit)
        if unit.state is State.GATHERED and any(flat.stale for flat in unit.flats):
            unit.move(State.STALE)


def _stepped(flat: Flat) -> bool:
    """Whether the last optimizer step may have stepped `flat`.

    All ranks get the same answer, including a rank that owns nothing of `flat` and so has no
    version counter to go by. Parameters that are frozen now were stepped if they got a gradient
    before.
    """
    return flat.travels or any(entry.last_write > flat.epoch for entry in flat.entries)


def _is_copy(flat: Flat) -> bool:
    """Whether the resident whole is a copy of masters, at least of other ranks' masters. Otherwise
    it is the masters themselves (stage 0 in one dtype), and cannot be stale.
    """
    if not flat.resident or flat.full is None:
        return False
    return not (flat.whole_master and storage_of(flat.full) == storage_of(flat.master))


# -- refreshing resident copies --------------------------------------------------------------------
#
# They are gathered again once masters have been written to.


#: Resident copies of at most so many bytes are refreshed together, in one message.
SMALL = 64 << 10


def refresh(gather: Gatherer) -> None:
    """Launch the gathers of all stale resident copies: first the small ones, together in one
    message, then the others in the order of use.
    """
    stale = [unit for unit in gather.units if unit.resident and unit.state is State.STALE]
    together = _small(gather, stale)
    if len(together) > 1:
        _launch_together(gather, together)
    for unit in stale:
        if unit.state is State.STALE:
            gather.launch(unit)


def _small(gather: Gatherer, units: list[Unit]) -> list[Unit]:
    """Return those of `units` whose gathers go in one message.

    Their bytes are in memory twice until the first of them is used. So there are at most as many of
    them as small reductions may have under way.
    """
    recipe, chosen, nbytes = gather.recipe, [], 0
    if not (recipe.overlap and recipe.in_flight and not gather.transfers.up.asynchronous):
        return []
    one: torch.dtype | None = None
    for unit in units:
        flats = [flat for flat in unit.flats if flat.stale]
        one = one or flats[0].dtypes.compute
        size = sum(flat.layout.numel * one.itemsize for flat in flats)
        if (
            size <= SMALL
            and nbytes + size <= 3 * SMALL_TRAFFIC
            and all(flat.dtypes.compute == one and type(flat.gather) is Gather for flat in flats)
            and not any(flat.whole_master for flat in flats)
            and all(flat.owners_group.joins_messages for flat in flats)
        ):
            chosen.append(unit)
            nbytes += size
    return chosen


def _launch_together(gather: Gatherer, units: list[Unit]) -> None:
    # One message for each group of owners: on a mesh, the flat buffers of a unit may have several
    by_group: dict[Group, list[tuple[Unit, Flat]]] = {}
    for unit in units:
        unit.move(State.GATHERING)
        for flat in unit.flats:
            if flat.stale:
                by_group.setdefault(flat.owners_group, []).append((unit, flat))
    for group, stale in by_group.items():
        fulls, places = [], []
        for unit, flat in stale:
            full = gather.buffer_of(unit, flat)
            flat.gather.put(full)
            fulls.append(full)
            places.append(gather.progress.context("all-gather", unit.name))
        # A number made of the units: ranks that send other units together cannot match this message
        number = zlib.crc32(repr([flat.index for _, flat in stale]).encode())
        nbytes = sum(nbytes_of(full) for full in fulls)
        gather.memory.add(GATHERED, nbytes)
        pending = group.all_gather_together(fulls, places, number)
        pending.then(partial(gather.memory.add, GATHERED, -nbytes))
        for unit in dict.fromkeys(unit for unit, _ in stale):
            unit.pending.append(pending)
        for _, flat in stale:
            flat.copied = flat.epoch


# -- what a forward pass writes to its parameters --------------------------------------------------
#
# Parameters that a module writes to inside its forward pass: a norm constraint, a clamp.
#
# In a forward pass the whole parameter lies in a buffer that goes back to the pool when the unit is
# released. What was written there would be lost. So the engine looks for writes when the forward pass
# of a unit ends, and copies this rank's part of what was written into its masters.
#
# | how it was written                                   | how that shows                                                                  |
# |------------------------------------------------------|---------------------------------------------------------------------------------|
# | `self.weight.clamp_()` under no_grad                 | the parameter's version counter                                                 |
# | `self.weight.data = renorm(self.weight.data)`        | the parameter lies in other memory                                              |
# | `self.weight.data.clamp_()`                          | this rank's part differs from the masters: compared in the first passes, and in |
# |                                                      | all later ones once a module has read `.data` (`Whole`)     |
#
# All ranks have to write the same, as under DDP.


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
        versions = sum([entry.local._version for entry in flat.entries])
        if (
            versions == flat.seen_versions
            and not flat.written_in_forward
            and flat.compared >= FIRST
        ):
            continue  # an assignment to `.data` sets the flag too (`Whole`)
        flat.seen_versions = versions
        written = []
        for entry in flat.entries:
            version = entry.local._version
            if version != entry.seen_version:
                entry.seen_version = version
                written.append(entry)
            if entry.slot.numel and storage_of(entry.local) != storage_of(full):
                flat.view(full, entry).copy_(entry.local.detach())
                point(entry.local, flat.view(full, entry))
                written.append(entry)
        if written or flat.written_in_forward or flat.compared < FIRST:
            flat.compared += 1
            _keep(flat, full, written)


def _keep(flat: Flat, full: torch.Tensor, written: list[Entry]) -> None:
    if flat.before_data:
        written = [*written, *flat.written_by_data()]
    if not flat.gather.exact:
        refuse_written(written)
    elif flat.storage.keep_written(full[slice(*flat.owned)], written):
        flat.written_in_forward = True
