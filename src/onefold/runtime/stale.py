"""Which copies of masters are stale after the masters were written to.

    master ──┬── the resident whole (stages 0 to 2)                          ► refreshed before it is used
             ├── a cached shard: secondary or encoded (runtime/gathers.py)   ► made anew by the next gather
             └── a gathered unit whose backward pass never came              ► released

Masters are written to by an optimizer step, by code outside a step (version counters tell), and by
the engine itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from onefold.memory import storage_of
from onefold.runtime.entry import Entry
from onefold.runtime.flat import Flat
from onefold.runtime.gather import Gatherer
from onefold.runtime.parameters.values import written
from onefold.runtime.parameters.write_counters import WriteCounters
from onefold.runtime.progress import Progress
from onefold.runtime.unit import State, Unit


class Copies:
    """The copies of one engine's masters."""

    def __init__(
        self,
        units: Sequence[Unit],
        entries: Sequence[Entry],
        progress: Progress,
        gather: Gatherer,
        write_counters: WriteCounters,
    ) -> None:
        self.units, self.entries, self.progress = units, entries, progress
        self.gather, self.write_counters = gather, write_counters

    def look_for_writes(self) -> None:
        """Mark copies stale if their masters were written to since the last look: by an optimizer
        step or by other code.
        """
        progress = self.progress
        trained = progress.stepped or (
            progress.reduced_since_gather and not progress.optimizer_seen
        )
        progress.stepped = progress.reduced_since_gather = False
        for unit in self.units:
            self._look_at(unit, trained)

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
                flat.stale, flat.last_step = _is_copy(flat), self.write_counters.count
                flat.gather.masters_written()
                flat.storage.masters_written()
            self._let_go(unit)
            if unit.resident:
                self._note(unit)

    def _look_at(self, unit: Unit, trained: bool) -> None:
        """Mark the unit's copies stale if its masters were written to. `trained`: an optimizer has
        stepped since the last look.
        """
        stays = (
            unit.index in self.gather.kept_gathered or not self.gather.recipe.reshard_after_forward
        )
        looked_at = unit.resident or stays or any(f.gather.cached is not None for f in unit.flats)
        for flat in unit.flats if looked_at else ():
            versions = sum(written(e.param) for e in flat.entries)
            # Always called, whatever this rank's counters say: it updates `last_step`
            stepped = trained and _stepped(flat)
            written_to = versions != flat.versions or stepped
            flat.versions, flat.stale = versions, _is_copy(flat) and (flat.stale or written_to)
            if written_to:
                flat.gather.masters_written()
                self._let_go(unit)
        if unit.resident:
            self._note(unit)
            if unit.state is State.STALE:
                for flat in unit.flats:
                    # The refresh that follows brings the copy up to this write
                    flat.refreshed = self.write_counters.count if flat.stale else flat.refreshed

    def _let_go(self, unit: Unit) -> None:
        """Release the unit if a forward pass without a backward pass left it gathered: its masters
        have new values now.
        """
        if (
            not unit.resident
            and not unit.ungathered
            and not unit.depth
            and not self.progress.backward_open
        ):
            self.gather.release(unit)

    def _note(self, unit: Unit) -> None:
        self.gather.wait(unit)
        if unit.state is State.GATHERED and any(flat.stale for flat in unit.flats):
            unit.move(State.STALE, self.progress.step)


def _stepped(flat: Flat) -> bool:
    """Whether the last optimizer step may have stepped `flat`.

    All ranks get the same answer, including a rank that owns nothing of `flat` and so has no
    version counter to go by. Parameters that are frozen now were stepped if they got a gradient
    before.
    """
    before, flat.last_step = flat.last_step, max(entry.last_write for entry in flat.entries)
    return bool(flat.runs) or flat.last_step > before


def _is_copy(flat: Flat) -> bool:
    """Whether the resident whole is a copy of masters, at least of other ranks' masters. Otherwise
    it is the masters themselves (stage 0 in one dtype), and cannot be stale.
    """
    if not flat.resident or flat.full is None:
        return False
    return not (flat.whole_master and storage_of(flat.full) == storage_of(flat.master))
