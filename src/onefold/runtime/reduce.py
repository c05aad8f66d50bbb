"""Reducing gradients while the backward pass goes on.

    backward   unit 3      unit 2      unit 1      unit 0    end
    ready        ^3          ^2          ^1          ^0
    wire         [r3 .......][r2 ....]   [r1 ....]  [r0 ...]         (in_flight = 2: the third waits for the first)
    result                    grad 3      grad 2     grad 1  grad 0

When autograd hands over a gradient, the reducer copies it into its unit's flat buffer and drops it.
Small gradients are copied several at a time, because the number of calls is what they cost. When
the unit has all its gradients, its buffer is exchanged and summed in an agreed order (see
[Note: reductions keep one order] in runtime/order.py and [Note: sums are local and in
rank order] in comm/group.py). The sums become `.grad` of the optimizer's parameters.

[Note: unused parameters] Every backward pass ends with one small exchange in which the ranks tell
each other which parameters got a gradient. A parameter that no rank used keeps `.grad is None`, as
it would in one process. A parameter that another rank used gets its gradient here too.

[Note: held sums] Where gradients are divided inside groups, micro-batches before the boundary take
only the hop inside the group. The group's sums are held, and the hop between groups carries them
once a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from onefold.memory import GRADIENTS, REDUCTION, MemoryLedger, nbytes_of
from onefold.memory.pool import TierError
from onefold.runtime.boxes import local_of
from onefold.runtime.flat import Entry, Flat, Shares
from onefold.runtime.order import Order, are_large, is_due
from onefold.runtime.parameters import gradient_hooks
from onefold.runtime.parameters.interval import disable_torch_function, get_grad, set_grad
from onefold.runtime.pending_gradients import take_pending
from onefold.runtime.reduce_paths import Reduction, broadcast_back
from onefold.runtime.unit import Unit

if TYPE_CHECKING:
    from onefold.parallel.marks import Marks
    from onefold.runtime.engine import Engine


#: A gradient of at most SMALL bytes waits for others of its unit, until the waiting ones have more
#: than ASIDE bytes together.
SMALL, ASIDE = 64 << 10, 1 << 20


class Reducer:
    """Collects, reduces and hands over the gradients of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.units, self.unit_of, self.gather = engine.units, engine.unit_of, engine.gather
        self.stepper, self.spans = engine.stepper, engine.spans
        self.write_counters, self.backward_event = engine.write_counters, engine.backward_event
        self.group, self.progress, self.memory = engine.group, engine.progress, engine.memory
        self.pool = engine.pool
        # The order of reductions, see runtime/order.py
        self.order = Order(self.units[::-1])
        self.in_flight = engine.recipe.in_flight if engine.recipe.overlap else 0
        self.under_way: list[Reduction] = []
        self.on_next_hop: list[Reduction] = []  # past their first hop
        # Entries that have a gradient, on any rank, in the held sums
        self.held: set[int] = set()
        self.summed: list[Reduction] = []
        self.used: set[int] = set()
        # Hooks that multiply gradients before the user's own, by entry: (dict of hooks, key in it)
        self.multiplied: dict[int, tuple[Any, int]] = {}
        # `.grad` shows, or has shown, gradients that wait for the boundary (runtime/pending_gradients.py)
        self.shows = False
        # Of a mesh along which some ranks have the same data
        self.marks: Marks | None = None
        for entry in (entry for unit in self.units for entry in unit.entries):
            nbytes = entry.slot.numel * entry.flat.dtypes.compute.itemsize
            entry.small = nbytes if nbytes <= SMALL else 0

    # -- arrival -----------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        if self.shows:
            self.shows = False
            take_pending(self)
        self.order.begin(self.order.units)
        self.used = set()
        self.take_multipliers_back()
        if self.marks is not None:
            self.marks.begin_backward()
        if self.progress.factor != 1:
            self._multiply_before_hooks()
        for unit in self.units:
            unit.gradients = unit.awaited
            for flat in unit.flats:
                for entry in flat.entries:
                    entry.post_hooks = entry.param._post_accumulate_grad_hooks
            unit.ready = not unit.gradients or unit.calls == 0
            unit.launched = unit.late = False

    def _multiply_before_hooks(self) -> None:
        """Let the user's hooks on whole parameters see gradients that are multiplied already."""
        factor = self.progress.factor

        def multiply(grad: torch.Tensor) -> torch.Tensor:
            return grad * factor

        for entry in (e for unit in self.units for e in unit.entries):
            if not (hooks := entry.compute._backward_hooks):
                continue
            others = dict(hooks)
            hooks.clear()
            hooks[id(multiply)] = multiply  # autograd calls them in the order of the dict
            hooks.update(others)
            self.multiplied[entry.number] = (hooks, id(multiply))

    def take_multipliers_back(self) -> None:
        for hooks, key in self.multiplied.values():
            hooks.pop(key, None)
        self.multiplied.clear()

    def arrived(self, entry: Entry) -> None:
        """Autograd has put the complete gradient of `entry` on the whole parameter."""
        progress = self.progress
        if entry.box is not None:
            with disable_torch_function(), torch.no_grad():
                entry.box.settle(entry.compute)
        if (
            entry.small
            and not entry.post_hooks
            and progress.backward_open
            and not progress.differentiating
            and not torch.is_grad_enabled()
        ):
            self._put_aside(entry)
            return
        with disable_torch_function(), torch.no_grad():
            self.backward_event(True)
            hooks = entry.param._post_accumulate_grad_hooks
            if not hooks:
                self._take(entry)
                return
        factor = 1.0 if entry.number in self.multiplied else progress.factor
        if (grad := get_grad(entry.compute)) is not None:
            if factor != 1:
                with disable_torch_function(), torch.no_grad():
                    set_grad(entry.compute, grad * factor)
            self._call_hooks(entry, hooks)
        with disable_torch_function(), torch.no_grad():
            self._take(entry, factor=1.0)

    def _put_aside(self, entry: Entry) -> None:
        """Leave a small gradient on the whole parameter until others of its unit have come."""
        unit, flat = self.unit_of[entry.number], entry.flat
        run = flat.run_of[entry.index]
        if run not in flat.grads:
            with disable_torch_function():
                self._begin(flat, run)
        unit.aside.append(entry)
        unit.aside_bytes += entry.small
        unit.gradients.discard(entry.number)
        if not unit.gradients or unit.aside_bytes > ASIDE:
            with disable_torch_function():
                self._store_aside(unit)
                self._complete(unit)

    def _store_aside(self, unit: Unit) -> None:
        """Move the small gradients that wait on whole parameters into the unit's buffers."""
        entries, unit.aside, unit.aside_bytes = unit.aside, [], 0
        for flat in unit.flats:
            mine = [entry for entry in entries if entry.flat is flat]
            if not mine or self._store_together(flat, mine):
                continue
            for entry in mine:
                self._store_one(unit, entry)
        if unit.launched:
            unit.late = True

    def collect(self) -> None:
        """At the end of a backward pass, store the waiting small gradients of units whose gradients
        did not all come.
        """
        for unit in self.units:
            if unit.aside:
                self._store_aside(unit)

    def _store_together(self, flat: Flat, entries: list[Entry]) -> bool:
        """Store the gradients of `entries` in the buffer with a few calls for all.

        Returns False, and stores nothing, unless all of them are dense and of the buffer's dtype,
        and either all or none are added to earlier ones.
        """
        buffer, filled = flat.grads.get((0, flat.layout.numel)), entries[0].filled
        grads: list[Any] = [local_of(get_grad(entry.compute)) for entry in entries]
        if (
            buffer is None
            or any(entry.filled is not filled for entry in entries)
            or len(set(entries)) < len(entries)
        ):
            return False
        if flat.has_parts or (
            self.multiplied and any(entry.number in self.multiplied for entry in entries)
        ):
            return False
        if any(
            grad is None or grad.layout is not torch.strided or grad.dtype != buffer.dtype
            for grad in grads
        ):
            return False
        if self.marks is not None and self.marks.open:
            for entry, grad in zip(entries, grads, strict=True):
                self.marks.note(entry, grad)
        progress, views = self.progress, flat.views(buffer)
        scale = flat.early_scale * progress.weight * progress.factor
        if len(entries) < len(views) or any(
            entry is not own for entry, own in zip(entries, flat.entries, strict=True)
        ):
            views = [views[entry.index] for entry in entries]
        if filled:
            torch._foreach_add_(views, grads, alpha=scale)
        else:
            torch._foreach_copy_(views, grads)
            if scale != 1 and len(views) == len(flat.entries):
                buffer.mul_(scale)
            elif scale != 1:
                torch._foreach_mul_(views, scale)
        for entry in entries:
            set_grad(entry.compute, None)
            entry.filled = True
            self.used.add(entry.number)
        return True

    def _take(self, entry: Entry, factor: float | None = None) -> None:
        """Move the gradient of `entry` from the whole parameter into its unit's buffer, multiplied
        with `factor`; None takes that of the pass.
        """
        unit = self.unit_of[entry.number]
        self._store_one(unit, entry, factor)
        unit.gradients.discard(entry.number)
        if not unit.gradients and unit.aside:
            self._store_aside(unit)
        self._complete(unit)

    def _store_one(self, unit: Unit, entry: Entry, factor: float | None = None) -> None:
        grad = local_of(get_grad(entry.compute))
        set_grad(entry.compute, None)
        if grad is not None:  # else a hook has dropped it
            if grad.layout is not torch.strided:
                raise ValueError(
                    f"parameter {entry.slot.name!r} got a gradient of layout {grad.layout}; "
                    "Onefold reduces dense gradients only. Use sparse=False."
                )
            if self.marks is not None and self.marks.open:
                self.marks.note(entry, grad)
            if factor is None:
                factor = 1.0 if entry.number in self.multiplied else self.progress.factor
            self._store(unit, entry, grad, factor)
            self.used.add(entry.number)
            if unit.launched:
                unit.late = True

    def _complete(self, unit: Unit) -> None:
        """Mark the unit ready if all its gradients have come."""
        if unit.gradients:
            return
        if not unit.launched:
            unit.ready = True
            self.order.seen.append(unit)
            if self.memory.record:
                self.spans.came(unit.name)
            if not self.progress.deferring:
                self._advance()
        self.gather.maybe_release(unit)

    def _call_hooks(self, entry: Entry, hooks: Any) -> None:
        """Let the user's hooks see and change this rank's whole gradient. It includes what earlier
        micro-batches left unreduced.
        """
        earlier, flat = None, entry.flat
        if entry.filled:
            run = flat.run_of[entry.index]
            with torch.no_grad():
                earlier = flat.grads[run][entry.slot.start - run[0] : entry.slot.end - run[0]].view(
                    entry.slot.shape
                )
                earlier = earlier / (flat.early_scale * entry.parts * self.progress.weight)
                if entry.box is not None:
                    earlier = entry.box.over(earlier)
        changed = gradient_hooks.run(entry, hooks, earlier)
        if changed or (earlier is not None and get_grad(entry.compute) is None):
            entry.filled = False  # the gradient on the parameter includes the earlier one
            self.used.discard(entry.number)

    def passed_over(self, units: list[Unit]) -> None:
        """Let units that the backward pass went past without using them take part with zeros now:
        other ranks may wait for them.

        A gradient that comes later still is marked late and goes into the second round.
        """
        for unit in units:
            if len(unit.gradients) == len(unit.awaited):
                unit.ready = True
        if not self.progress.deferring:
            self._advance()

    def _store(self, unit: Unit, entry: Entry, grad: torch.Tensor, factor: float) -> None:
        flat = entry.flat
        run = flat.run_of[entry.index]
        sums = flat.dtypes.sums
        buffer = flat.grads.get(run)
        if buffer is None:
            buffer = self._begin(flat, run)
        elif entry.filled and buffer.dtype != sums:  # accumulation never happens in 16 bits
            wide = self.pool.take(buffer.numel(), sums, self._category, unit.name)
            wide.copy_(buffer)
            self.pool.give(buffer)
            buffer = flat.grads[run] = wide
        view = buffer[entry.slot.start - run[0] : entry.slot.end - run[0]].view(entry.slot.shape)
        scale = flat.early_scale * entry.parts * self.progress.weight * factor
        if entry.filled:
            view.add_(grad, alpha=scale)
        elif scale != 1:
            torch.mul(grad, scale, out=view)
        else:
            view.copy_(grad)
        entry.filled = True

    def _begin(self, flat: Flat, run: tuple[int, int]) -> torch.Tensor:
        """Take a buffer for `run`, whose first gradient has come."""
        dtype = flat.dtypes.sums if self.progress.deferring else flat.dtypes.wire
        buffer = flat.grads[run] = self._buffer(flat, run, dtype)
        return buffer

    @property
    def _category(self) -> str:
        """The ledger's category of whole gradients: GRADIENTS if they stay until the boundary,
        REDUCTION if they are about to be sent.
        """
        return GRADIENTS if self.progress.deferring else REDUCTION

    def _buffer(self, flat: Flat, run: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Take a gradient buffer over `run`, with zeros between the slots. The slots themselves are
        not initialized.
        """
        buffer = self.pool.take(run[1] - run[0], dtype, self._category, flat.unit_name)
        if nbytes_of(buffer) <= ASIDE:  # here each further call would cost more than the bytes
            return buffer.zero_()
        end = run[0]
        for slot in flat.layout.slots:
            if run[0] <= slot.start < run[1]:
                if slot.start > end:
                    buffer[end - run[0] : slot.start - run[0]].zero_()
                end = slot.end
        buffer[end - run[0] :].zero_()
        return buffer

    # -- the wire ----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Launch units in the agreed order, as long as the next one is ready."""
        while (unit := self.order.next()) is not None and unit.ready:
            if unit.calls == 0 and not self.gather.pass_by(unit):
                return
            self._launch(unit)
            self.order.at += 1
            self._land_what_is_due()

    def _land_what_is_due(self) -> None:
        """Land the reductions that are due. Called after every launch."""
        while is_due(self.under_way, self.in_flight):
            self._land(self.under_way.pop(0))
        while len(self.on_next_hop) > self.in_flight or are_large(self.on_next_hop):
            self._land(self.on_next_hop.pop(0))

    def _launch(self, unit: Unit) -> None:
        if unit.aside:
            self._store_aside(unit)
        if self.group.run_ahead is not None:
            self.group.run_ahead.comes(unit.index, "backward")
        unit.launched = True
        for flat in unit.flats:
            for run in flat.runs:
                buffer = flat.grads.pop(run, None)
                if buffer is None:
                    buffer = self._buffer(flat, run, flat.dtypes.wire)
                filled = [entry.filled for entry in flat.entries]
                # Add what only earlier micro-batches have used: other ranks must hear of it
                self.used.update(entry.number for entry in flat.entries if entry.filled)
                if all(filled) and len(flat.runs) == 1:
                    for entry in flat.entries:
                        entry.filled = False
                    self._send(Reduction(unit, flat, run, filled, buffer, run))
                    continue
                filled = []
                for entry in flat.entries:
                    inside = flat.in_run(entry, run)
                    if inside and not entry.filled:
                        buffer[entry.slot.start - run[0] : entry.slot.end - run[0]].zero_()
                    filled.append(inside and entry.filled)
                    entry.filled = entry.filled and not inside
                self._send(Reduction(unit, flat, run, filled, buffer, run))

    def _send(self, r: Reduction) -> None:
        self._start(r)
        self.under_way.append(r)

    def _start(self, r: Reduction) -> None:
        """Start the next hop of `r`."""
        context = self.progress.context(r.flat.reduce_move, r.unit.name)
        r.sending = r.flat.reduces[r.at].start(r, context)

    def _land(self, r: Reduction) -> None:
        """Wait for the parts and add them up in rank order. Then start the next hop, or hand over
        the sums that can be handed over.
        """
        sending, r.sending, flat = r.sending, None, r.flat
        assert sending is not None
        sending.land()
        total = r.total
        assert total is not None
        if not r.is_last:
            if self._hold(r):
                return
            r.next_hop()
            self._start(r)
            self.on_next_hop.append(r)
            return
        if flat.broadcast_back is not None:
            if r.gathering is None:  # else the backend has given all ranks the sums
                context = self.progress.context("all-reduce", r.unit.name)
                r.gathering = broadcast_back(r, context)
            self.summed.append(r)
        elif not self._hand_over(r, r.filled):
            # The sums were added to gradients that were there, and are freed
            self._ledger(flat).add(GRADIENTS, -nbytes_of(total if r.total is None else r.total))
        if r.gathering is None and not _all_of(r, r.filled):
            self.summed.append(r)  # another rank may have used the remaining entries

    def _hold(self, r: Reduction) -> bool:
        """Add the group's sums of earlier micro-batches to those of `r`. Before the boundary, hold
        the result and return True. See [Note: held sums].
        """
        pool, held, total = self.pool, r.flat.held.pop(r.run, None), r.total
        assert total is not None
        if held is not None:
            total.add_(held)
            pool.give(held)
        if self.progress.holding:
            held = pool.take(total.numel(), total.dtype, GRADIENTS, r.unit.name)
            r.flat.held[r.run] = held.copy_(total)
            r.total = None
            r.buffer = total.new_empty(0)
            pool.give(total)
        return self.progress.holding

    # -- handing over ------------------------------------------------------------------------------

    def _hand_over(self, r: Reduction, which: list[bool]) -> bool:
        """Give the sums to the optimizer's parameters: set `.grad`, or add to it, as autograd does.

        Returns True if some `.grad` is a view of the sums now, or may become one.
        """
        flat, storage, kept = r.flat, r.flat.storage, not _all_of(r, which)
        assert r.total is not None
        shares = flat.shares(r.result_range)
        for entry in shares.remote:
            entry.graded_elsewhere = entry.graded_elsewhere or which[entry.index]
        meant = [entry for entry in shares.local if which[entry.index]]
        if storage.measures_gradients and self.progress.sync and not r.down:
            storage.measure(r.total, r.result_range, meant)
        if storage.adds_on_device and not kept and self._add_on_device(r, shares, which):
            return True
        self._bring_down(r)
        in_backward = self.stepper.early.takes(flat, which)
        try:
            if not in_backward and storage.take_gradient(r.total, r.result_range, meant):
                return kept
        except TierError as error:
            # The other ranks wait for this one: all raise before the optimizer steps
            self.progress.failed(error)
            return kept
        total, same = r.total, r.total.dtype == flat.dtypes.master
        for entry, part in (
            zip(shares.local, total.split_with_sizes(shares.sizes)[1::2], strict=True)
            if meant
            else ()
        ):
            if not which[entry.index]:
                continue
            param = entry.param
            grad = flat.shaped(part, entry)
            before = get_grad(param)
            if before is not None:
                before.add_(grad)
            elif same:
                set_grad(param, grad)
                kept = True
            else:  # a copy in another dtype
                set_grad(param, grad.to(flat.dtypes.master))
                self._ledger(flat).add(GRADIENTS, nbytes_of(get_grad(param)))
                kept = kept or not storage.offloaded
        if in_backward:
            self.stepper.early.landed(flat)
        return kept

    def _add_on_device(self, r: Reduction, shares: Shares, which: list[bool]) -> bool:
        """Let the device add the sums to gradients that are all on another tier, and give them up.
        Returns False if it cannot.
        """
        flat, total = r.flat, r.total
        assert total is not None
        grads = [get_grad(entry.param) for entry in shares.local]
        if r.down or not grads or any(grad is None for grad in grads):
            return False
        in_backward = self.stepper.early.takes(flat, which)
        parts = total.split_with_sizes(shares.sizes)[1::2]
        self.memory.add(GRADIENTS, -nbytes_of(total))
        if not flat.storage.add_gradient(total, list(zip(grads, parts, strict=True))):
            self.memory.add(GRADIENTS, nbytes_of(total))
            return False
        r.down = True
        if in_backward:
            self.stepper.early.landed(flat)
        return True

    def _bring_down(self, r: Reduction) -> None:
        """Move the sums off the device, once, if their optimizer is not on it."""
        assert r.total is not None
        storage = r.flat.storage
        if not r.down:
            r.down = True
            here, there = self.memory, self._ledger(r.flat)
            if there is not here:
                here.add(GRADIENTS, -nbytes_of(r.total))
                r.total = storage.bring_down(r.total)
                there.add(GRADIENTS, nbytes_of(r.total))
        storage.settle_gradient(r.total)

    def _ledger(self, flat: Flat) -> MemoryLedger:
        return flat.storage.gradient_ledger(self.memory)

    def finish(self, used_anywhere: set[int]) -> None:
        """Land everything and hand over the gradients of what any rank used."""
        self.write_counters.graded |= used_anywhere
        while self.under_way:
            self._land(self.under_way.pop(0))
        if self.progress.holding:
            self.held |= used_anywhere
            return
        used_anywhere, self.held = used_anywhere | self.held, set()
        while self.on_next_hop:
            self._land(self.on_next_hop.pop(0))
        while self.summed:  # one by one, so that each is freed once it is handed over
            r = self.summed.pop(0)
            if r.gathering is not None:
                r.gathering.wait()
                which = [
                    e.number in used_anywhere and r.flat.in_run(e, r.run) for e in r.flat.entries
                ]
            else:
                which = [
                    e.number in used_anywhere and r.flat.in_run(e, r.run) and not done
                    for e, done in zip(r.flat.entries, r.filled, strict=True)
                ]
            if (
                not self._hand_over(r, which)
                and r.flat.storage.offloaded
                and r.gathering is not None
                and r.total is not None
            ):
                self._ledger(r.flat).add(GRADIENTS, -nbytes_of(r.total))

    def launch_rest(self) -> None:
        """At the end of a backward pass, launch the units whose gradients did not all come, with
        zeros for the missing ones.

        Reductions that have a further hop start it now: this rank is about to wait for the others,
        and they may wait for that hop.
        """
        for unit in self.units:
            unit.ready = True
        self._advance_all()
        while self.under_way and not self.under_way[0].is_last:
            self._land(self.under_way.pop(0))

    def _advance_all(self) -> None:
        while (unit := self.order.next()) is not None:
            self._launch(unit)
            self.order.at += 1
            self._land_what_is_due()

    def second_round(self, late: list[int], used_anywhere: set[int]) -> None:
        """Reduce the gradients that came after their unit was reduced. (Re-entrant checkpointing of
        a shared module brings such gradients.)
        """
        for index in late:
            if self.stepper.early.has_stepped(self.units[index]):
                raise RuntimeError(
                    f"a gradient of {self.units[index].name!r} came after the unit was stepped"
                    " in the backward pass: this model uses it in more than one part of the"
                    " pass. Leave step_in_backward out."
                )
            self._launch(self.units[index])
        self.finish(used_anywhere)

    def drop(self) -> None:
        """Drop everything that a failed backward pass left behind."""
        if self.marks is not None:
            self.marks.forget()
        for r in (*self.under_way, *self.on_next_hop):
            if r.sending is not None:
                r.sending.drop(wait=self.group.broken is None)
        if self.group.broken is None:
            for r in self.summed:
                if r.gathering is not None:
                    r.gathering.wait()
        self.take_multipliers_back()
        self.under_way.clear()
        self.on_next_hop.clear()
        self.summed.clear()
        self.held.clear()
        for unit in self.units:
            unit.gradients = set()
            unit.ready = unit.launched = unit.late = False
            unit.aside, unit.aside_bytes = [], 0
            for flat in unit.flats:
                # Forgotten first: after a second Ctrl-C in here, the next call gives none twice
                for buffers in (flat.grads, flat.held):
                    while buffers:
                        self.pool.give(buffers.popitem()[1])
                for entry in flat.entries:
                    if entry.pending_grad is not None and entry.param.grad is entry.pending_grad:
                        entry.param.grad = None
                    entry.filled, entry.pending_grad = False, None
                    set_grad(entry.compute, None)


def _all_of(r: Reduction, which: list[bool]) -> bool:
    """Whether `which`, one flag for each entry, is True for all entries that travel with `r`."""
    return all(which) or all(which[e.index] for e in r.flat.entries if r.flat.in_run(e, r.run))
