"""Reducing gradients behind the backward pass.

    backward   unit 3      unit 2      unit 1      unit 0    end
    ready        ^3          ^2          ^1          ^0
    wire         [r3 .......][r2 ....]   [r1 ....]  [r0 ...]         (in_flight = 2: the third waits for the first)
    result                    grad 3      grad 2     grad 1  grad 0

A gradient is copied into its unit's flat buffer as autograd hands it over, and dropped; when the unit has all of them its buffer is
exchanged, summed (see [Note: sums are local and in rank order] in comm/group.py) and becomes `.grad` of the optimizer's parameters.

[Note: reductions keep one order] Units are reduced in an order that all ranks agree on (first the reverse of registration, then the order
seen in the first backward). A unit that is ready early waits for its turn. A unit that this rank did not use takes part with
zeros: at its turn if it was not called, at the end of the backward pass if it was called and brought no gradient.

[Note: unused parameters] Every backward ends with one small exchange in which ranks say which parameters got a gradient. What no rank used
keeps `.grad is None`, as it would in one process; what another rank used gets its gradient here too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from onefold.layout import overlap
from onefold.memory import GRADIENTS, REDUCTION, MemoryLedger
from onefold.memory.nvme import TierError
from onefold.runtime import gradient_hooks
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.home import Home
from onefold.runtime.kept import take_kept
from onefold.runtime.parameter import whole_sight
from onefold.runtime.summing import Reduction, Summing
from onefold.runtime.unit import Unit

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine


class Reducer:
    """Collects, reduces and hands over the gradients of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.units = engine.units
        self.order = [u.index for u in self.units][::-1]
        self.turn = 0
        self.log: list[int] = []
        self.learned = False
        self.summing = Summing(engine)
        self.flying: list[Reduction] = []
        self.crossing: list[Reduction] = []  # on a further hop
        self.held: set[int] = set()  # entries with gradients among the sums that are held, on any rank
        self.summed: list[Reduction] = []
        self.used: set[int] = set()
        self.in_flight = engine.recipe.in_flight if engine.recipe.overlap else 0

    # -- arrival ---------------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        take_kept(self.engine)
        self.turn, self.log, self.used = 0, [], set()
        for unit in self.units:
            unit.waiting = {e.number for e in unit.entries if e.active and not e.flat.passive}
            unit.ready = not unit.waiting or unit.calls == 0
            unit.launched = unit.late = False

    def arrived(self, entry: Entry) -> None:
        """Autograd has put the complete gradient of `entry` on the whole parameter."""
        engine = self.engine
        with whole_sight(), torch.no_grad():
            engine.backward_event(accumulates=True)
            hooks = entry.param._post_accumulate_grad_hooks
            if not hooks:
                self._take(entry)
                return
        if entry.compute.grad is not None:
            self._call_hooks(entry, hooks)
        with whole_sight(), torch.no_grad():
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        """The gradient of `entry` leaves the whole parameter, for its unit's buffer."""
        unit = self.engine.unit_of[entry.number]
        grad, entry.compute.grad = entry.compute.grad, None
        if grad is not None:  # else a hook has dropped it
            if grad.layout is not torch.strided:
                raise ValueError(
                    f"parameter {entry.slot.name!r} got a gradient of layout {grad.layout}; "
                    "Onefold reduces dense gradients only. Use sparse=False."
                )
            self._store(unit, entry, grad)
            self.used.add(entry.number)
            if unit.launched:
                unit.late = True
        unit.waiting.discard(entry.number)
        self._complete(unit)

    def _complete(self, unit: Unit) -> None:
        """If all gradients of the unit have come, it is ready."""
        if unit.waiting:
            return
        engine = self.engine
        if not unit.launched:
            unit.ready = True
            self.log.append(unit.index)
            if engine.memory.record:
                engine.spans.came(unit.name)
            if not engine.deferring:
                self._advance()
        engine.gather.maybe_release(unit)

    def _call_hooks(self, entry: Entry, hooks: Any) -> None:
        """Let the user's hooks see, and change, this rank's whole gradient: with what earlier micro-batches left unreduced, if anything."""
        earlier, flat = None, entry.flat
        if entry.filled:
            run = flat.run_of[entry.index]
            with torch.no_grad():
                earlier = flat.grads[run][entry.slot.start - run[0] : entry.slot.end - run[0]].view(entry.slot.shape)
                earlier = earlier / self.summing.early_scale(flat)
        changed = gradient_hooks.run(entry, hooks, earlier)
        if changed or (earlier is not None and entry.compute.grad is None):
            entry.filled = False  # what is on the parameter now is all of it
            self.used.discard(entry.number)

    def passed_over(self, units: list[Unit]) -> None:
        """Backward went past these units without using them: they take part with zeros now, since other ranks may wait for that.

        Should a gradient come all the same, it is late and goes in the second round.
        """
        for unit in units:
            if len(unit.waiting) == sum(e.active and not e.flat.passive for e in unit.entries):
                unit.ready = True
        if not self.engine.deferring:
            self._advance()

    def _store(self, unit: Unit, entry: Entry, grad: torch.Tensor) -> None:
        flat = entry.flat
        run = flat.run_of[entry.index]
        sums = flat.dtypes.sums
        buffer = flat.grads.get(run)
        if buffer is None:
            dtype = sums if self.engine.deferring else flat.dtypes.wire
            buffer = flat.grads[run] = self._buffer(flat, run, dtype)
        elif entry.filled and buffer.dtype != sums:  # accumulation never happens in 16 bits
            wide = self.engine.pool.take(buffer.numel(), sums, self._category, unit.name)
            wide.copy_(buffer)
            self.engine.pool.give(buffer)
            buffer = flat.grads[run] = wide
        view = buffer[entry.slot.start - run[0] : entry.slot.end - run[0]].view(entry.slot.shape)
        scale = self.summing.early_scale(flat)
        if entry.filled:
            view.add_(grad, alpha=scale)
        elif scale != 1:
            torch.mul(grad, scale, out=view)
        else:
            view.copy_(grad)
        entry.filled = True

    @property
    def _category(self) -> str:
        """Whole gradients that stay until the boundary are gradients; what is about to travel is a buffer."""
        return GRADIENTS if self.engine.deferring else REDUCTION

    def _buffer(self, flat: Flat, run: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """A gradient buffer over `run` with zeros between the slots (and nothing yet inside them)."""
        buffer = self.engine.pool.take(run[1] - run[0], dtype, self._category, flat.unit_name)
        end = run[0]
        for slot in flat.layout.slots:
            if run[0] <= slot.start < run[1]:
                if slot.start > end:
                    buffer[end - run[0] : slot.start - run[0]].zero_()
                end = slot.end
        buffer[end - run[0] :].zero_()
        return buffer

    # -- the wire --------------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Launch every unit whose turn it is and that is ready."""
        while self.turn < len(self.order) and self.units[self.order[self.turn]].ready:
            unit = self.units[self.order[self.turn]]
            if unit.calls == 0:
                self.engine.gather.pass_by(unit)
            self._launch(unit)
            self.turn += 1
            self._land_what_is_due()

    def _land_what_is_due(self) -> None:
        """After every launch, whoever was ready when: what is sent on by a landing comes at the same place on all ranks, which backends
        without tags need."""
        while self._is_due():
            self._land(self.flying.pop(0))
        while len(self.crossing) > self.in_flight:
            self._land(self.crossing.pop(0))

    def _is_due(self) -> bool:
        """Whether to wait for the oldest reduction: too many are under way, or it has a hop to go and another unit has been sent since."""
        if len(self.flying) > self.in_flight:
            return True
        return bool(self.flying) and not self.flying[0].is_last and self.flying[0].unit is not self.flying[-1].unit

    def _launch(self, unit: Unit) -> None:
        unit.launched = True
        for flat in unit.flats:
            for run in flat.runs:
                buffer = flat.grads.pop(run, None)
                if buffer is None:
                    buffer = self._buffer(flat, run, flat.dtypes.wire)
                filled = []
                for entry in flat.entries:
                    inside = flat.in_run(entry, run)
                    if inside and not entry.filled:
                        buffer[entry.slot.start - run[0] : entry.slot.end - run[0]].zero_()
                    filled.append(inside and entry.filled)
                    entry.filled = entry.filled and not inside
                r = Reduction(unit, flat, run, filled, buffer, run)
                self.summing.send(r)
                self.flying.append(r)

    def _land(self, r: Reduction) -> None:
        """Wait for the parts, add them up in rank order; on to the next hop, or hand over what can be handed over."""
        self.summing.land(r)
        flat, total = r.flat, r.total
        assert total is not None
        if not r.is_last:
            if self._hold(r):
                return
            self.summing.next_hop(r)
            self.summing.send(r)
            self.crossing.append(r)
            return
        if flat.spread is not None:
            self.summing.spread(r)
            self.summed.append(r)
        elif not self._hand_over(r, r.filled):
            self._ledger(flat).add(GRADIENTS, -_bytes(total))  # it was added to gradients that are there
        if r.gathering is None and not all(r.filled[e.index] for e in flat.entries if flat.in_run(e, r.run)):
            self.summed.append(r)  # another rank may have used the others

    def _hold(self, r: Reduction) -> bool:
        """Before the boundary the group's sums stay here; at it those of earlier micro-batches join. See [Note: held sums]."""
        pool, held, total = self.engine.pool, r.flat.held.pop(r.run, None), r.total
        assert total is not None
        if held is not None:
            total.add_(held)
            pool.give(held)
        if self.engine.holding:
            held = pool.take(total.numel(), total.dtype, GRADIENTS, r.unit.name)
            r.flat.held[r.run] = held.copy_(total)
            r.total = None
            r.buffer = total.new_empty(0)
            pool.give(total)
        return self.engine.holding

    # -- handing over ----------------------------------------------------------------------------------------------------------

    def _hand_over(self, r: Reduction, which: list[bool]) -> bool:
        """Give the sums to the optimizer's parameters: `.grad` is set, or added to, as autograd would.

        True if some `.grad` lies in them now, or may come to.
        """
        assert r.total is not None
        home = r.flat.home
        if home is not None:
            self._bring_down(r, home)
        kept = not all(which[e.index] for e in r.flat.entries if r.flat.in_run(e, r.run))
        span = r.covers
        behind = self._steps_behind(r.flat, which)
        meant = []
        for entry, wanted in zip(r.flat.entries, which, strict=True):
            if wanted and (_meets(entry, span) or not entry.slot.numel):
                meant.append(entry)
            elif wanted:
                entry.graded_elsewhere = True
        if home is not None and home.gradients_on_disk and not behind:
            try:
                home.take_gradient(r.total, span, meant)
            except TierError as error:  # the other ranks are waiting: all raise before the optimizer steps
                self.engine.failure = self.engine.failure or error
            return kept
        for entry in meant:
            a, b = overlap((entry.slot.start, entry.slot.end), span)
            param = entry.param
            grad = r.total[a - span[0] : b - span[0]].view(param.shape)
            if param.grad is None:
                param.grad = grad.to(param.dtype)
                if param.grad is not grad:  # a copy in another dtype
                    self._ledger(r.flat).add(GRADIENTS, _bytes(param.grad))
                kept = kept or param.grad is grad or home is None
            else:
                param.grad.add_(grad)
        if behind:
            self.engine.behind.landed(r.flat)
        return kept

    def _steps_behind(self, flat: Flat, which: list[bool]) -> bool:
        """Whether the flat buffer is stepped as soon as these gradients are there: they are all of its own, in memory."""
        behind, home = self.engine.behind, flat.home
        if behind is None or home is None or len(flat.runs) != 1 or not all(which[e.index] for e in flat.entries if e.active):
            return False
        if home.gradients_on_disk and any(e.param.grad is not None for e in flat.entries):
            return False
        home.stepped_in = self.engine.step if (takes := bool(behind.takes(flat))) else home.stepped_in
        return takes

    def _bring_down(self, r: Reduction, home: Home) -> None:
        """The sums leave the device, once."""
        assert r.total is not None
        if not r.down:
            r.down = True
            self.engine.memory.add(GRADIENTS, -_bytes(r.total))
            r.total = home.bring_down(r.total)
            self.engine.beyond.host.add(GRADIENTS, _bytes(r.total))
        if home.gradients_on_disk or r.total.dtype != r.flat.dtypes.master or any(e.param.grad is not None for e in r.flat.entries):
            self.engine.beyond.down.wait()  # the host is about to read them

    def _ledger(self, flat: Flat) -> MemoryLedger:
        return self.engine.memory if flat.home is None else self.engine.beyond.host

    def finish(self, used_anywhere: set[int]) -> None:
        """Land everything and hand over what other ranks used."""
        self.engine.moves.graded |= used_anywhere
        while self.flying:
            self._land(self.flying.pop(0))
        if self.engine.holding:
            self.held |= used_anywhere
            return
        used_anywhere, self.held = used_anywhere | self.held, set()
        while self.crossing:
            self._land(self.crossing.pop(0))
        while self.summed:  # each goes as soon as it is handed over
            r = self.summed.pop(0)
            if r.gathering is not None:
                r.gathering.wait()
                which = [e.number in used_anywhere and r.flat.in_run(e, r.run) for e in r.flat.entries]
            else:
                which = [
                    e.number in used_anywhere and r.flat.in_run(e, r.run) and not done
                    for e, done in zip(r.flat.entries, r.filled, strict=True)
                ]
            if not self._hand_over(r, which) and r.flat.home is not None and r.gathering is not None and r.total is not None:
                self._ledger(r.flat).add(GRADIENTS, -_bytes(r.total))

    def launch_rest(self) -> None:
        """At the end of a backward pass: the units whose gradients did not all come take part with zeros.

        What has a hop to go goes on: this rank is about to wait for the others, and they may wait for that.
        """
        for unit in self.units:
            unit.ready = True
        self._advance_all()
        while self.flying and not self.flying[0].is_last:
            self._land(self.flying.pop(0))

    def _advance_all(self) -> None:
        while self.turn < len(self.order):
            self._launch(self.units[self.order[self.turn]])
            self.turn += 1
            self._land_what_is_due()

    def second_round(self, late: list[int], used_anywhere: set[int]) -> None:
        """Gradients that came after their unit was reduced (re-entrant checkpointing of a shared module): reduce them too."""
        for index in late:
            if any(f.home is not None and f.home.stepped_in == self.engine.step for f in self.units[index].flats):
                raise RuntimeError(
                    f"a gradient of {self.units[index].name!r} came after the unit was stepped behind the backward pass: this model uses "
                    "it in more than one part of the pass. Leave step_in_backward out."
                )
            self._launch(self.units[index])
        self.finish(used_anywhere)

    def drop(self) -> None:
        """Forget everything that a failed backward pass left."""
        if self.engine.group.broken is None:
            for r in (*self.flying, *self.crossing):
                if r.pending is not None:
                    r.pending.wait()
            for r in self.summed:
                if r.gathering is not None:
                    r.gathering.wait()
        self.flying.clear()
        self.crossing.clear()
        self.summed.clear()
        self.held.clear()
        for unit in self.units:
            unit.waiting, unit.ready, unit.launched, unit.late = set(), False, False, False
            for flat in unit.flats:
                for buffer in flat.grads.values():
                    self.engine.pool.give(buffer)
                flat.grads.clear()
                for buffer in flat.held.values():
                    self.engine.pool.give(buffer)
                flat.held.clear()
                for entry in flat.entries:
                    if entry.kept is not None and entry.param.grad is entry.kept:
                        entry.param.grad = None
                    entry.filled, entry.kept, entry.compute.grad = False, None, None


def _meets(entry: Entry, span: tuple[int, int]) -> bool:
    a, b = overlap((entry.slot.start, entry.slot.end), span)
    return a < b


def _bytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()
