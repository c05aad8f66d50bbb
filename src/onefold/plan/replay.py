"""The engine's schedule of one optimizer step, replayed in integers: every buffer taken and given back, in order.

    forward    take 0 | take 1, give 0 | ...                     gathered units, prefetch ahead
    backward   take n | arrival: reduction buffer | parts | land: gradients, give | ...
    boundary   (moments, gradients) ──► gradients dropped

Where state rests off the device its gradients leave as they land, and where parameters are read from a disk one unit more has its buffer.

It mirrors runtime/gather.py, runtime/reduce.py and memory/pool.py in the steady state (orders learned, every unit used once in each
pass, every trainable parameter gets a gradient) and is checked against the ledger of the real engine, byte for byte. Activations are not
the engine's: `Moment`s name the unit and the phase so that a trace can be laid over them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch

from onefold.memory import GATHERED, GRADIENTS, IDLE, REDUCTION
from onefold.plan.states import FlatPlan, UnitPlan, resting
from onefold.recipe import Recipe, Tier


@dataclass(frozen=True)
class Moment:
    """The engine's bytes at their largest while one unit runs: `phase` "forward", "backward" or "step"; by category."""

    micro_batch: int
    phase: str
    unit: str
    held: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.held.values())


@dataclass
class _Buffer:
    numel: int
    dtype: torch.dtype
    category: str
    pooled: bool = True

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class _Reduction:
    flat: FlatPlan
    buffer: _Buffer
    sent: _Buffer | None
    lent: _Buffer | None
    into: _Buffer | None


@dataclass
class _Unit:
    plan: UnitPlan
    index: int
    held: dict[int, _Buffer] = field(default_factory=dict)  # by number of the flat buffer
    gathered: bool = False
    claimed: bool = False


