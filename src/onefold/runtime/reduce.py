"""Reducing gradients while the backward pass goes on.

    backward   unit 3      unit 2      unit 1      unit 0    end
    ready        ^3          ^2          ^1          ^0
    wire         [r3 .......][r2 ....]   [r1 ....]  [r0 ...]         (in_flight = 2: the third waits for the first)
    result                    grad 3      grad 2     grad 1  grad 0

When autograd has put a gradient on a whole parameter, it waits there for others of its unit: they
are copied into the unit's flat buffer together, because the number of calls is what that costs. When
the unit has all its gradients, its buffer is exchanged and summed in an agreed order (see
[Note: reductions keep one order] and [Note: sums are local and in
rank order] in comm/group.py). The sums become `.grad` of the optimizer's parameters.

[Note: unused parameters] Every backward pass ends with one small exchange in which the ranks tell
each other which parameters got a gradient. A parameter that no rank used keeps `.grad is None`, as
it would in one process. A parameter that another rank used gets its gradient here too.

[Note: held sums] Where gradients are divided inside groups, micro-batches before the boundary take
only the hop inside the group. The group's sums are held, and the hop between groups carries them
once a step.

[Note: reductions keep one order] Units are reduced in an order that all ranks agree on. A unit that
is ready early waits for those before it. A unit that this rank did not use takes part with zeros:

- if its module was not called, as soon as those before it are launched;
- if it was called and the backward pass goes past it, from then on (`Reducer.passed_over`);
- else at the end of the backward pass (`Reducer.launch_rest`).

[Note: a buffer is reduced whole] What travels is a whole flat buffer, or nothing if none of its
parameters train. Parameters that were frozen after `shard()` travel as zeros. (Those frozen before
are in flat buffers of their own.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from onefold.device import has_streams
from onefold.layout import overlap
from onefold.memory import GRADIENTS, REDUCTION, TierError, nbytes_of
from onefold.recipe import Tier
from onefold.recipe.core import LARGE_TRAFFIC, SMALL_TRAFFIC
from onefold.runtime.boxes import local_of
from onefold.runtime.flat import Entry, Flat, Unit
from onefold.runtime.gather import Order
from onefold.runtime.hops import Hop, UnderWay, drop, landed
from onefold.runtime.parameters.interval import disable_torch_function, get_grad, set_grad

if TYPE_CHECKING:
    from onefold.comm import Pending
    from onefold.parallel.marks import Marks
    from onefold.runtime.engine import Engine


#: Gradients wait on whole parameters until those of their unit have more bytes together; on a device
#: with streams, where a small model waits for the host's calls and not for bytes, until more.
ASIDE, ASIDE_WITH_STREAMS = 1 << 20, 16 << 20


#: Gradients with their parameters.
Pairs = list[tuple[Entry, torch.Tensor]]


@dataclass
class Reduction:
    """One flat buffer that is being reduced.

    Attributes:
        used: the entries that got a gradient here.
        hop: the one that it is on. under_way: that hop, launched.
        total: the sums of the last hop, over what this rank owns; None if the device has added them
            to `.grad` on the host.
        gathering: the exchange of sums with the other ranks that hold them too.
    """

    unit: Unit
    flat: Flat
    used: set[Entry]
    hop: Hop
    under_way: UnderWay = field(init=False)
    total: torch.Tensor | None = None
    gathering: Pending | None = None

    @property
    def is_last(self) -> bool:
        return self.hop.last

    @property
    def sent_bytes(self) -> int:
        return self.hop.sent_bytes


class Reducer:
    """Collects, reduces and hands over the gradients of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.units, self.gather = engine.units, engine.gather
        self.early = engine.early
        self.engine, self.group, self.memory = engine, engine.group, engine.memory
        self.pool, self._ledgers = engine.pool, engine.transfers.ledgers
        self.aside = ASIDE_WITH_STREAMS if has_streams(self.pool.device) else ASIDE
        # The order of reductions, see runtime/gather.py
        self.order = Order(self.units[::-1])
        self.in_flight = engine.recipe.in_flight
        self.under_way: list[Reduction] = []
        self.on_next_hop: list[Reduction] = []  # past their first hop
        # Entries that have a gradient, on any rank, in the held sums
        self.held: set[Entry] = set()
        self.summed: list[Reduction] = []
        self.used: set[Entry] = set()
        # Of a mesh along which some ranks have the same data
        self.marks: Marks | None = None

    # -- arrival -----------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        self.order.begin(self.order.units)
        self.used = set()
        if self.marks is not None:
            self.marks.begin_backward()
        for unit in self.units:
            unit.gradients = unit.awaited
            unit.ready = not unit.gradients or unit.calls == 0
            unit.launched = unit.late = False

    def arrived(self, entry: Entry) -> None:
        """Autograd has put the complete gradient of `entry` on the whole parameter."""
        unit, flat, engine = entry.unit, entry.flat, self.engine
        if not engine.backward_open or engine.differentiating:
            engine.passes.event(True)
        if flat.grad is None:
            wide = engine.deferring  # accumulation never happens in 16 bits
            flat.grad = self._buffer(flat, flat.dtypes.sums if wide else flat.dtypes.wire)
        unit.aside.append(entry)
        unit.aside_bytes += entry.nbytes
        unit.gradients.discard(entry)
        if not unit.gradients or unit.aside_bytes > self.aside:
            with disable_torch_function(), torch.no_grad():
                self.store(unit)
                if unit.gradients:
                    return
                if not unit.launched:
                    unit.ready = True
                    self.order.seen.append(unit)
                    if not engine.deferring:
                        self._advance()
                self.gather.maybe_release(unit)

    def store(self, unit: Unit) -> None:
        """Move the gradients that wait on whole parameters into the unit's buffers, scaled for the
        mean.
        """
        came, unit.aside, unit.aside_bytes = unit.aside, [], 0
        alike: dict[tuple[Flat, bool, int], Pairs] = defaultdict(list)
        for entry in came:
            grad = local_of(get_grad(entry.compute))
            if grad is None:  # a hook has dropped it, or it came twice and is stored
                continue
            if grad.layout is not torch.strided:
                raise ValueError(
                    f"parameter {entry.slot.name!r} got a gradient of layout {grad.layout}; "
                    "Onefold reduces dense gradients only. Use sparse=False."
                )
            if self.marks is not None and self.marks.open:
                self.marks.note(entry, grad)
            set_grad(entry.compute, None)
            self.used.add(entry)
            flat = entry.flat
            filled = entry in flat.filled
            flat.filled.add(entry)
            alike[flat, filled, entry.parts].append((entry, grad))
        unit.late |= unit.launched and bool(alike)
        for (flat, filled, parts), pairs in alike.items():
            self._add(flat, filled, parts, pairs)

    def _add(self, flat: Flat, filled: bool, parts: int, pairs: Pairs) -> None:
        """Copy gradients into the flat buffer, or add them to those that are there (`filled`)."""
        buffer, sums, engine = flat.grad, flat.dtypes.sums, self.engine
        assert buffer is not None
        if filled and buffer.dtype != sums:
            narrow = buffer
            buffer = self.pool.take(narrow.numel(), sums, self._category, flat.unit_name)
            flat.grad = buffer.copy_(narrow)
            self.pool.give(narrow)
        scale = flat.early_scale * parts * engine.factor
        views, grads = [flat.view(buffer, e) for e, _ in pairs], [grad for _, grad in pairs]
        if filled:
            torch._foreach_add_(views, grads, alpha=scale)
        elif scale != 1 and any(grad.itemsize > buffer.itemsize for grad in grads):
            for view, grad in zip(views, grads, strict=True):
                torch.mul(grad, scale, out=view)  # a copy first would round twice
        else:
            torch._foreach_copy_(views, grads)
            if scale != 1:
                torch._foreach_mul_([buffer] if len(pairs) == len(flat.entries) else views, scale)

    def passed_over(self, units: list[Unit]) -> None:
        """Let units that the backward pass went past without using them take part with zeros now:
        other ranks may wait for them.

        A gradient that comes later still is marked late and goes into the second round.
        """
        for unit in units:
            if len(unit.gradients) == len(unit.awaited):
                unit.ready = True
        if not self.engine.deferring:
            self._advance()

    @property
    def _category(self) -> str:
        """The ledger's category of whole gradients: GRADIENTS if they stay until the boundary,
        REDUCTION if they are about to be sent.
        """
        return GRADIENTS if self.engine.deferring else REDUCTION

    def _buffer(self, flat: Flat, dtype: torch.dtype) -> torch.Tensor:
        """Take a gradient buffer with zeros between the slots. The slots themselves are not
        initialized.
        """
        buffer = self.pool.take(flat.layout.numel, dtype, self._category, flat.unit_name)
        for gap in flat.gaps:
            buffer[gap].zero_()
        return buffer

    # -- the wire ----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Launch units in the agreed order, as long as the next one is ready. Land what is due after
        every launch.
        """
        while (unit := self.order.next()) is not None and unit.ready:
            if unit.calls == 0 and not self.gather.pass_by(unit):
                return
            self._launch(unit)
            self.order.at += 1
            while is_due(self.under_way, self.in_flight):
                self._land(self.under_way.pop(0))
            while len(self.on_next_hop) > self.in_flight or are_large(self.on_next_hop):
                self._land(self.on_next_hop.pop(0))

    def _launch(self, unit: Unit) -> None:
        self.store(unit)
        if self.group.run_ahead is not None:
            self.group.run_ahead.comes(unit.index, "backward")
        unit.launched = True
        for flat in unit.flats:
            if not flat.travels:
                continue
            buffer, flat.grad = flat.grad, None
            if buffer is None:
                buffer = self._buffer(flat, flat.dtypes.wire)
            used, flat.filled = flat.filled, set()
            self.used |= used  # if only by earlier micro-batches: other ranks must hear of it
            for entry in flat.entries:
                if entry not in used:
                    flat.view(buffer, entry).zero_()
            r = Reduction(unit, flat, used, flat.hops[0])
            self._start(r, buffer)
            self.under_way.append(r)

    def _start(self, r: Reduction, buffer: torch.Tensor) -> None:
        """Start the hop of `r`, with `buffer`."""
        move = "all-reduce" if r.flat.whole_master else "reduce-scatter"
        context = self.engine.context(move, r.unit.name, about=r.flat.trained)
        r.under_way = r.hop.start(buffer, context)
        next(r.under_way)

    def _land(self, r: Reduction) -> None:
        """Wait for the parts and add them up in rank order. Then start the next hop, or hand over
        the sums, unless other ranks have to tell first which of them are meant.
        """
        flat, total = r.flat, landed(r.under_way)
        if not r.is_last:
            held, flat.held = flat.held, None
            if held is not None:  # what the group has of earlier micro-batches, [Note: held sums]
                total.add_(held)
                self.pool.give(held)
            if self.engine.holding:
                flat.held = self.pool.take(total.numel(), total.dtype, GRADIENTS, r.unit.name)
                flat.held.copy_(total)
                self.pool.give(total)
                return
            r.hop = flat.hops[-1]
            self._start(r, total)
            self.on_next_hop.append(r)
            return
        r.total = total
        if flat.spec.broadcast_back:  # to the other ranks that hold them too
            context = self.engine.context("all-reduce", r.unit.name, about=flat.trained)
            r.gathering = flat.holders.all_gather(total, context, flat.index, over=1)
        else:
            every = flat.awaited <= r.used
            self._bring_down(r, r.used, every)
            if every:
                self._hand_over(r, r.used)
                return
        self.summed.append(r)

    # -- handing over ------------------------------------------------------------------------------

    def _bring_down(self, r: Reduction, used: set[Entry], every: bool) -> None:
        """Take sums to the tier where gradients are stored. `every`: those of the entries `used` are
        all that are meant.
        """
        storage, total = r.flat.storage, r.total
        ledger = self._ledgers[storage.gradient_tier]
        if ledger is not self.memory:
            assert total is not None
            mine = [e for e in r.flat.entries if e in used and not e.elsewhere]
            there = [(get_grad(e.param), total[e.here]) for e in mine if every]
            self.memory.add(GRADIENTS, -nbytes_of(total))
            r.total = storage.accept(total, there, mine if self.engine.sync else [])
            if r.total is not None:
                ledger.add(GRADIENTS, nbytes_of(r.total))

    def _hand_over(self, r: Reduction, used: set[Entry]) -> None:
        """Give the sums of the entries `used` to the optimizer's parameters: set `.grad`, or add to
        it, as autograd does.
        """
        flat, storage, total = r.flat, r.flat.storage, r.total
        ledger, early = self._ledgers[storage.gradient_tier], self.early
        meant = [e for e in flat.entries if e in used]
        for entry in meant:
            entry.graded_elsewhere |= entry.elsewhere
        mine = [e for e in meant if not e.elsewhere]
        in_backward = early.takes(flat, meant)
        if total is not None:
            before: list[Any] = []
            if storage.gradients_on_disk and not in_backward:
                try:
                    storage.take_gradient(total, mine)
                except TierError as error:
                    # The other ranks wait for this one: all raise before the optimizer steps
                    self.engine.failed(error)
            else:
                before = [get_grad(e.param) for e in mine]
                master = flat.dtypes.master
                if total.dtype != master and None in before:  # one cast, not one a parameter
                    r.total = total.to(master)
                    ledger.add(GRADIENTS, nbytes_of(r.total))
                    ledger.add(GRADIENTS, -nbytes_of(total))
                    total = r.total
                for entry, there in zip(mine, before, strict=True):
                    own = flat.own(total, entry)
                    if there is None:
                        set_grad(entry.param, own)
                    else:
                        there.add_(own)
            if None not in before and (storage.offloaded or r.gathering is None):
                ledger.add(GRADIENTS, -nbytes_of(total))  # they were added, or copied
        if in_backward:
            early.landed(flat)

    def finish(self, used_anywhere: set[Entry]) -> None:
        """Land everything and hand over the gradients of what any rank used."""
        while self.under_way:
            self._land(self.under_way.pop(0))
        if self.engine.holding:
            self.held |= used_anywhere
            return
        used_anywhere, self.held = used_anywhere | self.held, set()
        while self.on_next_hop:
            self._land(self.on_next_hop.pop(0))
        self.pool.drain()  # nothing more is sent, and copies of sums need room
        while self.summed:  # one by one, so that each is freed once it is handed over
            r = self.summed.pop(0)
            if r.gathering is not None:
                r.gathering.wait()
                self._bring_down(r, used_anywhere, every=True)
            self._hand_over(r, used_anywhere)

    def launch_rest(self) -> None:
        """At the end of a backward pass, launch the units whose gradients did not all come, with
        zeros for the missing ones.

        Reductions that have a further hop start it now: this rank is about to wait for the others,
        and they may wait for that hop.
        """
        for unit in self.units:
            unit.ready = True
        self._advance()
        while self.under_way and not self.under_way[0].is_last:
            self._land(self.under_way.pop(0))

    def second_round(self, late: list[Unit], used_anywhere: set[Entry]) -> None:
        """Reduce the gradients that came after their unit was reduced. (Re-entrant checkpointing of
        a shared module brings such gradients.)
        """
        for unit in late:
            if self.early.has_stepped(unit):
                raise RuntimeError(
                    f"a gradient of {unit.name!r} came after the unit was stepped"
                    " in the backward pass: this model uses it in more than one part of the"
                    " pass. Leave step_in_backward out."
                )
            self._launch(unit)
        self.finish(used_anywhere)

    def drop(self) -> None:
        """Drop everything that a failed backward pass left behind."""
        if self.marks is not None:
            self.marks.forget()
        for r in (*self.under_way, *self.on_next_hop):
            drop(r.under_way)
        if self.group.broken is None:
            for r in self.summed:
                if r.gathering is not None:
                    r.gathering.wait()
        self.under_way.clear()
        self.on_next_hop.clear()
        self.summed.clear()
        self.held.clear()
        for unit in self.units:
            unit.gradients = set()
            unit.aside, unit.aside_bytes = [], 0
            for flat in unit.flats:
                flat.filled = set()
                # Forgotten first: after a second Ctrl-C in here, the next call gives none twice
                buffers, flat.grad, flat.held = (flat.grad, flat.held), None, None
                for buffer in buffers:
                    if buffer is not None:
                        self.pool.give(buffer)
                for entry in flat.entries:
                    set_grad(entry.compute, None)

    # -- gradients that wait for the boundary --------------------------------------------------------

    def waiting(self, entry: Entry) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what waits for the boundary of the gradient of `entry`, and the elements of it that
        this rank steps, both one-dimensional: this rank's whole gradient, or its group's sums. None
        if nothing waits.
        """
        flat, slot = entry.flat, entry.slot
        if self.engine.backward_open:
            return None
        if flat.grad is not None and entry in flat.filled:
            buffer, first = flat.grad, 0
        elif flat.held is not None and entry in self.held:
            buffer, first = flat.held, flat.shard[0]
        else:
            return None
        a, b = overlap((slot.start, slot.end), (first, first + buffer.numel()))
        return buffer[a - first : b - first], buffer[flat.owned[0] - first :][entry.here]

    def whole_waiting(self, entry: Entry) -> torch.Tensor | None:
        """Return a copy of this rank's whole gradient of `entry` that waits for the boundary, as
        autograd has made it; None if none waits whole.
        """
        flat, found = entry.flat, self.waiting(entry)
        if found is None or entry not in flat.filled:
            return None
        return found[0].view(entry.slot.shape) / (flat.early_scale * entry.parts)

    def forget(self, entry: Entry) -> None:
        """Drop what waits for the boundary of the gradient of `entry`: its `.grad` became None."""
        flat = entry.flat
        if self.engine.backward_open:
            return
        flat.filled.discard(entry)
        if flat.grad is not None and not flat.filled:
            self.pool.give(flat.grad)
            flat.grad = None
        if (found := self.waiting(entry)) is not None:  # its group's sums may wait too
            found[0].zero_()
            self.held.discard(entry)
        if flat.held is not None and self.held.isdisjoint(flat.entries):
            self.pool.give(flat.held)
            flat.held = None

    def gradient_bytes(self, tier: Tier) -> int:
        """Return the bytes of gradients on a tier that wait for the optimizer: of reduced ones, and
        on the device also of those that wait for the boundary.
        """
        # In a backward pass buffers change owners: only the ledger's own count is right
        if self.engine.backward_open:
            return self._ledgers[tier].held(GRADIENTS)
        flats = self.engine.flats
        here = [flat for flat in flats if flat.storage.gradient_tier is tier]
        with disable_torch_function():
            reduced = sum(unique_bytes([get_grad(e.param) for f in here for e in f.entries]))
        if tier is not Tier.DEVICE:
            return reduced
        waiting = [b for flat in flats for b in (flat.grad, flat.held) if b is not None]
        return reduced + sum(map(nbytes_of, waiting))

    # -- which parameters train ----------------------------------------------------------------------

    def follow_trainable(self, flats: Iterable[Flat]) -> None:
        """Follow `requires_grad` as the user has set it."""
        for flat in flats:
            if not flat.unsharded:
                flat.follow_trainable(self.engine.pending)


