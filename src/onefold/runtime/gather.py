"""Gathering and releasing units, ahead of use and on demand.

    forward    use 0   use 1   use 2          backward  use 2   use 1   use 0
    wire       g0 g1   g2      ·              wire      g1      g0      ·        (prefetch = 1)
    memory     [0 ]1   [1 ]2   [2 ]     2     memory    [2 ]1   [1 ]0   [0 ]

[Note: every rank joins every gather] Both passes walk an agreed order of units. At first this is
the order in which the model registers them. After the first step in which all ranks saw the same
order, it is the order that they saw. A rank that takes another branch and passes over a unit still
joins the gather of that unit, and drops the result. So ranks may use different units, as long as
each uses its units in the agreed order. A unit that the order does not foresee is gathered on
demand, and then all ranks must gather it at the same point.

[Note: last units stay] The backward pass begins with the unit that the forward pass used last and
the units that enclose it. These stay gathered between the two passes. The order seen in the first
step tells which units they are (`last_units` in runtime/schedule.py), so the first step itself still
releases them. Every later pass over the whole model that records gradients keeps all of them on
every rank, including those that a rank did not use. They are released together, at points that
every rank passes: at the next forward pass, before an optimizer steps, at the end of any backward
pass, and when masters are written to (which all ranks do alike). So every rank knows what the others hold, and all ranks
gather in the same order. They are also released when the whole autograd graph of the pass is freed,
because no backward pass can follow then. Freeing a part of the graph releases nothing: ranks may
drop different outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from onefold.memory import GATHERED, storage_of
from onefold.memory.pool import TierError
from onefold.recipe.core import LARGE_TRAFFIC, SMALL_TRAFFIC
from onefold.runtime import differentiate
from onefold.runtime.differentiate import tensors_in
from onefold.runtime.flat import Flat
from onefold.runtime.gather_paths import CopyStream
from onefold.runtime.parameters.values import written
from onefold.runtime.saved_tensors import CachedCasts, saving
from onefold.runtime.schedule import Walk, backwards
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
        self.sharded = [u for u in self.units if not u.resident]
        foreseen = [u for u in self.sharded if not u.revisited]
        self.forward_order, self.learned = [u.index for u in foreseen], False
        self.backward_order = backwards([u for u in foreseen if not u.forward_only])
        self.kept_last: frozenset[int] = frozenset()  # see [Note: last units stay]
        # The last units that wait for their backward pass: index -> how often their masters
        # had been written to when the forward pass ended
        self.awaiting_backward: dict[int, int] = {}
        # The pass that left them gathered. Kept for the callback of the weak reference
        self.awaited_pass: weakref.ref[Recorded] | None = None
        self.forward_log: list[int] = []
        self.backward_log: list[int] = []
        self.forward_walk: Walk | None = None
        self.backward_walk: Walk | None = None
        self.held_back = False  # `pass_by` has put off a unit
        self.unwanted: list[Unit] = []
        self.gathered: dict[int, Unit] = {}  # gathered or being gathered, by index
        # This pass released a unit although the recipe keeps units for backward. A re-entrant
        # checkpoint does so: its part runs without gradients, and gathers the unit again later
        self.released_early = False
        self.by_storage: dict[int, tuple[Unit, Flat]] = {}
        self.ahead = self.recipe.units_ahead(self.group.topology.two_levels)
        self.reads_ahead = any(
            flat.storage.reads_ahead for unit in self.sharded for flat in unit.flats
        )
        # A gather may begin with a copy: from the host, or a cast. Copy and gather then run on the
        # stream of the copies up. The computation goes on, and waits where the unit is used.
        self.on_copy_stream: CopyStream = (
            self.transfers.up.on_stream if self.transfers.up.asynchronous else nullcontext
        )
        # Where torch.autocast may cast gathered parameters, see runtime/saved_tensors.py
        fp32 = any(f.dtypes.compute == torch.float32 for u in self.sharded for f in u.flats)
        self.casts = CachedCasts(resources.device) if fp32 else None
        self._hooks: Any = None
        self.reached = 0  # how often a backward pass has reached the output of a unit
        # Units that stay gathered between passes without gradients (runtime/state/start.py)
        self.kept_gathered: frozenset[int] = frozenset()
        self.staying: frozenset[int] = frozenset()  # those of them that stay after this pass

    # -- passes ------------------------------------------------------------------------------------

    def begin_forward(self, is_root: bool) -> None:
        self.released_early = False
        self.release_last_units()  # their backward pass did not come, or comes after this forward pass
        if self.kept_gathered:
            self.staying = frozenset() if torch.is_grad_enabled() else self.kept_gathered
            self.gather_kept() if self.staying else self.release_kept()
        if self.sharded:
            self.forward_walk = Walk(self.forward_order) if is_root else None
            self.forward_log = []
            if torch.is_grad_enabled():
                differentiate.refuse_transforms()
                self._hooks = saving(self)
                self._hooks.__enter__()

    def end_forward(self, is_root: bool, aborted: bool) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None
        for unit in self.units if not aborted else ():
            self.wait(unit)  # a refreshed copy that this rank did not use
        if not self.sharded:
            return
        turns = self._keeps_last and not aborted and self.group.broken is None
        if self.forward_walk is not None and not aborted:
            for index in self.forward_walk.rest():
                self.join(self.units[index])
        self.forward_walk = None
        keep = self._keeps_for_backward and not aborted
        for unit in self.sharded:
            unit.borrowed = False
            if unit.lent:  # the pass of another model ends later
                continue
            if turns and unit.index in self.kept_last and not unit.ungathered:
                self.wait(unit)  # it may have been joined and not used
                unit.claimed = False
                self.awaiting_backward[unit.index] = _writes(unit)
                continue
            if unit.index in self.staying and self.group.broken is None:
                unit.claimed = False
                continue
            # Where units stay gathered for the backward pass, those that this rank joined and did
            # not use stay too. Other ranks use them: then all ranks hold the unit, and no rank has
            # to gather it in the backward pass.
            if (
                unit.state is not State.SHARDED
                and not (keep and (unit.claimed or not self.released_early))
                and not self.progress.backward_open
            ):
                self.release(unit)
        self.unwanted.clear()
        self.staying = frozenset()
        self.pool.drain()

    def gather_kept(self) -> None:
        """Launch the gathers of the units that stay gathered and are not gathered yet."""
        for unit in self.sharded:
            if unit.index in self.kept_gathered and unit.ungathered:
                self.launch(unit)

    def release_kept(self) -> None:
        for unit in self.sharded:
            if unit.index in self.kept_gathered and not unit.ungathered and not unit.depth:
                self.release(unit)
        self.pool.drain()  # a buffer made under inference_mode is of no use outside

    def release_last_units(self) -> None:
        """Release the units that wait for a backward pass. Called at points that all ranks pass."""
        self.awaited_pass = None
        if self.awaiting_backward:
            for index in sorted(self.awaiting_backward):
                self.release(self.units[index])
            self.pool.drain()

    def release_when_gone(self, recorded: Recorded) -> None:
        """Release the units that wait for a backward pass when `recorded` dies: none can come."""
        seen = weakref.ref(self)

        def gone(_: weakref.ref[Recorded]) -> None:
            if (gather := seen()) is not None and not (
                gather.progress.closed or gather.progress.backward_open
            ):
                gather.release_last_units()

        self.awaited_pass = weakref.ref(recorded, gone) if self.awaiting_backward else None

    def begin_backward(self) -> None:
        self.backward_log, self.held_back = [], False
        self.backward_walk = None
        for index, writes in sorted(self.awaiting_backward.items()):
            # Gather it again: this backward pass uses the new values of all units
            if _writes(self.units[index]) != writes:
                self.release(self.units[index])
        if not self.progress.differentiating:
            self.foresee_backward()

    def foresee_backward(self) -> None:
        """Prepare the walk of this backward pass along the agreed order."""
        # The agreed order is that of passes over the whole model. After passes over a part of it,
        # units are gathered on demand. Units that every rank still holds need no gather and are not
        # in the walk. The last units are in it: if the pass skips one of them, `acquire` has
        # to notice, since their reduction waits for that.
        order = [
            index
            for index in self.backward_order
            if self.units[index].ungathered or index in self.awaiting_backward
        ]
        self.backward_walk = walk = Walk(order) if self.progress.root_graphs else None
        if walk is not None and self.learned:
            # A re-entrant checkpoint may have recomputed before the first gradient came. Every rank
            # gathered its units on demand and has released them: they are not to be joined
            for index in self.backward_log:
                walk.reach(index)
                walk.use(index)

    def join_rest_of_backward(self) -> None:
        """At the end of a backward pass, join the gathers that other ranks may have launched."""
        if self.backward_walk is not None:
            for index in self.backward_walk.rest():
                self.join(self.units[index])

    def end_backward(self) -> None:
        self.backward_walk = None
        for unit in self.sharded:
            unit.borrowed = unit.by_hand = False
            if unit.state is not State.SHARDED and unit.depth == 0:
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
            self.forward_walk is not None
            and self.learned
            and self.progress.graded
            and not self.progress.backward_open
        )

    # -- one unit ----------------------------------------------------------------------------------

    def acquire(self, unit: Unit, backward: bool) -> None:
        """Gather the unit and wait for it; launch the gathers of the units that come next."""
        if unit.resident:
            self.wait(unit)
            return
        walk = self.backward_walk if backward else self.forward_walk
        if backward and unit.tile and unit.depth and not self.learned:
            # This tile is recomputed. Recomputation uses the order of the forward pass, which the
            # backward order lacks in the first step, so every rank gathers the tile on demand
            walk = None
        passed: list[Unit] = []
        if unit.ungathered or (backward and unit.index in self.awaiting_backward):
            passed = [self.units[index] for index in walk.reach(unit.index)] if walk else []
            for other in passed:
                self.join(other)
            if unit.ungathered:
                self.launch(unit)
        if backward and (passed or self.held_back):
            self.held_back = False
            self.passed_over([u for u in passed if not u.encloses(unit)])
        self.wait(unit)
        if not unit.claimed:
            unit.claimed = True
            (self.backward_log if backward else self.forward_log).append(unit.index)
            if backward:
                self.awaiting_backward.pop(unit.index, None)
                self._sweep(unit)
            if walk:
                self._skip([self.units[i] for i in walk.use(unit.index)], unit, backward)
            self._reap(unit if backward else None)
            if walk and self.learned:
                self._look_ahead(walk)

    def _look_ahead(self, walk: Walk) -> None:
        waiting = [
            u for u in self.gathered.values() if not u.claimed and u.index not in self.staying
        ]
        ahead, nbytes = len(waiting), sum(u.gathered_bytes for u in waiting)
        while self.ahead and (index := walk.next()) is not None:
            unit = self.units[index]
            if index in self.awaiting_backward:  # gathered, and counted in `waiting`
                walk.at += 1
                continue
            nbytes += unit.gathered_bytes
            if ahead >= self.ahead and (nbytes > SMALL_TRAFFIC or unit.tile):
                break
            if ahead and nbytes > LARGE_TRAFFIC:
                break
            walk.at += 1
            if unit.ungathered:
                self.launch(unit)
                ahead += 1
        # A disk is slower than the wire: start to read one unit further ahead
        if self.ahead and self.reads_ahead:
            for index in walk.order[walk.at : walk.at + 1]:
                self.fetch(self.units[index])

    def join(self, unit: Unit) -> None:
        """Take part in a gather that other ranks may need. See [Note: every rank joins every
        gather].
        """
        if unit.ungathered:
            self.launch(unit)
            self.unwanted.append(unit)
        elif (
            self.awaiting_backward.pop(unit.index, None) is not None
        ):  # a backward pass went past it
            self.unwanted.append(unit)

    def _skip(self, units: list[Unit], using: Unit, backward: bool) -> None:
        """Mark as unwanted those of `units` that were gathered ahead and not used. Their turn was
        before `using`.
        """
        joined = {u.index for u in self.unwanted}
        stay = joined | self.staying
        ahead = [
            u
            for u in units
            if not (u.claimed or u.ungathered or u.index in stay or using.encloses(u))
        ]
        for unit in ahead:
            self.awaiting_backward.pop(unit.index, None)
        self.unwanted += ahead
        if backward and ahead:
            self.passed_over([u for u in ahead if not u.encloses(using)])

    def pass_by(self, unit: Unit) -> bool:
        """Join the gather of a unit that this rank does not use in this backward pass. Called
        before this rank waits for the reduction of the ranks that do use it.

        Returns False, and joins nothing, if this rank has yet to use another unit that comes before
        it in the order. Joining goes through the order, so that other unit would be joined too, and
        dropped before its use. This happens behind frozen units: they have no gradient that the
        reductions wait for, so the turns of reductions get ahead of the pass. `passed_over` is
        called again when the pass has come further.
        """
        walk = self.backward_walk
        if walk is None or unit.index not in walk.order[walk.at :]:
            return True
        there = walk.order.index(unit.index, walk.at)
        before = [self.units[index] for index in walk.order[walk.at : there]]
        if any(u.calls and u.index not in self.backward_log for u in before):
            self.held_back = True
            return False
        for index in (*walk.reach(unit.index), unit.index):
            self.join(self.units[index])
        return True

    def _reap(self, inside: Unit | None) -> None:
        """Release the units that were joined and not used. In a backward pass, units that enclose
        the unit in use, or lie inside it, stay: their turn may still come.
        """
        if inside is None and self._keeps_for_backward:
            return
        if inside is None and self._keeps_last:  # all ranks keep the last units
            self.unwanted = [u for u in self.unwanted if u.index not in self.kept_last]
        around = [
            u
            for u in self.unwanted
            if inside is not None and (u.encloses(inside) or inside.encloses(u))
        ]
        for unit in self.unwanted:
            if not unit.claimed and not unit.ungathered and unit not in around:
                self.release(unit)
        self.unwanted = around

    def _sweep(self, using: Unit) -> None:
        # Two kinds of units give no sign when the backward pass is done with them: recomputed ones
        # (their tensors are saved without handles) and frozen ones (no gradient comes). They are
        # released here, when another unit is acquired for the next recomputation. Between two
        # recomputations the backward pass reaches the output of some unit, which raises `reached`.
        # A unit with the present `reached` belongs to the recomputation under way and stays.
        for _, unit in sorted(self.gathered.items()):
            if unit is not using and unit.claimed and unit.recomputed_at != self.reached:
                unit.recomputed_at = None
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
            flat.stale = False
            full = self.buffer_of(unit, flat)
            on_copy_stream = self.on_copy_stream if flat.storage.copies else nullcontext
            under_way = flat.gather.start(
                full, partial(self.put, flat, full), context, on_copy_stream
            )
            if under_way is not None:
                unit.pending.append(under_way)
            if on_copy_stream is not nullcontext:
                unit.arriving.append(self.transfers.up.mark())

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
        if self.casts is not None:
            self.casts.fill(unit)

    def _order_after_copies(self, unit: Unit) -> None:
        """Make later work on the current stream wait for the unit's copies to the device."""
        for ticket in unit.arriving:
            self.transfers.up.order(ticket)
        unit.arriving.clear()

    def release(self, unit: Unit) -> None:
        if self.group.broken is None:
            self.wait(unit)
        elif unit.state is State.GATHERING:  # its bytes will never come
            unit.pending.clear()
            self._order_after_copies(unit)
            unit.move(State.GATHERED, self.progress.step_count)
        unit.claimed, unit.recomputed_at = False, None
        unit.move(State.SHARDED, self.progress.step_count)
        self.gathered.pop(unit.index, None)
        self.awaiting_backward.pop(unit.index, None)
        if self.casts is not None:
            self.casts.drop(unit)
        for flat in unit.flats:
            flat.storage.forget()
            # On one rank, a unit may have frozen parameters, which stay, and others that are cast
            if flat.resident:
                continue
            full, flat.full = flat.full, None
            if full is not None:
                self.by_storage.pop(storage_of(full), None)
                flat.point_at(None)
                self.pool.give(full)

    def after_forward(self, unit: Unit, output: Any) -> None:
        """Release the unit after its forward pass. It stays if the agreed order uses it again next,
        if it is kept for later passes, if other code has read its parameters, or if its output lies
        in a gathered buffer.
        """
        if unit.resident or unit.state is not State.GATHERED or unit.borrowed or unit.lent:
            return
        if (
            self.forward_walk is not None
            and self.learned
            and self.forward_walk.next() == unit.index
        ):
            self.forward_walk.at += 1
            unit.claimed = False
            return
        if unit.index in self.staying or (self._keeps_last and unit.index in self.kept_last):
            unit.claimed = False
            return
        if self._keeps_for_backward:
            return
        self.released_early = True
        if not any(storage_of(t) in self.by_storage for t in tensors_in(output)):
            self.release(unit)
        # Else `end_forward` releases it: code of the pass may still read the output

    def is_done(self, unit: Unit) -> bool:
        """Whether this backward pass has used the unit and waits for nothing more of it: no saved
        tensor, no gradient. Then reaching a further output of its forward pass (a cache of keys
        and values) is no reason to gather it again.
        """
        return unit.index in self.backward_log and not unit.handles and not unit.waiting

    def maybe_release(self, unit: Unit) -> None:
        """Release the unit if its backward is over: no saved handle, no gradient awaited, no
        forward pass open.
        """
        done = unit.looks_up_only or not (
            unit.handles
            or unit.waiting
            or ((unit.recomputed_at is not None or unit.by_hand) and unit.holds_frozen)
        )
        if (
            self.progress.backward_open
            and unit.claimed
            and not unit.resident
            and done
            and not unit.depth
        ):
            self.release(unit)


differentiate.keep_hooks_from_compiler(Gatherer.release_when_gone)


def _writes(unit: Unit) -> int:
    """Return how often the unit's masters have been written to, as far as version counters tell."""
    return sum(written(entry.param) for entry in unit.entries)
