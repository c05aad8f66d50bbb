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

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from onefold.comm import Pending, Place
from onefold.layout import overlap
from onefold.memory import GRADIENTS, REDUCTION, MemoryLedger
from onefold.memory.nvme import TierError
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.home import Home
from onefold.runtime.kept import take_kept
from onefold.runtime.parameter import whole_sight
from onefold.runtime.unit import Unit

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine


@dataclass
class Reduction:
    """One run of one flat buffer on its way. `own` are the addresses that this rank sums; `parts` what the ranks send, in rank order."""

    unit: Unit
    flat: Flat
    run: tuple[int, int]
    buffer: torch.Tensor
    own: tuple[int, int]
    parts: dict[int, torch.Tensor]
    filled: list[bool]
    pending: Pending
    lent: torch.Tensor | None = None  # one buffer of which the parts are rows
    sent: torch.Tensor | None = None  # where the wire's dtype is not the buffer's
    total: torch.Tensor | None = None
    gathering: Pending | None = None
    down: bool = False  # the sums have left the device


class Reducer:
    """Collects, reduces and hands over the gradients of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.units = engine.units
        self.order = [u.index for u in self.units][::-1]
        self.turn = 0
        self.log: list[int] = []
        self.learned = False
        self.flying: list[Reduction] = []
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
            engine.backward_event()
            grad, entry.compute.grad = entry.compute.grad, None
            if grad is None:
                return
            if grad.layout is not torch.strided:
                raise ValueError(
                    f"parameter {entry.slot.name!r} got a gradient of layout {grad.layout}; "
                    "Onefold reduces dense gradients only. Use sparse=False."
                )
            unit = engine.unit_of[entry.number]
            self._store(unit, entry, grad)
            self.used.add(entry.number)
            unit.waiting.discard(entry.number)
            if unit.launched:
                unit.late = True
            elif not unit.waiting:
                unit.ready = True
                self.log.append(unit.index)
                if engine.memory.record:
                    engine.spans.came(unit.name)
                if not engine.deferring:
                    self._advance()
            if not unit.waiting:
                engine.gather.maybe_release(unit)

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
        scale = self._early_scale(flat)
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

    def _early_scale(self, flat: Flat) -> float:
        """The mean's factor, if it goes into the copy that is made anyway: not where 16 bits travel, whose range it would waste."""
        return 1.0 / self.engine.group.size if flat.dtypes.wire == flat.dtypes.sums else 1.0

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
            while len(self.flying) > self.in_flight:
                self._land(self.flying.pop(0))

    def _launch(self, unit: Unit) -> None:
        unit.launched = True
        engine, group = self.engine, self.engine.group
        for flat in unit.flats:
            move = "all-reduce" if flat.whole_master else "reduce-scatter"
            place = Place(move, unit.name, engine.step, engine.phase)
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
                own = overlap(run, flat.interval)
                sent = buffer
                if buffer.dtype != flat.dtypes.wire:
                    sent = engine.pool.take(buffer.numel(), flat.dtypes.wire, REDUCTION, unit.name).copy_(buffer)
                parts, lent = self._places(unit, flat, buffer[own[0] - run[0] : own[1] - run[0]])
                recvs = [(p, part) for p, part in parts.items() if p != group.rank]
                if group.imagined:  # two messages stand for all
                    sends = [(group.rank, sent[: own[0] - run[0]]), (group.rank, sent[own[1] - run[0] :])]
                else:
                    sends = [(p, piece) for p, piece in enumerate(_cut(sent, run, flat)) if p != group.rank]
                pending = group.exchange(sends, recvs, place, flat.index, move=move)
                copied = sent if sent is not buffer else None
                self.flying.append(Reduction(unit, flat, run, buffer, own, parts, filled, pending, lent, copied))
                del sent, copied, sends, recvs, parts, lent

    def _places(self, unit: Unit, flat: Flat, own: torch.Tensor) -> tuple[dict[int, torch.Tensor], torch.Tensor | None]:
        """Where the ranks' parts go, in rank order with this rank's `own` among them: rows of one lent buffer, but for one that stays."""
        group, into, dtype = self.engine.group, self._summed_into(flat), flat.dtypes.wire
        places = {group.rank: own}
        if into is not None:
            places[into] = self.engine.pool.fresh(own.numel(), dtype)
            self.engine.memory.add(REDUCTION, _bytes(places[into]), unit.name)
        others = [p for p in range(group.size) if p not in places]
        lent = self.engine.pool.take(len(others) * own.numel(), dtype, REDUCTION, unit.name) if others else None
        if lent is not None and not group.imagined:  # else nothing arrives there
            places |= zip(others, lent.view(len(others), own.numel()).unbind(), strict=True)
        return dict(sorted(places.items())), lent

    def _land(self, r: Reduction) -> None:
        """Wait for the parts, add them up in rank order, and hand over what can be handed over."""
        r.pending.wait()
        flat, group, pool = r.flat, self.engine.group, self.engine.pool
        sent, r.sent = r.sent, None
        if sent is not None:
            pool.give(sent)
        into = self._summed_into(flat)
        total = self._sum_apart(r) if into is None else self._sum_in_place(r, into)
        r.parts.clear()
        lent, r.lent = r.lent, None
        if lent is not None:
            pool.give(lent)
        buffer, r.buffer = r.buffer, total
        pool.give(buffer)
        r.total = total
        if flat.whole_master and group.size > 1:
            r.gathering = self._gather_sums(r, total)
            self.summed.append(r)
        elif not self._hand_over(r, r.filled):
            self._ledger(flat).add(GRADIENTS, -_bytes(total))  # it was added to gradients that are there
        if r.gathering is None and not all(r.filled[e.index] for e in flat.entries if flat.in_run(e, r.run)):
            self.summed.append(r)  # another rank may have used the others

    def _summed_into(self, flat: Flat) -> int | None:
        """The peer whose part becomes the sum, if sums need no other dtype and no other place."""
        group = self.engine.group
        if flat.whole_master or group.size == 1 or flat.dtypes.wire != flat.dtypes.sums:
            return None
        return 1 if group.rank == 0 else 0

    def _sum_in_place(self, r: Reduction, into: int) -> torch.Tensor:
        total = r.parts[into]
        self.engine.memory.add(REDUCTION, -_bytes(total), r.unit.name)
        self.engine.memory.add(GRADIENTS, _bytes(total))
        for rank, part in r.parts.items():  # rank 0 adds part 1 to part 0, the others part 0 to part 1: the same sum
            if rank != into:
                total.add_(part)
        return total

    def _sum_apart(self, r: Reduction) -> torch.Tensor:
        flat, group = r.flat, self.engine.group
        first, *others = r.parts.values()
        if flat.whole_master:  # every rank wants all sums: put this rank's into the whole buffer, then gather
            numel, dtype = r.run[1] - r.run[0], flat.dtypes.wire
            total = self.engine.pool.fresh(numel, dtype)
            target = total[r.own[0] - r.run[0] : r.own[1] - r.run[0]]
        else:
            total = target = self.engine.pool.fresh(r.own[1] - r.own[0], flat.dtypes.sums)
        self.engine.memory.add(GRADIENTS, _bytes(total))
        sums = target
        if target.dtype != flat.dtypes.sums:
            sums = self.engine.pool.take(target.numel(), flat.dtypes.sums, REDUCTION, r.unit.name)
        if others and first.dtype == others[0].dtype == sums.dtype:
            torch.add(first, others[0], out=sums)
            others = others[1:]
        else:
            sums.copy_(first)
        for part in others:
            sums.add_(part)
        if group.size > 1 and self._early_scale(flat) == 1:
            sums.mul_(1.0 / group.size)
        if sums is not target:
            target.copy_(sums)
            self.engine.pool.give(sums)
        return total

    def _gather_sums(self, r: Reduction, total: torch.Tensor) -> Pending:
        """The second half of an all-reduce: every rank's sums to every rank."""
        flat, group = r.flat, self.engine.group
        place = Place("all-reduce", r.unit.name, self.engine.step, self.engine.phase)
        peers = [p for p in range(group.size) if p != group.rank]
        own = total[r.own[0] - r.run[0] : r.own[1] - r.run[0]]
        part = _cut(total, r.run, flat) if not group.imagined else ()
        recvs = [(p, part[p]) for p in peers] if part else []
        return group.exchange([(p, own) for p in peers], recvs, place, flat.index, move="all-reduce")

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
        base = r.run[0] if r.flat.whole_master else r.own[0]
        span = r.run if r.flat.whole_master else r.own
        behind = self._steps_behind(r.flat, which)
        meant = [e for e, wanted in zip(r.flat.entries, which, strict=True) if wanted and (_meets(e, span) or not e.slot.numel)]
        if home is not None and home.gradients_on_disk and not behind:
            try:
                home.take_gradient(r.total, span, meant)
            except TierError as error:  # the other ranks are waiting: all raise before the optimizer steps
                self.engine.failure = self.engine.failure or error
            return kept
        for entry in meant:
            a, b = overlap((entry.slot.start, entry.slot.end), span)
            param = entry.param
            grad = r.total[a - base : b - base].view(param.shape)
            if param.grad is None:
                param.grad = grad.to(param.dtype)
                if param.grad is grad:
                    kept = True
                else:  # a copy in another dtype
                    self._ledger(r.flat).add(GRADIENTS, _bytes(param.grad))
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
            self.engine.beyond.lane.wait()  # the host is about to read them

    def _ledger(self, flat: Flat) -> MemoryLedger:
        return self.engine.memory if flat.home is None else self.engine.beyond.host

    def finish(self, used_anywhere: set[int]) -> None:
        """Land everything and hand over what other ranks used."""
        self.engine.moves.graded |= used_anywhere
        while self.flying:
            self._land(self.flying.pop(0))
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
            if not self._hand_over(r, which) and r.gathering is not None and r.total is not None:
                self._ledger(r.flat).add(GRADIENTS, -_bytes(r.total))

    def launch_rest(self) -> None:
        """At the end of a backward pass: the units whose gradients did not all come take part with zeros."""
        for unit in self.units:
            unit.ready = True
        self._advance_all()

    def _advance_all(self) -> None:
        while self.turn < len(self.order):
            self._launch(self.units[self.order[self.turn]])
            self.turn += 1

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
            for r in self.flying:
                r.pending.wait()
            for r in self.summed:
                if r.gathering is not None:
                    r.gathering.wait()
        self.flying.clear()
        self.summed.clear()
        for unit in self.units:
            unit.waiting, unit.ready, unit.launched, unit.late = set(), False, False, False
            for flat in unit.flats:
                for buffer in flat.grads.values():
                    self.engine.pool.give(buffer)
                flat.grads.clear()
                for entry in flat.entries:
                    if entry.kept is not None and entry.param.grad is entry.kept:
                        entry.param.grad = None
                    entry.filled, entry.kept, entry.compute.grad = False, None, None


def _cut(buffer: torch.Tensor, run: tuple[int, int], flat: Flat) -> tuple[torch.Tensor, ...]:
    """The ranks' pieces of a buffer over `run`, in rank order."""
    cuts = [overlap(run, flat.layout.interval(p)) for p in range(flat.size)]
    return buffer.split([b - a for a, b in cuts])


def _meets(entry: Entry, span: tuple[int, int]) -> bool:
    a, b = overlap((entry.slot.start, entry.slot.end), span)
    return a < b


def _bytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()