# -- when a reduction is due -----------------------------------------------------------------------
#
# Of reductions with a `unit`, `sent_bytes` and `is_last` (they are on their last hop), the oldest
# first. What is due depends on the launches alone, not on when a rank was ready. So all ranks start
# next hops in the same order among their launches. Backends without tags need that.


def is_due(flying: Sequence[Any], in_flight: int) -> bool:
    """Whether to wait for the oldest reduction: too many are in flight, in number or in bytes, or it
    has a further hop and another unit has been launched since.
    """
    if len(flying) > in_flight:
        return not in_flight or sum([r.sent_bytes for r in flying]) > SMALL_TRAFFIC
    if len(flying) < 2 or flying[0].unit == flying[-1].unit:
        return False
    return not flying[0].is_last or are_large(flying)


def are_large(flying: Sequence[Any]) -> bool:
    """Whether reductions of several units are in flight, with more than LARGE_TRAFFIC bytes. A small
    unit that follows a large one (a norm behind a head) is no reason to wait for that one.
    """
    if len(flying) < 2 or 2 * sum([r.sent_bytes for r in flying]) <= LARGE_TRAFFIC:
        return False
    newest = sum([r.sent_bytes for r in flying if r.unit == flying[-1].unit])
    return bool(flying[0].unit != flying[-1].unit) and newest > SMALL_TRAFFIC


# -- memory ------------------------------------------------------------------------------------------


def unique_bytes(tensors: Iterable[torch.Tensor | None]) -> Iterator[int]:
    """The bytes of each storage among `tensors`, once."""
    seen = set()
    with disable_torch_function():
        for t in tensors:
            if t is not None and (storage := t.untyped_storage())._cdata not in seen:
                seen.add(storage._cdata)
                yield storage.nbytes()
