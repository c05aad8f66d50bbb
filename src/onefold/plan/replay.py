"""The engine's schedule of one optimizer step, replayed in integers: every buffer taken and given
back, in order.

    forward    take 0 | take 1, give 0 | ...                     gathered units, prefetch ahead
    backward   take n | arrival: reduction buffer | parts | land: gradients, give | ...
    boundary   (moments, gradients) ──► gradients dropped

Over groups a reduction lands twice: the sums of the first hop travel on, or are held in the group
until the boundary. What travels encoded has a buffer of bytes beside the whole while it is on its
way.

Where state rests off the device its gradients leave as they land (on a GPU a window of them is
still there, read by copies), and where parameters are read from a disk one unit more has its
buffer.

It mirrors runtime/gather.py, runtime/reduce.py and memory/pool.py in the steady state (orders
learned, every unit used once in each pass, every trainable parameter gets a gradient) and is
checked against the ledger of the real engine, byte for byte. Activations are not the engine's:
`Moment`s name the unit and the phase so that a trace can be laid over them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onefold.layout import ShardSpec
from onefold.memory import GATHERED, GRADIENTS, LEAVING, REDUCTION, MemoryLedger, Pool
from onefold.plan.replayed import Moment, Reduction, Unit, backwards, outer
from onefold.plan.states import UnitPlan, resting, units_ahead
from onefold.recipe import Recipe
from onefold.recipe.core import SMALL_TRAFFIC
from onefold.recipe.rows import GROUP


class Replay:
    """One rank's steps. `run(micro_batches)` is a step; `moments` are what was seen, `peak` the
    largest of them. The pool and the ledger are the engine's own; buffers have sizes and no memory.
    """

    def __init__(self, units: Sequence[UnitPlan], recipe: Recipe, window: int = 0) -> None:
        """
        Args:
            window: bytes of gradients that a copy to the host may hold on the device
                (`onefold.device.copies.WINDOW`); 0 where copies are done at once.
        """
        self.ledger = MemoryLedger()
        self.pool = Pool(torch.device("meta"), self.ledger)
        self.window = window
        self.leaving: list[int] = []  # gradients that such a copy reads
        self.recipe = recipe
        self.units = [Unit(u, i) for i, u in enumerate(units)]
        self.ahead = units_ahead(units, recipe)
        self.in_flight = recipe.in_flight if recipe.overlap else 0
        self.from_disk = bool(self.ahead) and any(
            f.gathers_from_disk for u in units for f in u.flats
        )
        self.unsharded = all(f.unsharded for u in units for f in u.flats)
        self.outer = outer(units)
        # The embedding is a unit of its own, so the root is a final norm or a head
        self.ends_first = any(u.looks_up_only for u in units)
        self.moments: list[Moment] = []
        # Whole gradients kept until the boundary, by id of the flat
        self.grads: dict[int, torch.Tensor] = {}
        self.held_sums: dict[int, torch.Tensor] = {}  # sums inside the group that wait for it
        self.has_grad: set[int] = set()
        self.unused: set[int] = set()  # gathered ahead of their use
        for unit in units:
            for flat in unit.flats:
                for category, nbytes in resting(flat).items():
                    self.ledger.add(category, nbytes)
        self.holding = False

    @property
    def peak(self) -> dict[str, int]:
        """The engine's bytes when their sum was largest, by category."""
        return max(self.moments, key=lambda m: m.total).held

    def _moment(self, micro_batch: int, phase: str, unit: str) -> None:
        """Close a slot: its largest sum goes on record, the next slot starts from what is held
        now.
        """
        self.moments.append(Moment(micro_batch, phase, unit, self.ledger.peak()))
        self.ledger.reset_peak()

    # -- a step ------------------------------------------------------------------------------------

    def run(self, micro_batches: int = 1) -> Replay:
        """One optimizer step, begun and ended at rest."""
        self.ledger.reset_peak()
        for k in range(micro_batches):
            last = k + 1 == micro_batches
            self._forward(k)
            deferring = not last and self.recipe.reduce_at == "boundary"
            self.holding = not last and not deferring and self.recipe.gradients.over == GROUP
            self._backward(k, deferring)
        self._moment(micro_batches - 1, "step", "(optimizer)")
        self.ledger.set(GRADIENTS, 0)
        self.has_grad.clear()
        return self

    # -- forward -----------------------------------------------------------------------------------

    def _goes_through(self, units: list[Unit]) -> None:
        """What is gathered from now on, in this order, as far as it is not gathered then."""
        self.coming, self.passed = units, 0
        self.place = {unit.index: at for at, unit in enumerate(units)}

    @property
    def _next(self) -> Unit | None:
        return self.coming[self.passed] if self.passed < len(self.coming) else None

    def _forward(self, k: int) -> None:
        self._goes_through([u for u in self.units if not u.plan.resident])
        self.renewing = k == 0
        open_units: list[Unit] = []
        for unit in self.units:
            while open_units and not open_units[-1].plan.encloses(unit.plan):
                self._leave(open_units.pop(), k)
            self._acquire(unit)
            open_units.append(unit)
        while open_units:
            self._leave(open_units.pop(), k)
        if any(not u.plan.resident for u in self.units):
            self.pool.drain()

    def _leave(self, unit: Unit, k: int) -> None:
        self._moment(k, "forward", unit.plan.name)
        # It waits for the backward pass, as what is gathered ahead waits for its use
        if unit.plan.turns:
            unit.claimed = False
            self.unused.add(unit.index)
        elif unit.gathered and self.recipe.reshard_after_forward:
            self._release(unit)

    def _acquire(self, unit: Unit) -> None:
        if unit.plan.resident:
            return
        self.passed = max(self.passed, self.place.get(unit.index, -1) + 1)
        if not unit.gathered:
            self._launch(unit)
        self._arrive(unit)
        if unit.claimed:
            return
        unit.claimed = True
        self.unused.discard(unit.index)
        ahead, nbytes = len(self.unused), sum(self.units[i].nbytes for i in self.unused)
        while self.ahead and (following := self._next) is not None:
            nbytes += following.nbytes
            if ahead >= self.ahead and nbytes > SMALL_TRAFFIC:
                break
            self.passed += 1
            if not following.gathered:
                self._launch(following)
                ahead += 1
        following = self._next
        if self.from_disk and following is not None and not following.gathered:
            flats = enumerate(following.plan.flats)
            self._hold(following, [i for i, f in flats if f.gathers_from_disk and self._reads(f)])

    def _launch(self, unit: Unit) -> None:
        unit.gathered = True
        self.unused.add(unit.index)
        for i, flat in enumerate(unit.plan.flats):
            if not flat.resident:
                self._hold(unit, [i])
                if flat.gather_codec is not None:
                    unit.coded.append(self.pool.take(flat.coded_bytes, torch.uint8, GATHERED))

    def _arrive(self, unit: Unit) -> None:
        """What came encoded is decoded."""
        coded, unit.coded = unit.coded, []
        for buffer in coded:
            self.pool.give(buffer)

    def _reads(self, flat: ShardSpec) -> bool:
        """Whether a gather begins with the masters: where something is kept of them, only the first
        after a step.
        """
        keeps = flat.gather_codec is not None or flat.has_secondary
        return not keeps or (self.renewing and flat.trainable)

    def _hold(self, unit: Unit, which: list[int]) -> None:
        """Take the buffers that are not held yet."""
        for i in which:
            if i not in unit.held:
                flat = unit.plan.flats[i]
                unit.held[i] = self.pool.take(flat.numel, flat.dtypes.compute, GATHERED)

    def _release(self, unit: Unit) -> None:
        self._arrive(unit)
        unit.gathered = unit.claimed = False
        self.unused.discard(unit.index)
        held, unit.held = unit.held, {}
        for _, buffer in sorted(held.items()):
            self.pool.give(buffer)

    # -- backward ----------------------------------------------------------------------------------

    def _backward(self, k: int, deferring: bool) -> None:
        self.under_way: list[Reduction] = []
        self.on_next_hop: list[Reduction] = []  # on a further hop
        self.summed: list[int] = []
        self.copies: list[int] = []
        self.renewing = False
        order = backwards(self.units)
        self._goes_through(
            [u for u in order if not (u.plan.resident or u.plan.looks_up_only or u.gathered)]
        )
        around: list[Unit] = []
        # The root where it holds nothing but what follows the blocks: done before them
        tail: list[Unit] = []
        for unit in order:
            if tail and any(c.isdigit() for c in unit.plan.name):
                self._complete(tail.pop(), k, deferring)
            while around and not around[-1].plan.encloses(unit.plan):
                self._complete(around.pop(), k, deferring)
            if not unit.plan.looks_up_only:
                self._acquire(unit)
            if unit.plan.name not in self.outer and not (unit.plan.path == "" and self.ends_first):
                self._complete(unit, k, deferring)
                continue
            # Its own parameters get their last gradient after those inside; but some (a final norm,
            # a head) get theirs first: its buffer is there from then on
            (tail if unit.plan.path == "" and self.ends_first else around).append(unit)
            self._store(unit, deferring)
        for unit in (*tail, *reversed(around)):
            self._complete(unit, k, deferring)
        for under_way in (self.under_way, self.on_next_hop):
            while under_way:
                self._land(under_way.pop(0))
        for nbytes in self.copies:  # sums that were sent on, in another dtype than the masters'
            self.ledger.add(GRADIENTS, nbytes)
        for nbytes in self.summed:
            self.ledger.add(GRADIENTS, -nbytes)
        while self.leaving:  # the host is about to read them
            self.ledger.add(LEAVING, -self.leaving.pop(0))
        for unit in self.units:
            if unit.gathered:
                self._release(unit)
        self.pool.drain()
        for unit in self.units:  # the ledger sees them now
            self._own_gradients(unit)
        self._moment(k, "backward", "(end)")

    def _complete(self, unit: Unit, k: int, deferring: bool) -> None:
        """Its last gradient has come."""
        if self.unsharded:
            self._own_gradients(unit)
        flats = self._store(unit, deferring)
        if not deferring:
            for flat in flats:
                self._reduce(unit, flat)
            while self._is_due():
                self._land(self.under_way.pop(0))
            while len(self.on_next_hop) > self.in_flight:
                self._land(self.on_next_hop.pop(0))
        if unit.gathered:
            self._release(unit)
        self._moment(k, "backward", unit.plan.name)

    def _own_gradients(self, unit: Unit) -> None:
        """Where the engine has no hooks autograd's gradients are the parameters' own."""
        for flat in unit.plan.flats:
            if flat.unsharded and flat.trainable and id(flat) not in self.has_grad:
                self.has_grad.add(id(flat))
                self.ledger.add(GRADIENTS, flat.layout.content * flat.dtypes.master.itemsize)

    def _store(self, unit: Unit, deferring: bool) -> list[ShardSpec]:
        """Take the buffers that its gradients are collected in, as far as they are not there."""
        flats = [f for f in unit.plan.flats if f.trainable and not f.unsharded]
        for flat in flats:
            if id(flat) not in self.grads:
                dtype = flat.dtypes.sums if deferring else flat.dtypes.wire
                category = GRADIENTS if deferring else REDUCTION
                self.grads[id(flat)] = self.pool.take(flat.numel, dtype, category)
        return flats

    def _reduce(self, unit: Unit, flat: ShardSpec) -> None:
        r = Reduction(unit.index, flat, self.grads.pop(id(flat)))
        self._send(r)
        self.under_way.append(r)

    def _send(self, r: Reduction) -> None:
        room = r.flat.exchange(r.at, r.buffer.dtype)
        # Rows that are added at once, not one by one
        r.rows = 0 if r.flat.added_by(r.hop) == "pairwise" else room.rows
        if room.sent:
            r.sent = self.pool.take(room.sent, room.dtype, REDUCTION)
        if room.apart:
            r.into = room.apart * room.dtype.itemsize
            self.ledger.add(REDUCTION, r.into)
        if room.whole:
            r.whole = True
            self.ledger.add(GRADIENTS, r.hop.span * room.dtype.itemsize)
        elif room.rows:
            r.received = self.pool.take(room.received, room.dtype, REDUCTION)

    def _is_due(self) -> bool:
        """Whether to wait for the oldest: too many are under way, or it has a hop to go and another
        unit has been sent since.
        """
        if len(self.under_way) > self.in_flight:
            return (
                not self.in_flight or sum(r.buffer.nbytes for r in self.under_way) > SMALL_TRAFFIC
            )
        return (
            bool(self.under_way)
            and not self.under_way[0].is_last
            and self.under_way[0].unit != self.under_way[-1].unit
        )

    def _land(self, r: Reduction) -> None:
        flat, sums = r.flat, r.flat.dtypes.sums
        sent, total, nbytes = r.sent, None, 0
        if sent is not None and not r.encodes:
            self.pool.give(sent)
            sent = None
        if r.into:
            nbytes = r.into
            self.ledger.add(REDUCTION, -nbytes)
            self.ledger.add(GRADIENTS, nbytes)
        elif not r.is_last:
            total = self.pool.take(r.hop.own, sums, REDUCTION)
        else:
            dtype = flat.landed
            nbytes = (flat.own if flat.broadcast_back else r.hop.own) * dtype.itemsize
            self.ledger.add(GRADIENTS, 0 if r.whole else nbytes)
            if dtype != sums and not (r.rows or r.whole):
                self.pool.give(self.pool.take(r.hop.own, sums, REDUCTION))
        for buffer in (r.received, sent, r.buffer):
            if buffer is not None:
                self.pool.give(buffer)
        if total is None:
            self._hand_over(flat, nbytes)
        elif not self._wait_inside(flat, total):
            r = Reduction(r.unit, flat, total, r.at + 1)
            self._send(r)
            self.on_next_hop.append(r)

    def _wait_inside(self, flat: ShardSpec, total: torch.Tensor) -> bool:
        """Before the boundary the group's sums stay; see [Note: held sums] in
        runtime/reduce.py.
        """
        if (held := self.held_sums.pop(id(flat), None)) is not None:
            self.pool.give(held)
        if self.holding:
            self.held_sums[id(flat)] = self.pool.take(total.numel(), total.dtype, GRADIENTS)
            self.pool.give(total)
        return self.holding

    def _bring_down(self, nbytes: int) -> None:
        """A copy to the host reads them for a while: as long as the window lets it, which is as
        slow as copies can be.
        """
        if self.window:
            self.leaving.append(nbytes)
            self.ledger.add(LEAVING, nbytes)
            while sum(self.leaving) > self.window:
                self.ledger.add(LEAVING, -self.leaving.pop(0))

    def _hand_over(self, flat: ShardSpec, nbytes: int) -> None:
        """`.grad` lies in the sums, or is a copy of them in the masters' dtype, or they were added
        to it.
        """
        whole = flat.broadcast_back  # sums that were sent on are handed over at the end of backward
        if flat.tiers is not None:  # they leave the device
            if whole:
                self.summed.append(nbytes)
            else:
                self.ledger.add(GRADIENTS, -nbytes)
                self._bring_down(nbytes)
            return
        dtype = flat.landed
        if id(flat) in self.has_grad:
            self.summed.append(nbytes) if whole else self.ledger.add(GRADIENTS, -nbytes)
            return
        self.has_grad.add(id(flat))
        if dtype != flat.dtypes.master:
            local = sum(flat.local(slot) for slot in flat.layout.slots)
            copied = local * flat.dtypes.master.itemsize
            if whole:
                self.copies.append(copied)
            else:
                self.ledger.add(GRADIENTS, copied)
            self.summed.append(nbytes)
