"""One optimizer step of one rank as a program: the operations that the engine issues, in its order, and
every buffer that it takes and gives back meanwhile.

    forward    take 0 | take 1, give 0 | ...                     gathered units, prefetch ahead
    backward   take n | arrival: reduction buffer | parts | land: gradients, give | ...
    boundary   (moments, gradients) ──► gradients dropped

Over groups a reduction lands twice: the sums of the first hop travel on, or the group holds them
until the boundary. Encoded data has a buffer of bytes beside the whole while it travels.

Gradients of offloaded state leave the device as they land; on a GPU, copies still read a window of
them. If parameters are read from a disk, one more unit has its buffer.

The walk follows runtime/gather.py, runtime/reduce.py and memory/pool.py in the steady state: the
orders are learned, each pass uses every unit once, every trainable parameter gets a gradient. Tests
compare it with the real engine's ledgers, byte for byte: what it holds, sends and moves between
tiers. Everything else that a plan says of a step is a sum over its operations (plan/account.py), or
their list schedule (plan/times.py). Further micro-batches than three are like the middle one.

| operation             | lane                       | bytes                                                                            |
|-----------------------|----------------------------|----------------------------------------------------------------------------------|
| pass of a unit        | compute                    | priced by its FLOPs                                                              |
| move                  | gathers, reductions, owners | sent by this rank                                                               |
| kernel                | compute                    | read and written: gradients copied to their buffer, casts of sums                |
| code                  | compute                    | read and written to encode and decode: nothing hides it (ZeRO++, Wang et al.     |
|                       |                            | 2023, section 3.4, fuses it into the kernels of the moves)                       |
| sum                   | sums                       | read and written: the parts of all N ranks, and their sum. No sum can move less: |
|                       |                            | one addition for each element read is bound by memory (Williams et al. 2009)     |
| copy, disk            | up, down, disk             | moved between tiers                                                              |
| update                | compute, host              | read and written by the optimizer                                                |

A move over groups is two: a gather between groups, then inside them; a reduction the other way
round. Units ahead are launched once this one has arrived: with one unit ahead, its hop between groups
begins when this unit's hop inside the group has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

import torch

from onefold.comm import OWNERS
from onefold.device import within
from onefold.layout import Hop, Level, ShardSpec, Topology
from onefold.memory import GATHERED, GRADIENTS, LEAVING, OWNED, REDUCTION, MemoryLedger, Pool
from onefold.plan.owned import OwnedMatrices, touched_by
from onefold.plan.rank import UnitPlan, outer
from onefold.plan.states import adds_on_device, resting, states_on_disk, sums_chunk
from onefold.recipe import Recipe, Tier
from onefold.recipe.core import LARGE_TRAFFIC, SMALL_TRAFFIC
from onefold.recipe.optimizers import PLANNED
from onefold.recipe.rows import GROUP
from onefold.runtime.gather import backwards
from onefold.runtime.reduce import are_large, is_due

_FP32 = 4
COMPUTE, HOST, DISK = "compute", "host", "disk"
Kind = Literal["pass", "move", "kernel", "code", "sum", "copy", "disk", "update", "wait"]


@dataclass(slots=True)
class Op:
    """One operation. It begins when its lane is free and the operations `after` have ended.

    Attributes:
        lane: what carries it, one operation after the other.
        move: of a move its name in the traffic ledger, or the axis that layers send along; of a copy
            "up" or "down"; of a disk "read" or "written".
        nbytes: see the table above. numel: elements that an update steps; flops: of its
            products.
        over: the ranks of the stage among which it moves. ring: each rank sends the same to all, in a
            ring. calls: successive messages.
        micro: the micro-batch that issues it.
    """

    kind: Kind
    lane: str
    unit: str
    phase: str
    nbytes: float = 0
    move: str = ""
    over: Sequence[int] = ()
    ring: bool = False
    calls: float = 1
    numel: float = 0
    flops: float = 0
    after: tuple[int, ...] = ()
    micro: int = 0
    begin: float = 0.0
    end: float = 0.0


@lru_cache(maxsize=4096)
def members(topology: Topology, ranks: Sequence[int], position: int, level: Level) -> Sequence[int]:
    """Return the ranks of one level of the groups among `ranks`, this rank included."""
    if level == "all":
        return ranks
    inside = level == "intra-group"
    places = topology.intra_group(position) if inside else topology.inter_group(position)
    order = topology.order
    return tuple(ranks[order[place]] for place in places)


def gathered(flat: ShardSpec) -> list[tuple[Level, int]]:
    """Return (level, bytes) that this rank sends to its peers in one gather of the whole, whose
    parts are masters or copies of them.
    """
    inner, outer = flat.topology.inner, flat.topology.outer
    inside: tuple[Level, int] = "intra-group", (inner - 1) * outer * flat.each
    if flat.whole_master:
        return []
    if flat.has_secondary or (outer > 1 and flat.group_master):
        return [inside]
    if not flat.topology.two_levels:
        return [("all", (flat.ranks - 1) * flat.each)]
    return [("inter-group", (outer - 1) * flat.each), inside]


def renewed(flat: ShardSpec) -> list[tuple[Level, int]]:
    """Return (level, bytes) that update a second copy, before the first gather from it."""
    if not (flat.has_secondary and flat.trainable):
        return []
    level: Level = "inter-group" if flat.topology.two_levels else "all"
    return [(level, (flat.topology.outer - 1) * flat.each)]


def part_bytes(flat: ShardSpec, hop: Hop) -> int:
    """Return the bytes that one peer gets on a hop of a reduction."""
    if flat.reduce_codec is not None and flat.encodes(hop):
        return flat.reduce_codec.encoded_bytes(hop.own)
    return hop.own * flat.dtypes.wire.itemsize


@dataclass
class Reduction:
    """The gradients of one flat buffer, on hop `at` of their reduction. `hops` walks on: it yields while
    the parts of a hop are under way.
    """

    unit: int
    flat: ShardSpec
    at: int = 0
    hops: Iterator[None] = field(default_factory=lambda: iter(()))

    @property
    def is_last(self) -> bool:
        return self.at + 1 == len(self.flat.hops)

    @property
    def sent_bytes(self) -> int:
        return self.flat.hops[self.at].span * self.flat.dtypes.wire.itemsize


@dataclass
class Unit:
    """A unit's gathered buffers, by number of the flat buffer, and encoded data that arrives.
    `arrival`: the last operation of each gather under way.
    """

    plan: UnitPlan
    index: int
    held: dict[int, torch.Tensor] = field(default_factory=dict)
    coded: list[torch.Tensor] = field(default_factory=list)
    gathered: bool = False
    claimed: bool = False
    arrival: list[int] = field(default_factory=list)

    def encloses(self, other: Unit) -> bool:
        return self.plan.encloses(other.plan)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the gathered unit."""
        flats = (f for f in self.plan.flats if not f.resident)
        return sum(f.numel * f.dtypes.compute.itemsize for f in flats)


