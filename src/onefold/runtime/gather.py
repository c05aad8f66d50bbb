"""Gathering and releasing units, ahead of use and on demand, by the agreed schedule
(runtime/schedule.py). Who holds a gathered unit, and until when, is in the table of `Leases`
(runtime/unit.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from onefold.memory import GATHERED, storage_of
from onefold.memory.pool import TierError
from onefold.runtime import differentiate
from onefold.runtime.boxes import local_of
from onefold.runtime.differentiate import tensors_in
from onefold.runtime.flat import Flat
from onefold.runtime.gather_paths import StreamContext
from onefold.runtime.parameters.values import written
from onefold.runtime.saved import saving
from onefold.runtime.schedule import Schedule, Walk
from onefold.runtime.unit import State, Unit

if TYPE_CHECKING:
    from onefold.runtime.resources import Resources


class Recorded:
    """A token that lives as long as any part of one pass's autograd graph. The hooks on the outputs
    of the pass's units hold it.

    by_hand: units to gather when the backward pass reaches the pass's output; see [Note: kept by
    hand] in runtime/forward.py.
    """

    __slots__ = ("__weakref__", "by_hand")

    def __init__(self) -> None:
        self.by_hand: list[Unit] = []


class Gatherer:
    """Gathers, keeps and releases the units of one engine."""

    def __init__(
        self,
        units: list[Unit],
        resources: Resources,
        schedule: Schedule,
        backward_event: Callable[[], None],
        passed_over: Callable[[list[Unit]], None],
    ) -> None:
        """
        Args:
            backward_event: called when a backward pass reaches something of this engine.
            passed_over: called with the units that a backward pass went past without using them.
        """
        self.units, self.backward_event, self.passed_over = units, backward_event, passed_over
        self.recipe, self.group, self.progress = (
            resources.recipe,
            resources.group,
            resources.progress,
        )
        self.memory, self.pool, self.transfers = (
            resources.memory,
            resources.pool,
            resources.transfers,
        )
        self.schedule, self.sharded = schedule, schedule.sharded
        # The pass that left the last units gathered. Kept for the callback of the weak reference
        self.awaited_pass: weakref.ref[Recorded] | None = None
        self.unwanted: list[Unit] = []
        self.gathered: dict[int, Unit] = {}  # gathered or being gathered, by index
        # This pass released a unit although the recipe keeps units for backward. A re-entrant
        # checkpoint does so: its part runs without gradients, and gathers the unit again later
        self.released_early = False
        self.by_storage: dict[int, tuple[Unit, Flat]] = {}
        # A gather may begin with a copy: from the host, or a cast. Copy and gather then run on the
        # stream of the copies up. The computation goes on, and waits where the unit is used.
        self.on_copy_stream: StreamContext = (
            self.transfers.up.on_stream if self.transfers.up.asynchronous else nullcontext
        )
        # Whether torch.autocast may cast gathered parameters
        self.holds_fp32 = any(
            f.dtypes.compute == torch.float32 for u in self.sharded for f in u.flats
        )
        self.hooks: saved_tensors_hooks | None = None  # of the forward pass under way
        self.reached = 0  # how often a backward pass has reached the output of a unit
        # Units that stay gathered between passes without gradients (runtime/state/start.py)
        self.kept_gathered: frozenset[int] = frozenset()
        self.holding = False  # between `hold` and `let_go`

    # -- passes ------------------------------------------------------------------------------------

    def begin_forward(self, over_model: bool) -> None:
        self.released_early = False
        self.release_last_units()  # their backward pass did not come, or comes after this forward pass
        if self.kept_gathered and torch.is_grad_enabled():
            self.release_kept()
        elif self.kept_gathered:
            for unit in self.sharded:
                unit.leases.kept = unit.index in self.kept_gathered
            self.gather_kept()
        if self.sharded:
            self.schedule.begin_forward(over_model)
            if torch.is_grad_enabled():
                differentiate.refuse_transforms()
                self.hooks = saving((self,))
                self.hooks.__enter__()

    def end_forward(self, aborted: bool) -> None:
        hooks, self.hooks = self.hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)
        for unit in self.units if not aborted else ():
            self.wait(unit)  # a refreshed copy that this rank did not use
        if not self.sharded:
            return
        keeps_last = self._keeps_last and not aborted and self.group.broken is None
        for unit in self.schedule.rest(self.schedule.forward_walk) if not aborted else ():
            self.join(unit)
        self.schedule.forward_walk = None
        keep = self._keeps_for_backward and not aborted
        for unit in self.sharded:
            leases, kept = unit.leases, unit.leases.kept
            leases.borrowed = leases.kept = False
            if leases.lent:  # the pass of another model ends later
                continue
            if keeps_last and unit.index in self.schedule.last and not unit.ungathered:
                self.wait(unit)  # it may have been joined and not used
                leases.used, leases.awaiting_backward = False, True
                leases.writes = _writes(unit)
                continue
            if kept and self.group.broken is None:
                leases.used = False
                continue
            # Where units stay gathered for the backward pass, those that this rank joined and did
            # not use stay too. Other ranks use them: then all ranks hold the unit, and no rank has
            # to gather it in the backward pass.
            if (
                unit.state is not State.SHARDED
                and not (keep and (leases.used or not self.released_early))
                and not self.progress.backward_open
            ):
                self.release(unit)
        self.unwanted.clear()
        self.pool.drain()

    def gather_kept(self) -> None:
        """Launch the gathers of the units that stay gathered and are not gathered yet."""
        for unit in self.sharded:
            if unit.index in self.kept_gathered and unit.ungathered:
                self.launch(unit)

    def release_kept(self) -> None:
        for unit in self.sharded:
            if unit.index in self.kept_gathered and not unit.ungathered and not unit.leases.in_use:
                self.release(unit)
        self.pool.drain()  # a buffer made under inference_mode is of no use outside

    def hold(self) -> None:
        """Keep all units gathered over passes, from their next gather until `let_go`."""
        self.holding = True
        for unit in self.sharded:
            unit.leases.held = True

    def gather_held(self) -> None:
        """Launch the gathers of the units that are held and not gathered yet, in the order of use."""
        for unit in (self.units[index] for index in self.schedule.forward):
            if unit.leases.held and unit.ungathered:
                self.launch(unit)

    def let_go(self) -> None:
        """Release the units that `hold` has gathered."""
        self.holding = False
        for unit in self.sharded:
            held, unit.leases.held = unit.leases.held, False
            if held and not unit.ungathered and not unit.leases.in_use:
                self.release(unit)
        self.pool.drain()

    def release_last_units(self) -> None:
        """Release the units that wait for a backward pass. Called at points that all ranks pass."""
        self.awaited_pass = None
        if awaiting := self._awaiting_backward():
            for unit in awaiting:
                self.release(unit)
            self.pool.drain()

    def _awaiting_backward(self) -> list[Unit]:
        return [u for _, u in sorted(self.gathered.items()) if u.leases.awaiting_backward]

    def release_when_gone(self, recorded: Recorded) -> None:
        """Release the units that wait for a backward pass when `recorded` dies: none can come."""
        seen = weakref.ref(self)

        def gone(_: weakref.ref[Recorded]) -> None:
            if (gather := seen()) is not None and not (
                gather.progress.closed or gather.progress.backward_open
            ):
                gather.release_last_units()

        self.awaited_pass = weakref.ref(recorded, gone) if self._awaiting_backward() else None

    def begin_backward(self) -> None:
        self.schedule.begin_backward()
        for unit in self._awaiting_backward():
            # Gather it again: this backward pass uses the new values of all units
            if _writes(unit) != unit.leases.writes:
                self.release(unit)
        if not self.progress.differentiating:
            self.foresee_backward()

    def foresee_backward(self) -> None:
        """Prepare the walk of this backward pass along the agreed order, which is that of passes
        over the whole model. After passes over a part of it, units are gathered on demand.
        """
        self.schedule.foresee_backward(over_model=bool(self.progress.root_graphs))

    def join_rest_of_backward(self) -> None:
        """At the end of a backward pass, join the gathers that other ranks may have launched."""
        for unit in self.schedule.rest(self.schedule.backward_walk):
            self.join(unit)

    def end_backward(self) -> None:
        self.schedule.backward_walk = None
        for unit in self.sharded:
            unit.leases.borrowed = unit.leases.by_hand = False
            if unit.state is not State.SHARDED and not unit.leases.in_use:
                self.release(unit)
        self.unwanted.clear()
        self.pool.drain()

    @property
    def _keeps_for_backward(self) -> bool:
        """Whether units stay gathered between this forward pass and its backward pass."""
        return torch.is_grad_enabled() and not self.recipe.reshard_after_forward

    @property
    def _keeps_last(self) -> bool:
        """Whether this forward pass keeps the last units. It looks at `graded`, since a
        re-entrant checkpoint runs its part of the pass without gradients.
        """
        return (
            self.schedule.forward_walk is not None
            and self.schedule.gathers_agreed
            and self.progress.graded
            and not self.progress.backward_open
        )

    # -- one unit ----------------------------------------------------------------------------------

    def acquire(self, unit: Unit, backward: bool) -> None:
        """Gather the unit and wait for it; launch the gathers of the units that come next."""
        if unit.resident:
            self.wait(unit)
            return
        schedule, leases = self.schedule, unit.leases
        walk = schedule.backward_walk if backward else schedule.forward_walk
        passed: list[Unit] = []
        if unit.ungathered or (backward and leases.awaiting_backward):
            passed = [self.units[index] for index in walk.reach(unit.index)] if walk else []
            for other in passed:
                self.join(other)
            if unit.ungathered:
                self.launch(unit)
        if backward and (passed or schedule.held_back):
            schedule.held_back = False
            self.passed_over([u for u in passed if not u.encloses(unit)])
        self.wait(unit)
        if not leases.used:
            leases.used = True
            (schedule.backward_seen if backward else schedule.forward_seen).append(unit.index)
            if backward:
                leases.awaiting_backward = False
                self._sweep(unit)
            if walk:
                self._skip([self.units[i] for i in walk.use(unit.index)], unit, backward)
            self._reap(unit if backward else None)
            if walk and schedule.gathers_agreed:
                self._look_ahead(walk)

    def gather_alone(self, unit: Unit) -> bool:
        """Gather the unit for something outside the order of passes. Collective at stage 3.

        Returns True if it was not gathered: then the caller has to release it.
        """
        alone = unit.ungathered
        if alone:
            self.launch(unit)
        self.wait(unit)
        return alone

    def _look_ahead(self, walk: Walk) -> None:
        waiting = [u for u in self.gathered.values() if not (u.leases.used or u.leases.kept)]
        for unit in self.schedule.ahead(walk, waiting):
            self.launch(unit)
        for unit in self.schedule.read_ahead(walk):
            self.fetch(unit)

    def join(self, unit: Unit) -> None:
        """Take part in a gather that other ranks may need. See [Note: every rank joins every
        gather] in runtime/schedule.py.
        """
        if unit.ungathered:
            self.launch(unit)
            self.unwanted.append(unit)
        elif unit.leases.awaiting_backward:  # a backward pass went past it
            unit.leases.awaiting_backward = False
            self.unwanted.append(unit)

    def _skip(self, units: list[Unit], using: Unit, backward: bool) -> None:
        """Mark as unwanted those of `units` that were gathered ahead and not used. Their turn was
        before `using`.
        """
        joined = {u.index for u in self.unwanted}
        ahead = [
            u
            for u in units
            if not (u.leases.used or u.leases.kept or u.ungathered or u.index in joined)
            and not using.encloses(u)
        ]
        for unit in ahead:
            unit.leases.awaiting_backward = False
        self.unwanted += ahead
        if backward and ahead:
            self.passed_over([u for u in ahead if not u.encloses(using)])

    def pass_by(self, unit: Unit) -> bool:
        """Join the gather of a unit that this rank does not use in this backward pass. Called
        before this rank waits for the reduction of the ranks that do use it.

        Returns False, and joins nothing, if this pass has yet to come further (`Schedule.up_to`).
        Then `passed_over` is called again.
        """
        units = self.schedule.up_to(unit)
        for each in units or ():
            self.join(each)
        return units is not None

    def _reap(self, inside: Unit | None) -> None:
        """Release the units that were joined and not used. In a backward pass, units that enclose
        the unit in use, or lie inside it, stay: their turn may still come.
        """
        if inside is None and self._keeps_for_backward:
            return
        if inside is None and self._keeps_last:  # all ranks keep the last units
            self.unwanted = [u for u in self.unwanted if u.index not in self.schedule.last]
        around = [
            u
            for u in self.unwanted
            if inside is not None and (u.encloses(inside) or inside.encloses(u))
        ]
        for unit in self.unwanted:
            if not unit.leases.used and not unit.ungathered and unit not in around:
                self.release(unit)
        self.unwanted = around

    def _sweep(self, using: Unit) -> None:
        # Two kinds of units give no sign when the backward pass is done with them: recomputed ones
        # (their tensors are saved without handles) and frozen ones (no gradient comes). They are
        # released here, when another unit is acquired for the next recomputation. Between two
        # recomputations the backward pass reaches the output of some unit, which raises `reached`.
        # A unit with the present `reached` belongs to the recomputation under way and stays.
        for _, unit in sorted(self.gathered.items()):
            if unit is not using and unit.leases.used and unit.leases.recomputing != self.reached:
                unit.leases.recomputing = None
                self.maybe_release(unit)

    def launch(self, unit: Unit) -> None:
        """Start the gather of every flat buffer of the unit."""
        unit.move(State.GATHERING, self.progress.step_count)
        if not unit.resident:
            self.gathered[unit.index] = unit
        context = self.progress.context("all-gather", unit.name)
        for flat in unit.flats:
            if flat.resident and not flat.stale:
                continue
            full = self.buffer_of(unit, flat)
            on_copy_stream = self.on_copy_stream if flat.storage.copies else nullcontext
            under_way = flat.gather.start(
                full, partial(self.put, flat, full), context, on_copy_stream
            )
            if under_way is not None:
                unit.pending.append(under_way)
            if on_copy_stream is not nullcontext:
                unit.arriving.append(self.transfers.up.mark())
            flat.copied = flat.epoch  # not before: a launch that was interrupted is made again

    def put(self, flat: Flat, full: torch.Tensor) -> None:
        """Copy this rank's masters into their place in the whole.

        If a disk fails while other ranks wait for this one, this rank must not stop alone. It goes
        on with the values that it has, and all ranks raise before the optimizer steps.
        """
        try:
            flat.storage.put(full)
        except TierError as error:
            if not self.progress.awaited_by_others:
                raise
            self.progress.failed(error)

    def buffer_of(self, unit: Unit, flat: Flat) -> torch.Tensor:
        """Return the buffer for the whole of `flat`; take one from the pool if it has none."""
        if flat.full is None:
            flat.full = self.pool.take(flat.layout.numel, flat.dtypes.compute, GATHERED, unit.name)
        self.by_storage[storage_of(flat.full)] = (unit, flat)
        return flat.full

    def fetch(self, unit: Unit) -> None:
        """Start reading this rank's part of the unit, if it is stored on a disk."""
        wanted = [f for f in unit.flats if f.storage.reads_ahead and f.gather.reads_masters]
        if unit.state is not State.SHARDED or not wanted:
            return
        unit.move(State.FETCHING, self.progress.step_count)
        for flat in wanted:
            self.buffer_of(unit, flat)
            flat.storage.fetch()

    def wait(self, unit: Unit) -> None:
        if unit.state is not State.GATHERING:
            return
        for pending in unit.pending:
            pending.wait()
        unit.pending.clear()
        self._order_after_copies(unit)
        unit.move(State.GATHERED, self.progress.step_count)
        for flat in unit.flats:
            if not flat.resident:
                flat.point_at(flat.full)

    def _order_after_copies(self, unit: Unit) -> None:
        """Make later work on the current stream wait for the unit's copies to the device."""
        for ticket in unit.arriving:
            self.transfers.up.order(ticket)
        unit.arriving.clear()

    def release(self, unit: Unit) -> None:
        if unit.leases.held:
            unit.leases.released()
            return
        if self.group.broken is None:
            self.wait(unit)
        elif unit.state is State.GATHERING:  # its bytes will never come
            unit.pending.clear()
            self._order_after_copies(unit)
            unit.move(State.GATHERED, self.progress.step_count)
        unit.leases.released()
        unit.move(State.SHARDED, self.progress.step_count)
        self.gathered.pop(unit.index, None)
        if self.holds_fp32:
            torch.clear_autocast_cache()  # [Note: casts are handles] in runtime/saved.py
        for flat in unit.flats:
            flat.storage.forget()
            # On one rank, a unit may have frozen parameters, which stay, and others that are cast
            if flat.resident:
                continue
            if (full := flat.full) is not None:
                # First: an interrupt may come, and what gets this address next is no weight
                self.by_storage.pop(storage_of(full), None)
                flat.point_at(None)
                flat.full = None
                self.pool.give(full)

    def after_forward(self, unit: Unit, output: Any) -> None:
        """Release the unit after its forward pass. It stays if the agreed order uses it again next,
        if it is kept for later passes, if other code has read its parameters, or if its output lies
        in a gathered buffer.
        """
        leases, walk = unit.leases, self.schedule.forward_walk
        if unit.resident or unit.state is not State.GATHERED or leases.after_forward:
            return
        if walk is not None and self.schedule.gathers_agreed and walk.next() == unit.index:
            walk.at += 1
            leases.used = False
            return
        if leases.kept or (self._keeps_last and unit.index in self.schedule.last):
            leases.used = False
            return
        if self._keeps_for_backward:
            return
        self.released_early = True
        if not any(storage_of(local_of(t)) in self.by_storage for t in tensors_in(output)):
            self.release(unit)
        # Else `end_forward` releases it: code of the pass may still read the output

    def is_done(self, unit: Unit) -> bool:
        """Whether this backward pass has used the unit and waits for nothing more of it: no saved
        tensor, no gradient. Then reaching a further output of its forward pass (a cache of keys
        and values) is no reason to gather it again.
        """
        return unit.index in self.schedule.backward_seen and not unit.leases.in_backward

    def maybe_release(self, unit: Unit) -> None:
        """Release the unit if its backward is over: nothing holds it any more."""
        if not (self.progress.backward_open and unit.leases.used and not unit.resident):
            return
        if not unit.needed_in_backward:
            self.release(unit)


differentiate.keep_hooks_from_compiler(Gatherer.release_when_gone)


def _writes(unit: Unit) -> int:
    """Return how often the unit's masters have been written to, as far as version counters tell."""
    return sum(written(entry.param) for entry in unit.entries)
