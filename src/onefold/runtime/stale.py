"""When masters have new values: which copies of them are out of date.

    master ──┬── the whole that rests here (stages 0 to 2)                   ► made anew before it is used
             ├── a second copy, or the own part encoded (runtime/gathers.py) ► made anew by the next gather
             └── a gathered unit that no backward pass came for              ► let go

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
        """Copies are stale once the masters were written to: an optimizer stepped, or somebody
        wrote to them.
        """
        progress = self.progress
        trained = progress.stepped or (
            progress.reduced_since_gather and not progress.optimizer_seen
        )
        progress.stepped = progress.reduced_since_gather = False
        for unit in self.units:
            self._look_at(unit, trained)

    def look_before_use(self, unit: Unit) -> None:
        """The same for one unit, unless an optimizer may have stepped all."""
        progress = self.progress
        if progress.stepped or (progress.reduced_since_gather and not progress.optimizer_seen):
            self.look_for_writes()
        else:
            self._look_at(unit, trained=False)

    def all_written(self) -> None:
        """The engine, or a load, has written to the masters: every copy is out of date."""
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
        """`trained`: an optimizer has stepped since the last look."""
        stays = (
            unit.index in self.gather.kept_gathered or not self.gather.recipe.reshard_after_forward
        )
        looked_at = unit.resident or stays or any(f.gather.cached is not None for f in unit.flats)
        for flat in unit.flats if looked_at else ():
            versions = sum(written(e.param) for e in flat.entries)
            # Looked at on every rank, whatever its counters say
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
                    # By the refresh that follows
                    flat.refreshed = self.write_counters.count if flat.stale else flat.refreshed

    def _let_go(self, unit: Unit) -> None:
        """A forward pass that no backward pass followed may have left the unit gathered, of masters
        that have new values now.
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
    """An optimizer has stepped: whether it may have stepped `flat`. The same on all ranks, also on
    one that owns nothing of it and has no version counter to tell by.

    What is frozen by now was stepped if it had got its gradient before.
    """
    before, flat.last_step = flat.last_step, max(entry.last_write for entry in flat.entries)
    return bool(flat.runs) or flat.last_step > before


def _is_copy(flat: Flat) -> bool:
    """The whole that rests here is a copy of masters, of other ranks' at least. Else it is the
    masters themselves (stage 0 in one dtype), and cannot be stale.
    """
    if not flat.resident or flat.full is None:
        return False
    return not (flat.whole_master and storage_of(flat.full) == storage_of(flat.master))