class Program:
    """One rank's step; `run(micro_batches)` makes it. The pool and the ledger are the engine's own;
    buffers have no memory.

    Attributes:
        ops: the operations.
        highest: {(phase, unit): the engine's bytes by category when their sum was largest while that
            unit ran}. `phase` is "forward", "backward" or "step".
        micro_batches: how many the step has; at most three are in `ops`.
    """

    def __init__(
        self,
        units: Sequence[UnitPlan],
        recipe: Recipe,
        window: int = 0,
        *,
        nccl: bool = False,
        optimizer: str = "adamw",
        owned: OwnedMatrices | None = None,
        held: bool = False,
        away: Mapping[str, int] | None = None,
        layers: Mapping[str, Sequence[tuple[str, float, int, Sequence[int]]]] | None = None,
    ) -> None:
        """
        Args:
            window: bytes of gradients that copies to the host may still read on the device
                (`onefold.device.copies.WINDOW`), or twice the largest; 0: the device has no streams,
                and copies are done at once.
            nccl: moves are NCCL's.
            owned: figures of matrices that are stepped whole.
            held: units stay gathered from the first micro-batch on (pipelines).
            away: bytes of each unit's activations that are on the host between its passes.
            layers: (axis, bytes, messages, ranks) that each block sends in each of its passes.
        """
        self.ledger = MemoryLedger()
        self.pool = Pool(torch.device("meta"), self.ledger)
        self.window, self.nccl, self.optimizer, self.owned = window, nccl, optimizer, owned
        self.held, self.away, self.layers = held, away or {}, layers or {}
        self.leaving: list[int] = []  # gradients that such copies read
        self.recipe = recipe
        self.units = [Unit(u, i) for i, u in enumerate(units)]
        self.holders = {
            id(flat): held for u in units for flat, held in zip(u.flats, u.ranks, strict=True)
        }
        levels = any(f.topology.two_levels for u in units for f in u.flats)
        self.ahead = recipe.units_ahead(levels)
        self.in_flight = recipe.in_flight
        self.from_disk = bool(self.ahead) and any(
            f.gathers_from_disk for u in units for f in u.flats
        )
        self.unsharded = all(f.unsharded for u in units for f in u.flats)
        self.outer = outer(units)
        # The embedding is a unit, so the root holds a final norm or a head
        self.ends_first = any(u.looks_up_only for u in units)
        self.highest: dict[tuple[str, str], dict[str, int]] = {}
        self.ops: list[Op] = []
        self.last: dict[str, int] = {}  # by lane
        self.passes: list[int] = []
        self.micro, self.micro_batches = 0, 1
        # By id of the flat buffer: whole gradients, and sums that the group holds, both until the
        # boundary; buffers that have a gradient
        self.grads: dict[int, torch.Tensor] = {}
        self.held_sums: dict[int, torch.Tensor] = {}
        self.has_grad: set[int] = set()
        # The bytes in which the device adds to gradients on the host
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
        return max(self.highest.values(), key=lambda held: sum(held.values()))

    def counted(self) -> Iterator[tuple[Op, int]]:
        """Yield (operation, how often a step has it)."""
        more = max(0, self.micro_batches - 3)
        return ((op, 1 + more if op.micro == 1 else 1) for op in self.ops)

    def sent(self) -> dict[str, int]:
        """Return the bytes that a step sends to ranks that hold the same parameters, by move."""
        return self._by_move(
            op for op in self.counted() if op[0].kind == "move" and op[0].lane != COMPUTE
        )

    def moved(self) -> dict[str, int]:
        """Return the bytes that a step moves between tiers."""
        return self._by_move(op for op in self.counted() if op[0].kind in ("copy", "disk"))

    @staticmethod
    def _by_move(ops: Iterable[tuple[Op, int]]) -> dict[str, int]:
        out: Counter[str] = Counter()
        for op, times in ops:
            out[op.move] += times * round(op.nbytes)
        return {move: n for move, n in out.items() if n}

    def _moment(self, phase: str, unit: str) -> None:
        """Record the largest sum since the last moment."""
        held = self.ledger.peak()
        known = self.highest.get((phase, unit))
        if known is None or sum(held.values()) > sum(known.values()):
            self.highest[phase, unit] = held
        self.ledger.reset_peak()

    # -- operations --------------------------------------------------------------------------------

    def _op(self, kind: Kind, lane: str, *, after: Sequence[int] = (), **facts: object) -> int:
        unit, phase = self.running
        waits = tuple(i for i in after if i >= 0)
        self.ops.append(Op(kind, lane, unit, phase, after=waits, micro=self.micro, **facts))  # type: ignore[arg-type]
        self.last[lane] = len(self.ops) - 1
        return self.last[lane]

    def _runs(self, unit: Unit, phase: str) -> None:
        self.running = unit.plan.name, phase

    def _pass(self, unit: Unit, phase: str) -> None:
        """The model computes with a unit, and its layers send along other axes."""
        self._runs(unit, phase)
        name, arrival, unit.arrival = unit.plan.name, unit.arrival, []
        away = self.away.get(name, 0)
        if away and phase == "backward":  # fetched while the unit before runs
            arrival.append(self._copy("up", away, self.passes[-2:-1]))
        self.passes.append(self._op("pass", COMPUTE, after=arrival))
        for axis, nbytes, calls, over in self.layers.get(name, ()):
            ring = axis != "ep"
            self._op("move", COMPUTE, move=axis, nbytes=nbytes, calls=calls, over=over, ring=ring)
        if away and phase == "forward":
            self._copy("down", away, self.passes[-1:])

    def _kernel(self, nbytes: float, kind: Kind = "kernel") -> None:
        if nbytes:
            self._op(kind, COMPUTE, nbytes=nbytes)

    def _copy(self, move: str, nbytes: float, after: Sequence[int]) -> int:
        """Copies to and from the host run on streams of their own; on a CPU the cores make them."""
        if not nbytes:
            return -1
        return self._op(
            "copy", move if self.window else COMPUTE, move=move, nbytes=nbytes, after=after
        )

    def _disk(self, move: str, nbytes: float, after: Sequence[int]) -> int:
        return self._op("disk", DISK, move=move, nbytes=nbytes, after=after) if nbytes else -1

    def _move(
        self, lane: str, move: str, flat: ShardSpec, level: Level, nbytes: int, after: Sequence[int],
        ring: bool,
    ) -> int:  # fmt: skip
        if not nbytes:
            return max(after, default=-1)
        over = members(flat.topology, self.holders[id(flat)], flat.position, level)
        lane = lane if level == "all" else f"{lane} {level}"
        return self._op(
            "move", lane, move=move, nbytes=nbytes, over=over, ring=ring and self.nccl, after=after
        )

    def _gathers(self, unit: Unit, flat: ShardSpec) -> None:
        """Make the whole of a buffer, from masters or a copy of them."""
        self._runs(unit, self.running[1])
        after = [self.last.get(COMPUTE, -1)]
        part = flat.layout.shard_numel * flat.dtypes.compute.itemsize + flat.each
        if self._reads(flat) and flat.own:
            if flat.gather_codec is not None:
                self._kernel(part, "code")
            if flat.tiers is not None and flat.tiers.parameters is not Tier.DEVICE:
                nbytes = flat.own * flat.dtypes.compute.itemsize
                on_disk = flat.tiers.parameters.on_disk
                move = self._disk if on_disk else self._copy
                after = [move("read" if on_disk else "up", nbytes, after)]
        if self.held and self.micro:
            return
        legs = (
            [*(renewed(flat) if self.renewing else ()), *gathered(flat)] if flat.ranks > 1 else []
        )
        at = -1
        for level, nbytes in legs:
            at = self._move("gathers", "all-gather", flat, level, nbytes, after, True)
            after = [at]
        unit.arrival.append(max(after) if legs or flat.tiers is not None else -1)

    # -- a step ------------------------------------------------------------------------------------

    def run(self, micro_batches: int = 1, whole: int = 0) -> Program:
        """Walk through one optimizer step, from the state between steps to the same state.

        Args:
            whole: bytes of matrices that are whole for the step, at most (`onefold.plan.owned`).
        """
        if micro_batches < 1:
            raise ValueError(f"{micro_batches} micro-batches: expected at least 1.")
        self.micro_batches, few = micro_batches, min(micro_batches, 3)
        self.ledger.reset_peak()
        for k in range(few):
            self.micro, last = k, k + 1 == few
            self._forward(k)
            deferring = not last and self.recipe.reduces_at == "boundary"
            self.holding = not last and not deferring and self.recipe.gradients.over == GROUP
            self._backward(k, deferring)
        self.running = "", "step"
        self._update()
        self.ledger.add(OWNED, whole)
        self._moment("step", "(optimizer)")
        self.ledger.add(OWNED, -whole)
        self.ledger.set(GRADIENTS, 0)
        self.has_grad.clear()
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
        self.renewing, self.running = k == 0, ("", "forward")
        for unit in self.units if k == 0 else ():  # resident buffers are stale after a step
            for flat in unit.plan.flats:
                if flat.resident and flat.trainable:
                    self._gathers(unit, flat)
        open_units: list[Unit] = []
        for unit in self.units:
            while open_units and not open_units[-1].encloses(unit):
                self._leave(open_units.pop())
            self._acquire(unit)
            if unit.plan.name not in self.outer:
                self._pass(unit, "forward")
            open_units.append(unit)
        while open_units:
            self._leave(open_units.pop())
        if any(not u.plan.resident for u in self.units):
            self.pool.drain()

    def _leave(self, unit: Unit) -> None:
        if unit.plan.name in self.outer:  # what follows the units inside
            self._pass(unit, "forward")
        self._moment("forward", unit.plan.name)
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
        if unit.arrival:  # what is launched from now on comes after it
            self._runs(unit, self.running[1])
            self._op("wait", COMPUTE, after=unit.arrival)
            unit.arrival = []
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
                self._gathers(unit, flat)
                if flat.gather_codec is not None:
                    unit.coded.append(self.pool.take(flat.coded_bytes, torch.uint8, GATHERED))

    def _arrive(self, unit: Unit) -> None:
        """Decode what has arrived encoded."""
        coded, unit.coded = unit.coded, []
        for buffer in coded:
            self.pool.give(buffer)
        for flat in unit.plan.flats if coded else ():
            if flat.gather_codec is not None and not flat.resident:
                part = flat.layout.shard_numel * flat.dtypes.compute.itemsize + flat.each
                self._op("code", COMPUTE, nbytes=flat.ranks * part, after=unit.arrival)

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
        self.running = "", "backward"
        self.under_way: list[Reduction] = []
        self.on_next_hop: list[Reduction] = []
        # Bytes of sums that were sent on, and of their casts to the masters' dtype
        self.sent_on: list[tuple[int, int]] = []
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
                self._complete(tail.pop(), deferring)
            while around and not around[-1].encloses(unit):
                self._complete(around.pop(), deferring)
            if not unit.plan.looks_up_only:
                self._acquire(unit)
            self._pass(unit, "backward")
            if unit.plan.name not in self.outer and not (unit.plan.path == "" and self.ends_first):
                self._complete(unit, deferring)
                continue
            # Its parameters get their last gradient after the units inside. Some (a final norm, a
            # head) get theirs before: the buffer exists from then on
            (tail if unit.plan.path == "" and self.ends_first else around).append(unit)
            self._store(unit, deferring)
        for unit in (*tail, *reversed(around)):
            self._complete(unit, deferring)
        for under_way in (self.under_way, self.on_next_hop):
            while under_way:
                self._land(under_way.pop(0))
        self.pool.drain()  # nothing more is sent
        for summed, cast in self.sent_on:
            self.ledger.add(GRADIENTS, cast)
            self.ledger.add(GRADIENTS, -summed)
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
        self._moment("backward", "(end)")

    def _complete(self, unit: Unit, deferring: bool) -> None:
        """Handle the last gradient of a unit."""
        self._runs(unit, "backward")
        if self.unsharded:
            self._own_gradients(unit)
        flats = self._store(unit, deferring)
        for flat in flats:  # gradients are copied into the buffer, or added to what is there
            d, more = flat.dtypes, 2 if self.micro else 1
            into = more * d.sums.itemsize if self.late else d.wire.itemsize
            self._kernel(flat.numel * (d.compute.itemsize + into))
        if not deferring:
            for flat in flats:
                self._reduce(unit, flat)
            while is_due(self.under_way, self.in_flight):
                self._land(self.under_way.pop(0))
            while len(self.on_next_hop) > self.in_flight or are_large(self.on_next_hop):
                self._land(self.on_next_hop.pop(0))
        if unit.gathered:
            self._release(unit)
        self._moment("backward", unit.plan.name)

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
        r = Reduction(unit.index, flat)
        r.hops = self._hops(r, self.grads.pop(id(flat)))
        next(r.hops)
        self.under_way.append(r)

    def _land(self, r: Reduction) -> None:
        """Land a hop. What is sent on is under way again."""
        if next(r.hops, "handed over") is None:
            self.on_next_hop.append(r)

    def _hops(self, r: Reduction, buffer: torch.Tensor) -> Iterator[None]:
        """Send the parts of each hop, and land them: the sums are sent on, held or handed over."""
        flat, d, done = r.flat, r.flat.dtypes, -1
        move = "all-reduce" if flat.whole_master else "reduce-scatter"
        for at, hop in enumerate(flat.hops):
            r.at, last = at, at + 1 == len(flat.hops)
            encodes, adds = flat.encodes(hop), flat.added_by(hop)
            self._runs(self.units[r.unit], "backward")
            if d.sums != d.wire and (at or self.late):
                # Parts for others are cast to the wire's dtype; this rank's stays, in the wider dtype
                others = (hop.span - hop.own) * (d.sums.itemsize + d.wire.itemsize)
                self._kernel(others + hop.own * (d.sums.itemsize - d.wire.itemsize))
            part = part_bytes(flat, hop)
            if encodes:  # what encoding lost is read and written in fp32 too
                each = hop.own * d.wire.itemsize + 2 * part + 2 * _FP32 * hop.own
                self._kernel((hop.size - 1) * each, "code")
            nbytes, ring = (hop.size - 1) * part, adds == "backend"
            after = done, self.last.get(COMPUTE, -1)
            done = self._move("reductions", move, flat, hop.level, nbytes, after, ring)
            if adds != "pairwise" and flat.ranks > 1:
                written = (flat.landed if last else d.sums).itemsize
                parts = (hop.size if adds == "at once" else 1) * d.wire.itemsize
                done = self._op("sum", "sums", nbytes=hop.own * (parts + written), after=(done,))
            room = flat.exchange(at, buffer.dtype)
            # Parts that are added at once, not one by one
            at_once = room.rows > 0 and adds != "pairwise"
            # Bytes of the sums of a last hop, with room for those of other ranks; or those of a part
            # that is received into memory of its own, and becomes the sums
            landed = (flat.own if flat.broadcast_back else hop.own) * flat.landed.itemsize
            apart = room.apart * room.dtype.itemsize
            total: torch.Tensor | None = None
            taken: list[torch.Tensor] = []
            if room.sent:
                taken.append(self.pool.take(room.sent, room.dtype, REDUCTION))
            self.ledger.add(REDUCTION, apart)
            if room.rows:
                taken.insert(0, self.pool.take(room.received, room.dtype, REDUCTION))
            if at_once and last:
                self.ledger.add(GRADIENTS, landed)
            elif at_once:
                total = self.pool.take(hop.own, d.sums, REDUCTION)
            yield
            self._runs(self.units[r.unit], "backward")
            self._op("wait", COMPUTE, after=(done,))
            if room.sent and not encodes:
                self.pool.give(taken.pop())
            if apart:
                self.ledger.add(REDUCTION, -apart)
                self.ledger.add(GRADIENTS, apart)
            elif not last and total is None:
                total = self.pool.take(hop.own, d.sums, REDUCTION)
            elif last and not at_once:
                self.ledger.add(GRADIENTS, landed)
                if encodes and flat.landed != d.sums:
                    self.pool.give(self.pool.take(hop.own, d.sums, REDUCTION))
            for one in (*taken, buffer):
                self.pool.give(one)
            if total is None:
                self._hand_over(flat, apart or landed, done)
                return
            if self._wait_inside(flat, total):
                return
            buffer = total

    def _wait_inside(self, flat: ShardSpec, total: torch.Tensor) -> bool:
        """Hold the group's sums until the boundary; see [Note: held sums] in runtime/reduce.py."""
        if (held := self.held_sums.pop(id(flat), None)) is not None:
            self.pool.give(held)
        if self.holding:
            self.held_sums[id(flat)] = self.pool.take(total.numel(), total.dtype, GRADIENTS)
            self.pool.give(total)
        return self.holding

    def _hand_over(self, flat: ShardSpec, nbytes: int, done: int) -> None:
        """Hand sums over: `.grad` is a view of them, or a copy in the masters' dtype, or they were
        added to it. Sums that were sent on are handed over at the end of the backward pass.
        """
        d, late = flat.dtypes, bool(flat.broadcast_back)
        for hop in flat.broadcast_back if flat.ranks > 1 else ():
            sent = (hop.size - 1) * hop.own * d.wire.itemsize
            done = self._move("reductions", "all-reduce", flat, hop.level, sent, (done,), True)
        if flat.landed != d.master:
            self._kernel(flat.own * (flat.landed.itemsize + d.master.itemsize))
        again = id(flat) in self.has_grad
        if again:  # added to the sums of earlier micro-batches
            self._kernel(flat.own * 3 * d.master.itemsize)
        if flat.tiers is not None and flat.own:
            self._leaves(flat, done, again)
        self.has_grad.add(id(flat))
        if flat.tiers is None and not again:
            if flat.landed != d.master:
                cast = nbytes // flat.landed.itemsize * d.master.itemsize
                if late:
                    self.sent_on.append((nbytes, cast))
                else:
                    self.ledger.add(GRADIENTS, cast)
                    self.ledger.add(GRADIENTS, -nbytes)
        elif late:
            self.sent_on.append((nbytes, 0))
        else:
            self.ledger.add(GRADIENTS, -nbytes)
            if flat.tiers is not None and self.window:
                self._go_down(flat, nbytes, again)

    def _leaves(self, flat: ShardSpec, after: int, again: bool) -> None:
        """Sums go to the host or to a disk, where earlier micro-batches may have left some."""
        assert flat.tiers is not None
        master = flat.own * flat.dtypes.master.itemsize
        in_backward = self.recipe.step_in_backward and self.reductions == 1
        on_disk = flat.tiers.gradients.on_disk and not in_backward
        if again and on_disk:
            self._disk("read", master, ())
        elif again and self.window:
            self._copy("up", master, ())
        down = self._copy(
            "down", master if self.window else flat.own * flat.landed.itemsize, (after,)
        )
        if on_disk:
            self._disk("written", master, (down,))
        if in_backward:
            self._step_away(flat, (down, self._read_states(flat, (down,))))

    @property
    def late(self) -> bool:
        """Whether gradients of several micro-batches are kept whole until the boundary."""
        return self.recipe.reduces_at == "boundary" and self.micro_batches > 1

    @property
    def reductions(self) -> int:
        """How often a step hands sums over. With more than once, steps wait for the last."""
        once = self.recipe.reduces_at == "boundary" or self.recipe.gradients.over == GROUP
        return 1 if once else self.micro_batches

    def _go_down(self, flat: ShardSpec, nbytes: int, again: bool) -> None:
        """Copies to the host read sums as long as the window allows: the slowest case."""
        if not self.adding and adds_on_device(flat, again):
            self.adding = 2 * sums_chunk([unit.plan for unit in self.units])
            self.ledger.add(LEAVING, self.adding)
        self.leaving.append(nbytes)
        self.ledger.add(LEAVING, nbytes)
        while not within(self.window, sum(self.leaving), self.leaving):
            self.ledger.add(LEAVING, -self.leaving.pop(0))

    # -- the update --------------------------------------------------------------------------------

    def _update(self) -> None:
        """The optimizer steps: this rank's elements on the device, whole matrices by their owners, and
        offloaded state on the host, buffer by buffer.
        """
        flats = [f for u in self.units for f in u.plan.flats if f.trainable]
        if self.owned is not None:
            self._owners(self.owned)
        else:
            numel = sum(f.local(s) for f in flats if f.tiers is None for s in f.layout.slots)
            if numel:
                touched = touched_by(PLANNED[self.optimizer]) * numel
                self._op("update", COMPUTE, numel=numel, nbytes=touched)
        in_backward = self.recipe.step_in_backward and self.reductions == 1
        arrived = self.last.get("down" if self.window else COMPUTE, -1), self.last.get(DISK, -1)
        away = [f for f in flats if f.tiers is not None and f.own and not in_backward]
        read: dict[int, int] = {}
        for at, flat in enumerate(away):
            for near in away[at : at + 2]:  # the next buffer is read while this one is stepped
                if id(near) not in read:
                    read[id(near)] = self._read_states(near, arrived)
            self._step_away(flat, (*arrived, read[id(flat)]))

    def _read_states(self, flat: ShardSpec, after: Sequence[int]) -> int:
        """Read what a step needs of a buffer whose state is on a disk."""
        assert flat.tiers is not None
        if not flat.tiers.optimizer.on_disk:
            return -1
        master = flat.own * flat.dtypes.master.itemsize
        gradients = flat.tiers.gradients.on_disk and self.running[1] != "backward"
        nbytes = master + states_on_disk(flat, flat.own, self.optimizer)
        return self._disk("read", nbytes + (master if gradients else 0), after)

    def _step_away(self, flat: ShardSpec, after: Sequence[int]) -> None:
        """Step a buffer whose state is on the host or a disk, and write what the model computes with."""
        assert flat.tiers is not None
        d, own = flat.dtypes, flat.own
        compute, master = own * d.compute.itemsize, own * d.master.itemsize
        numel = 0 if self.owned is not None else sum(flat.local(s) for s in flat.layout.slots)
        # Without streams the copy to the device casts
        casts = flat.tiers.parameters is not Tier.DEVICE or self.window
        cast = master + compute if d.compute != d.master and casts else 0
        touched = touched_by(PLANNED[self.optimizer]) * numel + cast
        stepped = self._op("update", HOST, numel=numel, nbytes=touched, after=after)
        if flat.tiers.optimizer.on_disk:
            states = master + states_on_disk(flat, own, self.optimizer)
            self._disk("written", states + (compute if flat.lies_apart else 0), (stepped,))
        if flat.tiers.parameters is Tier.DEVICE:
            self._copy("up", compute, (stepped,))

    def _owners(self, owned: OwnedMatrices) -> None:
        """Owners get the pieces of their matrices, step them, and send them back, in rounds: the moves
        of one round run beside the products of another.
        """
        most, flat = owned.most, next(f for u in self.units for f in u.plan.flats if f.trainable)
        rounds = max(1, owned.messages // 2)
        for nbytes, move in ((most.carried, "up"), (most.carried, "down")):
            self._copy(move, nbytes, ())
        over = members(flat.topology, self.holders[id(flat)], flat.position, owned.level)
        for at in range(rounds):
            after: tuple[int, ...] = ()
            if most.sent:
                calls = owned.messages / rounds
                moved = self._op(
                    "move", OWNERS, move=OWNERS, nbytes=most.sent / rounds, calls=calls, over=over,
                    after=() if at else (self.last[COMPUTE],),
                )  # fmt: skip
                after = (moved,)
            each = {"numel": most.numel / rounds, "nbytes": most.touched / rounds}
            self._op("update", COMPUTE, **each, flops=most.flops / rounds, after=after)
        if most.host_numel:
            rest = PLANNED[PLANNED[self.optimizer].rest or self.optimizer]
            touched = touched_by(rest) * most.host_numel
            self._op("update", HOST, numel=most.host_numel, nbytes=touched)
