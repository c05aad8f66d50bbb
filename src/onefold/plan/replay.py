"""The engine's schedule of one optimizer step, replayed in integers: every buffer is taken and
given back in the engine's order.

    forward    take 0 | take 1, give 0 | ...                     gathered units, prefetch ahead
    backward   take n | arrival: reduction buffer | parts | land: gradients, give | ...
    boundary   (moments, gradients) ──► gradients dropped

Over groups a reduction lands twice: the sums of the first hop travel on, or the group holds them
until the boundary. Encoded data has a buffer of bytes beside the whole while it travels.

Gradients of offloaded state leave the device as they land; on a GPU, copies still read a window of
them. If parameters are read from a disk, one more unit has its buffer.

The replay follows runtime/gather.py, runtime/reduce.py and memory.py in the steady state: the
orders are learned, each pass uses every unit once, every trainable parameter gets a gradient. Tests
compare it with the real engine's ledger, byte for byte. Activations are not in it: a `Moment` names
its unit and phase, so that a trace can be laid over the moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from onefold.device import within
from onefold.layout import Hop, ShardSpec
from onefold.memory import GATHERED, GRADIENTS, LEAVING, OWNED, REDUCTION, MemoryLedger, Pool
from onefold.plan.states import (
    UnitPlan,
    adds_on_device,
    outer,
    resting,
    sums_chunk,
    units_ahead,
)
from onefold.recipe import Recipe
from onefold.recipe.core import LARGE_TRAFFIC, SMALL_TRAFFIC
from onefold.recipe.rows import GROUP
from onefold.runtime.order import are_large, is_due


@dataclass(frozen=True)
class Moment:
    """The engine's largest bytes while one unit runs, by category. `phase` is "forward", "backward"
    or "step".
    """

    micro_batch: int
    phase: str
    unit: str
    held: dict[str, int]

    @cached_property
    def total(self) -> int:
        return sum(self.held.values())


@dataclass
class Reduction:
    """The gradients of one flat buffer, on hop `at` of their reduction.

    Attributes:
        sent: the buffer that travels instead of `buffer`, if any.
        into: bytes of a received part that becomes the sum.
        rows: parts in `received` that are added up at once.
        total: memory for the sum of such parts, taken before they come, if it is sent on.
    """

    unit: int
    flat: ShardSpec
    buffer: torch.Tensor
    at: int = 0
    sent: torch.Tensor | None = None
    received: torch.Tensor | None = None
    into: int = 0
    rows: int = 0
    total: torch.Tensor | None = None

    @property
    def hop(self) -> Hop:
        return self.flat.hops[self.at]

    @property
    def encodes(self) -> bool:
        return self.flat.encodes(self.hop)

    @property
    def is_last(self) -> bool:
        return self.at + 1 == len(self.flat.hops)

    @property
    def sent_bytes(self) -> int:
        return self.hop.span * self.flat.dtypes.wire.itemsize


@dataclass
class Unit:
    """A unit's gathered buffers, by number of the flat buffer, and encoded data that arrives."""

    plan: UnitPlan
    index: int
    held: dict[int, torch.Tensor] = field(default_factory=dict)
    coded: list[torch.Tensor] = field(default_factory=list)
    gathered: bool = False
    claimed: bool = False

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the gathered unit."""
        flats = (f for f in self.plan.flats if not f.resident)
        return sum(f.numel * f.dtypes.compute.itemsize for f in flats)


class Replay:
    """One rank's steps. `run(micro_batches)` is a step. `moments` are the bytes that were seen,
    `peak` the largest of them. The pool and the ledger are the engine's own; buffers have no
    memory.
    """

    def __init__(self, units: Sequence[UnitPlan], recipe: Recipe, window: int = 0) -> None:
        """
        Args:
            window: bytes of gradients that copies to the host may still read on the device
                (`onefold.device.copies.WINDOW`), or twice the largest; 0: copies are done at once.
        """
        self.ledger = MemoryLedger()
        self.pool = Pool(torch.device("meta"), self.ledger)
        self.window = window
        self.leaving: list[int] = []  # gradients that such copies read
        self.recipe = recipe
        self.units = [Unit(u, i) for i, u in enumerate(units)]
        self.ahead = units_ahead(units, recipe)
        self.in_flight = recipe.in_flight if recipe.overlap else 0
        self.from_disk = bool(self.ahead) and any(
            f.gathers_from_disk for u in units for f in u.flats
        )
        self.unsharded = all(f.unsharded for u in units for f in u.flats)
        self.outer = outer(units)
        # The embedding is a unit, so the root holds a final norm or a head
        self.ends_first = any(u.looks_up_only for u in units)
        self.moments: list[Moment] = []
        # By id of the flat buffer: whole gradients, and sums that the group holds, both until the
        # boundary; buffers that have a gradient
        self.grads: dict[int, torch.Tensor] = {}
        self.held_sums: dict[int, torch.Tensor] = {}
        self.has_grad: set[int] = set()
        # By id: buffers that have a gradient on the host. The bytes in which the device adds to it
        self.has_gone: set[int] = set()
        self.adding = 0
        self.unused: set[int] = set()  # units that are gathered and not yet used
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
        """Record the largest sum since the last moment."""
        self.moments.append(Moment(micro_batch, phase, unit, self.ledger.peak()))
        self.ledger.reset_peak()

    # -- a step ------------------------------------------------------------------------------------

    def run(self, micro_batches: int = 1, whole: int = 0) -> Replay:
        """Replay one optimizer step, from the state between steps to the same state.

        Args:
            whole: bytes of matrices that are whole for the step, at most (`onefold.plan.owned`).
        """
        self.ledger.reset_peak()
        for k in range(micro_batches):
            last = k + 1 == micro_batches
            self._forward(k)
            deferring = not last and self.recipe.reduces_at == "boundary"
            self.holding = not last and not deferring and self.recipe.gradients.over == GROUP
            self._backward(k, deferring)
        self.ledger.add(OWNED, whole)
        self._moment(micro_batches - 1, "step", "(optimizer)")
        self.ledger.add(OWNED, -whole)
        self.ledger.set(GRADIENTS, 0)
        self.has_grad.clear()
        self.has_gone.clear()
        return self

    # -- forward -----------------------------------------------------------------------------------

    def _goes_through(self, units: list[Unit]) -> None:
        """Set the order in which units are gathered from now on."""
        self.sequence, self.passed = units, 0
        self.place = {unit.index: at for at, unit in enumerate(units)}

    @property
    def _next(self) -> Unit | None:
        return self.sequence[self.passed] if self.passed < len(self.sequence) else None

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
        if unit.plan.turns:  # it stays gathered for the backward pass
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
            if ahead and nbytes > LARGE_TRAFFIC:
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
        """Decode what has arrived encoded."""
        coded, unit.coded = unit.coded, []
        for buffer in coded:
            self.pool.give(buffer)

    def _reads(self, flat: ShardSpec) -> bool:
        """Return whether a gather reads the masters. With a cached shard only the first gather
        after a step does.
        """
        cached = flat.gather_codec is not None or flat.has_secondary
        return not cached or (self.renewing and flat.trainable)

    def _hold(self, unit: Unit, which: list[int]) -> None:
        """Take those of these buffers that are not held yet."""
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
        self.on_next_hop: list[Reduction] = []
        self.summed = self.copied = 0  # bytes of sums that are freed, and of their copies
        self.renewing = False
        order = backwards(self.units)
        self._goes_through(
            [u for u in order if not (u.plan.resident or u.plan.looks_up_only or u.gathered)]
        )
        around: list[Unit] = []
        # The root, if it only holds what follows the blocks: it completes before them
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
            # Its parameters get their last gradient after the units inside. Some (a final norm, a
            # head) get theirs before: the buffer exists from then on
            (tail if unit.plan.path == "" and self.ends_first else around).append(unit)
            self._store(unit, deferring)
        for unit in (*tail, *reversed(around)):
            self._complete(unit, k, deferring)
        for under_way in (self.under_way, self.on_next_hop):
            while under_way:
                self._land(under_way.pop(0))
        self.pool.drain()  # nothing more is sent
        # Sums that were sent on are copied first if the masters have another dtype
        self.ledger.add(GRADIENTS, self.copied)
        self.ledger.add(GRADIENTS, -self.summed)
        while self.leaving:  # the host waits for them
            self.ledger.add(LEAVING, -self.leaving.pop(0))
        self.ledger.add(LEAVING, -self.adding)
        self.adding = 0
        for unit in self.units:
            if unit.gathered:
                self._release(unit)
        self.pool.drain()
        for unit in self.units:
            self._own_gradients(unit)
        self._moment(k, "backward", "(end)")

    def _complete(self, unit: Unit, k: int, deferring: bool) -> None:
        """Handle the last gradient of a unit."""
        if self.unsharded:
            self._own_gradients(unit)
        flats = self._store(unit, deferring)
        if not deferring:
            for flat in flats:
                self._reduce(unit, flat)
            while is_due(self.under_way, self.in_flight):
                self._land(self.under_way.pop(0))
            while len(self.on_next_hop) > self.in_flight or are_large(self.on_next_hop):
                self._land(self.on_next_hop.pop(0))
        if unit.gathered:
            self._release(unit)
        self._moment(k, "backward", unit.plan.name)

    def _own_gradients(self, unit: Unit) -> None:
        """Count the gradients that autograd leaves in parameters without hooks of the engine."""
        for flat in unit.plan.flats:
            if flat.unsharded and flat.trainable and id(flat) not in self.has_grad:
                self.has_grad.add(id(flat))
                self.ledger.add(GRADIENTS, flat.layout.content * flat.dtypes.master.itemsize)

    def _store(self, unit: Unit, deferring: bool) -> list[ShardSpec]:
        """Take the buffers in which the unit's gradients are collected, if they are not there."""
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
        # Parts that are added at once, not one by one
        r.rows = 0 if r.flat.added_by(r.hop) == "pairwise" else room.rows
        if room.sent:
            r.sent = self.pool.take(room.sent, room.dtype, REDUCTION)
        if room.apart:
            r.into = room.apart * room.dtype.itemsize
            self.ledger.add(REDUCTION, r.into)
        if room.rows:
            r.received = self.pool.take(room.received, room.dtype, REDUCTION)
        if r.rows and r.is_last:
            self.ledger.add(GRADIENTS, _landed_bytes(r))
        elif r.rows:
            r.total = self.pool.take(r.hop.own, r.flat.dtypes.sums, REDUCTION)

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
            total = r.total if r.rows else self.pool.take(r.hop.own, sums, REDUCTION)
        else:
            nbytes = _landed_bytes(r)
            if not r.rows:
                self.ledger.add(GRADIENTS, nbytes)
                if r.encodes and flat.landed != sums:
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
        """Hold the group's sums until the boundary; see [Note: held sums] in runtime/reduce.py."""
        if (held := self.held_sums.pop(id(flat), None)) is not None:
            self.pool.give(held)
        if self.holding:
            self.held_sums[id(flat)] = self.pool.take(total.numel(), total.dtype, GRADIENTS)
            self.pool.give(total)
        return self.holding

    def _hand_over(self, flat: ShardSpec, nbytes: int) -> None:
        """Hand sums over: `.grad` is a view of them, or a copy in the masters' dtype, or they were
        added to it. Sums that were sent on are handed over at the end of the backward pass.
        """
        late = bool(flat.broadcast_back)
        if flat.tiers is None and id(flat) not in self.has_grad:
            self.has_grad.add(id(flat))
            if flat.landed != flat.dtypes.master:
                local = sum(flat.local(slot) for slot in flat.layout.slots)
                copied = local * flat.dtypes.master.itemsize
                if late:
                    self.copied += copied
                else:
                    self.ledger.add(GRADIENTS, copied)
                self.summed += nbytes
        elif late:
            self.summed += nbytes
        else:
            self.ledger.add(GRADIENTS, -nbytes)
            if flat.tiers is not None and self.window:
                self._go_down(flat, nbytes)

    def _go_down(self, flat: ShardSpec, nbytes: int) -> None:
        """Copies to the host read sums as long as the window allows: the slowest case."""
        if not self.adding and adds_on_device(flat, id(flat) in self.has_gone):
            self.adding = 2 * sums_chunk([unit.plan for unit in self.units])
            self.ledger.add(LEAVING, self.adding)
        self.has_gone.add(id(flat))
        self.leaving.append(nbytes)
        self.ledger.add(LEAVING, nbytes)
        while not within(self.window, sum(self.leaving), self.leaving):
            self.ledger.add(LEAVING, -self.leaving.pop(0))


def _landed_bytes(r: Reduction) -> int:
    """Return the bytes of the sums of a last hop, with room for those of other ranks."""
    return (r.flat.own if r.flat.broadcast_back else r.hop.own) * r.flat.landed.itemsize


def backwards(units: list[Unit]) -> list[Unit]:
    """Return the order in which a backward pass first reaches the units: from last to first, but a
    unit around others before them.
    """
    groups: list[list[Unit]] = []
    for unit in units:
        if groups and groups[-1][0].plan.encloses(unit.plan):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return [u for head, *rest in reversed(groups) for u in (head, *backwards(rest))]