class Replay:
    """One rank's steps. `run(micro_batches)` is a step; `moments` are what was seen, `peak` the largest of them."""

    def __init__(self, units: list[UnitPlan], recipe: Recipe) -> None:
        self.recipe = recipe
        self.units = [_Unit(u, i) for i, u in enumerate(units)]
        self.prefetch = recipe.prefetch if recipe.overlap else 0
        self.in_flight = recipe.in_flight if recipe.overlap else 0
        self.from_disk = bool(self.prefetch) and any(_on_disk(f) for u in units for f in u.flats)
        self.passive = all(f.passive for u in units for f in u.flats)
        self.outer = outer(units)
        self.ends_first = any(u.looks_up_only for u in units)  # the embedding is a unit of its own, so the root is a final norm or a head
        self.now: Counter[str] = Counter()
        self.total = 0
        self.best: dict[str, int] = {}
        self.best_total = 0
        self.moments: list[Moment] = []
        self.free: dict[tuple[int, torch.dtype], int] = defaultdict(int)
        self.grads: dict[int, _Buffer] = {}  # whole gradients kept until the boundary, by id of the flat
        self.has_grad: set[int] = set()
        self.unused: set[int] = set()  # gathered ahead of their use
        for unit in units:
            for flat in unit.flats:
                for category, nbytes in resting(flat).items():
                    self._add(category, nbytes)
        self._high: tuple[int, dict[str, int]] = (0, {})

    # -- the ledger and the pool -----------------------------------------------------------------------------------------------

    def _add(self, category: str, nbytes: int) -> None:
        self.now[category] += nbytes
        self.total += nbytes
        if self.total > self.best_total:
            self.best_total, self.best = self.total, dict(self.now)
        if hasattr(self, "_high") and self.total > self._high[0]:
            self._high = self.total, dict(self.now)

    def _take(self, numel: int, dtype: torch.dtype, category: str) -> _Buffer:
        buffer = _Buffer(numel, dtype, category)
        if self.free[numel, dtype]:
            self.free[numel, dtype] -= 1
            self._add(IDLE, -buffer.nbytes)
        else:
            self._drain()
        self._add(category, buffer.nbytes)
        return buffer

    def _give(self, buffer: _Buffer) -> None:
        self._add(buffer.category, -buffer.nbytes)
        self.free[buffer.numel, buffer.dtype] += 1
        self._add(IDLE, buffer.nbytes)

    def _drain(self) -> None:
        self._add(IDLE, -self.now[IDLE])
        self.free.clear()

    def _moment(self, micro_batch: int, phase: str, unit: str) -> None:
        """Close a slot: its largest sum goes on record, the next slot starts from what is held now."""
        self.moments.append(Moment(micro_batch, phase, unit, {k: v for k, v in self._high[1].items() if v}))
        self._high = self.total, dict(self.now)

    @property
    def peak(self) -> dict[str, int]:
        return {k: v for k, v in self.best.items() if v}

    # -- a step ----------------------------------------------------------------------------------------------------------------

    def run(self, micro_batches: int = 1) -> Replay:
        """One optimizer step, begun and ended at rest."""
        self._high = self.total, dict(self.now)
        for k in range(micro_batches):
            last = k + 1 == micro_batches
            self._forward(k)
            self._backward(k, deferring=not last and self.recipe.reduce_at == "boundary", last=last)
        self._moment(micro_batches - 1, "step", "(optimizer)")
        self._add(GRADIENTS, -self.now[GRADIENTS])
        self.has_grad.clear()
        return self

    # -- forward ---------------------------------------------------------------------------------------------------------------

    def _order(self) -> list[_Unit]:
        return [u for u in self.units if not u.plan.kept]

    def _forward(self, k: int) -> None:
        self.cursor = self._order()
        open_units: list[_Unit] = []
        for unit in self.units:
            while open_units and not open_units[-1].plan.encloses(unit.plan):
                self._leave(open_units.pop(), k)
            self._acquire(unit)
            open_units.append(unit)
        while open_units:
            self._leave(open_units.pop(), k)
        if any(not u.plan.kept for u in self.units):
            self._drain()

    def _leave(self, unit: _Unit, k: int) -> None:
        self._moment(k, "forward", unit.plan.name)
        if unit.gathered and self.recipe.reshard_after_forward:
            self._release(unit)

    def _acquire(self, unit: _Unit) -> None:
        if unit.plan.kept:
            return
        if unit in self.cursor:
            del self.cursor[: self.cursor.index(unit) + 1]
        if not unit.gathered:
            self._launch(unit)
        if unit.claimed:
            return
        unit.claimed = True
        self.unused.discard(unit.index)
        ahead = len(self.unused)
        while ahead < self.prefetch and self.cursor:
            following = self.cursor.pop(0)
            if not following.gathered:
                self._launch(following)
                ahead += 1
        if self.from_disk and self.cursor and not self.cursor[0].gathered:
            self._hold(self.cursor[0], [i for i, f in enumerate(self.cursor[0].plan.flats) if _on_disk(f)])

    def _launch(self, unit: _Unit) -> None:
        unit.gathered = True
        self.unused.add(unit.index)
        self._hold(unit, [i for i, f in enumerate(unit.plan.flats) if not f.kept])

    def _hold(self, unit: _Unit, which: list[int]) -> None:
        """Take the buffers that are not held yet."""
        for i in which:
            if i not in unit.held:
                flat = unit.plan.flats[i]
                unit.held[i] = self._take(flat.numel, flat.dtypes.compute, GATHERED)

    def _release(self, unit: _Unit) -> None:
        unit.gathered = unit.claimed = False
        self.unused.discard(unit.index)
        held, unit.held = unit.held, {}
        for _, buffer in sorted(held.items()):
            self._give(buffer)

    # -- backward --------------------------------------------------------------------------------------------------------------

    def _backward(self, k: int, deferring: bool, last: bool) -> None:
        self.flying: list[_Reduction] = []
        self.summed: list[int] = []
        self.copies: list[int] = []
        order = _backwards(self.units)
        self.cursor = [u for u in order if not u.plan.kept and not u.plan.looks_up_only]
        around: list[_Unit] = []
        tail: list[_Unit] = []  # the root where it holds nothing but what follows the blocks: done before them
        for unit in order:
            if tail and any(c.isdigit() for c in unit.plan.name):
                self._complete(tail.pop(), k, deferring)
            while around and not around[-1].plan.encloses(unit.plan):
                self._complete(around.pop(), k, deferring)
            if not unit.plan.looks_up_only:
                self._acquire(unit)
            if unit.plan.path == "" and self.ends_first:
                tail.append(unit)
                if not self.passive:
                    self._early(unit, deferring)
            elif unit.plan.name in self.outer:
                around.append(unit)  # its own parameters get their last gradient after those inside
                if not self.passive:
                    self._early(unit, deferring)
            else:
                self._complete(unit, k, deferring)
        for unit in (*tail, *reversed(around)):
            self._complete(unit, k, deferring)
        while self.flying:
            self._land(self.flying.pop(0))
        for nbytes in self.copies:  # all-reduced sums in another dtype than the masters'
            self._add(GRADIENTS, nbytes)
        for nbytes in self.summed:
            self._add(GRADIENTS, -nbytes)
        for unit in self.units:
            if unit.gathered:
                self._release(unit)
        self._drain()
        for unit in self.units:  # the ledger sees them now
            self._own_gradients(unit)
        self._moment(k, "backward", "(end)")

    def _early(self, unit: _Unit, deferring: bool) -> None:
        """A unit around others has parameters whose gradients come first (a final norm, a head): its buffer is there from then on."""
        for flat in unit.plan.flats:
            if flat.trainable and not flat.passive:
                self._store(flat, deferring)

    def _complete(self, unit: _Unit, k: int, deferring: bool) -> None:
        if not self.passive:
            for flat in unit.plan.flats:
                if flat.trainable and not flat.passive:
                    self._store(flat, deferring)
            if not deferring:
                for flat in unit.plan.flats:
                    if flat.trainable and not flat.passive:
                        self._reduce(flat)
                while len(self.flying) > self.in_flight:
                    self._land(self.flying.pop(0))
        else:
            self._own_gradients(unit)
        if unit.gathered and unit.plan.path != "":
            self._release(unit)
        self._moment(k, "backward", unit.plan.name)

    def _own_gradients(self, unit: _Unit) -> None:
        """Where the engine has no hooks autograd's gradients are the parameters' own."""
        for flat in unit.plan.flats:
            if flat.passive and flat.trainable and id(flat) not in self.has_grad:
                self.has_grad.add(id(flat))
                self._add(GRADIENTS, flat.layout.content * flat.dtypes.master.itemsize)

    def _store(self, flat: FlatPlan, deferring: bool) -> None:
        buffer = self.grads.get(id(flat))
        category = GRADIENTS if deferring else REDUCTION
        if buffer is None:
            dtype = flat.dtypes.sums if deferring else flat.dtypes.wire
            self.grads[id(flat)] = self._take(flat.numel, dtype, category)

    def _reduce(self, flat: FlatPlan) -> None:
        buffer = self.grads.pop(id(flat))
        sent = None
        if buffer.dtype != flat.dtypes.wire:
            sent = self._take(buffer.numel, flat.dtypes.wire, REDUCTION)
        in_place = not flat.whole_master and flat.ranks > 1 and flat.dtypes.wire == flat.dtypes.sums
        shard, peers = flat.layout.shard_numel, flat.ranks - 1
        into = lent = None
        if in_place:
            into, peers = _Buffer(shard, flat.dtypes.wire, REDUCTION, pooled=False), peers - 1
            self._add(REDUCTION, into.nbytes)
        if peers:
            lent = self._take(peers * shard, flat.dtypes.wire, REDUCTION)
        self.flying.append(_Reduction(flat, buffer, sent, lent, into))

    def _land(self, r: _Reduction) -> None:
        flat = r.flat
        if r.sent is not None:
            self._give(r.sent)
        if r.into is not None:
            nbytes = r.into.nbytes
            self._add(REDUCTION, -nbytes)
            self._add(GRADIENTS, nbytes)
        else:
            dtype = flat.dtypes.wire if flat.whole_master else flat.dtypes.sums
            numel = flat.numel if flat.whole_master else flat.layout.shard_numel
            nbytes = numel * dtype.itemsize
            self._add(GRADIENTS, nbytes)
            if dtype != flat.dtypes.sums:
                self._give(self._take(flat.layout.shard_numel, flat.dtypes.sums, REDUCTION))
        if r.lent is not None:
            self._give(r.lent)
        self._give(r.buffer)
        self._hand_over(flat, nbytes)

    def _hand_over(self, flat: FlatPlan, nbytes: int) -> None:
        """`.grad` lies in the sums, or is a copy of them in the masters' dtype, or they were added to it."""
        whole = flat.whole_master and flat.ranks > 1  # all-reduced sums are handed over at the end of backward
        if flat.tiers is not None:  # they leave the device
            self.summed.append(nbytes) if whole else self._add(GRADIENTS, -nbytes)
            return
        dtype = flat.dtypes.wire if flat.whole_master else flat.dtypes.sums
        if id(flat) in self.has_grad:
            self.summed.append(nbytes) if whole else self._add(GRADIENTS, -nbytes)
            return
        self.has_grad.add(id(flat))
        if dtype != flat.dtypes.master:
            local = sum(flat.local(slot) for slot in flat.layout.slots)
            copied = local * flat.dtypes.master.itemsize
            if whole:
                self.copies.append(copied)
            else:
                self._add(GRADIENTS, copied)
            self.summed.append(nbytes)


def _on_disk(flat: FlatPlan) -> bool:
    """Whether what it is gathered from lies on NVMe."""
    return flat.tiers is not None and flat.tiers.parameters is Tier.NVME and not flat.kept


def outer(units: list[UnitPlan]) -> frozenset[str]:
    """The names of the units around others."""
    around = {u.name for u in units if u.path == ""} if len(units) > 1 else set()
    names = {u.path: u.name for u in units}
    for unit in units:
        parts = unit.path.split(".")
        around.update(names[p] for i in range(1, len(parts)) if (p := ".".join(parts[:i])) in names)
    return frozenset(around)


def _backwards(units: list[_Unit]) -> list[_Unit]:
    """The order in which a backward pass first comes to the units: one around others before them, the others from last to first."""
    groups: list[list[_Unit]] = []
    for unit in units:
        if groups and groups[-1][0].plan.encloses(unit.plan):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return [u for head, *rest in reversed(groups) for u in (head, *_backwards(rest))]
