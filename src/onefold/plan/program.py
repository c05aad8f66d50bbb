"""One optimizer step of one rank as a program: the operations that the engine issues, in its order, and
every buffer that it takes and gives back meanwhile.

    forward    take 0 | take 1, give 0 | ...                     gathered units, prefetch ahead
    backward   take n | arrival: reduction buffer | parts | land: gradients, give | ...
    boundary   (moments, gradients) ──► gradients dropped

Over groups a reduction lands twice: the sums of the first hop travel on, or the group holds them
until the boundary. Encoded data has a buffer of bytes beside the whole while it travels.

Gradients of offloaded state leave the device as they land; on a GPU, copies still read a window of
them. If parameters are read from a disk, one more unit has its buffer.

The walk follows runtime/gather.py, runtime/reduce.py and memory.py in the steady state: the
orders are learned, each pass uses every unit once, every trainable parameter gets a gradient. Tests
compare it with the real engine's ledgers, byte for byte: what it holds, sends and moves between
tiers. Everything else that a plan says of a step is a sum over its operations (plan/account.py), or
their list schedule (plan/times.py). Further micro-batches than three are like the middle one.

| operation             | lane                       | bytes                                                                            |
|-----------------------|----------------------------|----------------------------------------------------------------------------------|
| pass of a unit        | compute                    | priced by its FLOPs                                                              |
| move                  | gathers, reductions, owners | sent by this rank                                                               |
| layer                 | compute                    | sent along another axis of the mesh                                              |
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

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal

import torch

from onefold.comm import OWNERS
from onefold.device import chunk_for, within
from onefold.device.copies import WINDOW
from onefold.layout import Hop, Level, Topology
from onefold.memory import GATHERED, GRADIENTS, LEAVING, OWNED, REDUCTION, MemoryLedger, Pool
from onefold.plan.degrees import Degrees
from onefold.plan.owned import Owned, owned_matrices, stepped_whole, touched_by
from onefold.plan.rank import Flat, Stage, UnitPlan, at_rest, states_on_disk, units_of
from onefold.recipe import Recipe, Tier
from onefold.recipe.optimizers import PLANNED
from onefold.recipe.rows import GROUP
from onefold.runtime.gather import Order, backwards, last_units, look_ahead
from onefold.runtime.reduce import are_large, is_due

_FP32 = 4
COMPUTE, HOST, DISK = "compute", "host", "disk"
Kind = Literal["pass", "layer", "move", "kernel", "code", "sum", "copy", "disk", "update", "wait"]
# What the layers of a block send in a pass: axis, bytes, messages, ranks
Layer = tuple[str, float, int, Sequence[int]]


@dataclass(slots=True)
class Op:
    """One operation. It begins when its lane is free and the operations `after` have ended.

    Attributes:
        lane: what carries it, one operation after the other.
        move: of a move its name in the traffic ledger; of what layers send, the axis; of a copy "up" or
            "down"; of a disk "read" or "written".
        nbytes: see the table above. flops: of an update's products.
        over: the ranks of the stage among which it moves. ring: each rank sends the same to all, in a
            ring. calls: successive messages.
        micro: the micro-batch that issues it. unit, phase: of a pass.
    """

    kind: Kind
    lane: str
    nbytes: float = 0
    move: str = ""
    over: Sequence[int] = ()
    ring: bool = False
    calls: float = 1
    flops: float = 0
    after: tuple[int, ...] = ()
    micro: int = 0
    unit: str = ""
    phase: str = ""
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


def gathered(flat: Flat, renewing: bool) -> list[tuple[Level, int]]:
    """Return (level, bytes) that this rank sends to its peers in one gather of the whole, whose
    parts are masters or copies of them. `renewing`: the first after a step, which updates a second
    copy before.
    """
    inner, outer = flat.topology.inner, flat.topology.outer
    levels: tuple[Level, Level] = "inter-group", "intra-group"
    if not flat.topology.two_levels:  # one of both has no peers
        levels = "all", "all"
    both = [*zip(levels, ((outer - 1) * flat.each, (inner - 1) * outer * flat.each), strict=True)]
    in_group = flat.has_secondary and not (renewing and flat.trainable)
    return [] if flat.whole_master else both[in_group or flat.group_master :]


@dataclass(eq=False)
class Unit(UnitPlan):
    """A unit with its gathered buffers, by number of the flat buffer, and encoded data that arrives.
    `arrival`: the last operation of each gather under way. For others see `Unit` in runtime/flat.py.
    """

    held: dict[int, torch.Tensor] = field(default_factory=dict)
    coded: list[torch.Tensor] = field(default_factory=list)
    ungathered: bool = True
    used: bool = False
    awaiting_backward: bool = False
    arrival: list[int] = field(default_factory=list)

    @cached_property
    def gathered_bytes(self) -> int:
        return sum(f.numel * f.dtypes.compute.itemsize for f in self.flats if not f.resident)


@dataclass
class Reduction:
    """The gradients of one flat buffer on a hop of their reduction, of which `sent_bytes` travel.
    `hops` walks on: it yields while the parts of a hop are under way.
    """

    unit: Unit
    flat: Flat
    is_last: bool = False
    sent_bytes: int = 0
    hops: Iterator[None] = field(init=False)


@dataclass
class Program:
    """One rank's step, from the state between steps to the same state. The pool and the ledger are the
    engine's own; buffers have no memory.

    Attributes:
        rank: its units.
        micro_batches: how many the step has; at most three are in `ops`.
        streams: the device has some, so that copies to the host may still read gradients there;
            else they are done at once.
        nccl: moves are NCCL's.
        owned: figures of matrices that are stepped whole.
        held: units stay gathered from the first micro-batch on (pipelines).
        away: bytes of each unit's activations that are on the host between its passes.
        layers: (axis, bytes, messages, ranks) that each block sends in each of its passes.
        ops: the operations.
        highest: {(phase, unit): the engine's bytes by category when their sum was largest while that
            unit ran}. `phase` is "forward", "backward" or "step".
    """

    rank: Sequence[UnitPlan]
    recipe: Recipe
    micro_batches: int = 1
    streams: bool = False
    nccl: bool = False
    optimizer: str = "adamw"
    owned: Owned | None = None
    held: bool = False
    away: Mapping[str, int] = field(default_factory=dict)
    layers: Mapping[str, Sequence[Layer]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        units, recipe = self.rank, self.recipe
        flats = [flat for unit in units for flat in unit.flats]
        self.ledger = MemoryLedger()
        self.pool = Pool(torch.device("meta"), self.ledger)
        self.units = [Unit(u.name, u.flats, u.looks_up_only) for u in units]
        self.units_ahead = recipe.units_ahead(any(f.topology.two_levels for f in flats))
        self.unsharded = all(f.unsharded for f in flats)
        # Around others: around the next, since they are in the order of `named_modules()`
        self.outer = {u for u, after in pairwise(self.units) if u.encloses(after)}
        # In the order of the forward pass, and of the backward pass
        self.sharded: list[Any] = [u for u in self.units if not u.resident]
        self.needed = [u for u in backwards(self.sharded) if not u.looks_up_only]
        turns = self.sharded and recipe.reshard_after_forward
        self.turning = last_units(self.sharded, self.needed) if turns else set()
        # The embedding is a unit, so the root holds a final norm or a head
        self.ends_first = any(u.looks_up_only for u in units)
        boundary, group = recipe.reduces_at == "boundary", recipe.gradients.over == GROUP
        # A step hands sums over several times. Steps in the backward pass wait for the last
        self.again = self.micro_batches > 1 and not (boundary or group)
        self.steps_in_backward = recipe.step_in_backward and not self.again
        self.on_disk = recipe.optimizer.tier.on_disk
        self.gradients_on_disk = recipe.gradients.tier.on_disk and not self.steps_in_backward
        # Gradients of several micro-batches are kept whole until the boundary
        self.late = boundary and self.micro_batches > 1
        self.highest: dict[tuple[str, str], dict[str, int]] = {}
        self.ops: list[Op] = []
        self.last = defaultdict[str, int](lambda: -1)  # by lane
        self.passes: list[int] = []
        # By id of the flat buffer: whole gradients, and sums that the group holds, both until the
        # boundary; buffers that have a gradient
        self.grads: dict[int, torch.Tensor] = {}
        self.held_sums: dict[int, torch.Tensor] = {}
        self.has_grad: set[int] = set()
        self.leaving: list[int] = []  # gradients that copies to the host read
        # What `look_ahead` asks of an engine's `Gatherer`
        self.order, self.gathered, self.keeping = Order(self.sharded), dict[int, Unit](), ()
        for category, nbytes in at_rest(units, held=0).items():
            self.ledger.add(category, nbytes)
        self.ledger.reset_peak()
        few = min(self.micro_batches, 3)
        for self.micro in range(few):
            last = self.micro + 1 == few
            self._forward()
            self.holding = not last and not boundary and group
            self._backward(deferring=not last and boundary)
        self.phase, whole = "step", self.owned.buffers if self.owned else 0
        self._update()
        self.ledger.add(OWNED, whole)
        self._moment("(optimizer)")
        self.ledger.add(OWNED, -whole)
        self.ledger.set(GRADIENTS, 0)

    @cached_property
    def rest(self) -> dict[str, int]:
        """This rank's bytes between steps on the device, by category."""
        return at_rest(self.rank, self.optimizer, self.owned.states if self.owned else None)

    @property
    def peak(self) -> dict[str, int]:
        """The engine's bytes when their sum was largest, by category."""
        return max(self.highest.values(), key=lambda held: sum(held.values()))

    def counted(self) -> Iterator[tuple[Op, int]]:
        """Yield (operation, how often a step has it)."""
        more = max(0, self.micro_batches - 3)
        return ((op, 1 + more if op.micro == 1 else 1) for op in self.ops)

    def bytes_of(self, *kinds: Kind) -> dict[str, int]:
        """Return the bytes of a step by move: of "move" those sent to ranks that hold the same
        parameters, of "layer" those sent along other axes, of "copy" and "disk" those between tiers.
        """
        out: Counter[str] = Counter()
        for op, times in self.counted():
            if op.kind in kinds:
                out[op.move] += times * op.nbytes  # type: ignore[assignment]
        return {move: round(n) for move, n in out.items() if n}

    def _moment(self, unit: str) -> None:
        """Record the largest sum since the last moment."""
        held, at = self.ledger.peak(), (self.phase, unit)
        known = self.highest.get(at, held)
        self.highest[at] = max(known, held, key=lambda by: sum(by.values()))
        self.ledger.reset_peak()

    # -- operations --------------------------------------------------------------------------------

    def _op(
        self, kind: Kind, lane: str, nbytes: float | None = None, after: Sequence[int] = (), **facts: Any
    ) -> int:  # fmt: skip
        """Issue an operation; one of no bytes is none. Returns what comes after it has to wait for."""
        if nbytes == 0:
            return max(after, default=-1)
        waits = tuple(i for i in after if i >= 0)
        self.ops.append(Op(kind, lane, nbytes or 0, after=waits, micro=self.micro, **facts))
        self.last[lane] = len(self.ops) - 1
        return self.last[lane]

    def _pass(self, unit: Unit) -> None:
        """The model computes with a unit, and its layers send along other axes."""
        name, phase = unit.name, self.phase
        arrival, unit.arrival = unit.arrival, []
        away = self.away.get(name, 0)
        if phase == "backward":  # fetched while the unit before runs
            arrival.append(self._copy("up", away, self.passes[-2:-1]))
        self.passes.append(self._op("pass", COMPUTE, after=arrival, unit=name, phase=phase))
        for axis, nbytes, calls, over in self.layers.get(name, ()):
            ring = axis != "ep"
            self._op("layer", COMPUTE, nbytes, move=axis, calls=calls, over=over, ring=ring)
        if phase == "forward":
            self._copy("down", away, self.passes[-1:])

    def _copy(self, move: str, nbytes: float, after: Sequence[int] = ()) -> int:
        """Copies to and from the host run on streams of their own; on a CPU the cores make them."""
        return self._op("copy", move if self.streams else COMPUTE, nbytes, after, move=move)

    def _disk(self, move: str, nbytes: float, after: Sequence[int] = ()) -> int:
        return self._op("disk", DISK, nbytes, after, move=move)

    def _move(
        self, lane: str, move: str, flat: Flat, level: Level, nbytes: int, after: Sequence[int],
        ring: bool,
    ) -> int:  # fmt: skip
        over = members(flat.topology, flat.held, flat.position, level)
        lane = lane if level == "all" else f"{lane} {level}"
        return self._op("move", lane, nbytes, after, move=move, over=over, ring=ring and self.nccl)

    def _gathers(self, unit: Unit, flat: Flat) -> None:
        """Make the whole of a buffer, from masters or a copy of them."""
        after = self.last[COMPUTE]
        if self._reads(flat) and flat.own:
            if flat.gather_codec is not None:
                self._op("code", COMPUTE, _coded(flat))
            if flat.tiers is not None and flat.tiers.parameters is not Tier.DEVICE:
                nbytes = flat.own * flat.dtypes.compute.itemsize
                on_disk = flat.tiers.parameters.on_disk
                move = self._disk if on_disk else self._copy
                after = move("read" if on_disk else "up", nbytes, (after,))
        if self.held and self.micro:
            return
        for level, nbytes in gathered(flat, self.renewing):
            after = self._move("gathers", "all-gather", flat, level, nbytes, (after,), True)
        unit.arrival.append(after)

    # -- forward -----------------------------------------------------------------------------------

    def _forward(self) -> None:
        self.order.begin(self.sharded)
        self.renewing, self.phase = self.micro == 0, "forward"
        for unit in self.units if self.renewing else ():  # resident buffers are stale after a step
            for flat in unit.flats:
                if flat.resident and flat.trainable:
                    self._gathers(unit, flat)
        open_units: list[Unit] = []
        for unit in self.units:
            while open_units and not open_units[-1].encloses(unit):
                self._leave(open_units.pop())
            self._acquire(unit)
            if unit not in self.outer:
                self._pass(unit)
            open_units.append(unit)
        while open_units:
            self._leave(open_units.pop())
        self.pool.drain()

    def _leave(self, unit: Unit) -> None:
        if unit in self.outer:  # what follows the units inside
            self._pass(unit)
        self._moment(unit.name)
        if unit in self.turning:  # it stays gathered for the backward pass
            unit.used, unit.awaiting_backward = False, True
        elif not unit.ungathered and self.recipe.reshard_after_forward:
            self._release(unit)

    def _acquire(self, unit: Unit) -> None:
        if unit.resident or unit.used:
            return
        self.order.come_to(unit, False)  # type: ignore[arg-type]
        if unit.ungathered:
            self.launch(unit)
        self._arrive(unit)
        if unit.arrival:  # what is launched from now on comes after it
            self._op("wait", COMPUTE, after=unit.arrival)
            unit.arrival = []
        unit.used, unit.awaiting_backward = True, False
        if self.units_ahead:
            look_ahead(self, self.order)

    def fetch(self, unit: Unit) -> None:
        """Take the buffers into which a disk is read ahead."""
        for i, flat in enumerate(unit.flats):
            if unit.ungathered and flat.gathers_from_disk and self._reads(flat):
                self._hold(unit, i)

    def launch(self, unit: Unit) -> None:
        unit.ungathered = False
        self.gathered[id(unit)] = unit
        for i, flat in enumerate(unit.flats):
            if not flat.resident:
                self._hold(unit, i)
                self._gathers(unit, flat)
                if flat.gather_codec is not None:
                    unit.coded.append(self.pool.take(flat.coded_bytes, torch.uint8, GATHERED))

    def _arrive(self, unit: Unit) -> None:
        """Decode what has arrived encoded."""
        coded, unit.coded = unit.coded, []
        for buffer in coded:
            self.pool.give(buffer)
        for flat in unit.flats if coded else ():
            if flat.gather_codec is not None and not flat.resident:
                self._op("code", COMPUTE, flat.ranks * _coded(flat), unit.arrival)

    def _reads(self, flat: Flat) -> bool:
        """Return whether a gather reads the masters. With a cached shard only the first gather
        after a step does.
        """
        cached = flat.gather_codec is not None or flat.has_secondary
        return not cached or (self.renewing and flat.trainable)

    def _hold(self, unit: Unit, i: int) -> None:
        """Take a buffer if it is not held yet."""
        if i not in unit.held:
            flat = unit.flats[i]
            unit.held[i] = self.pool.take(flat.numel, flat.dtypes.compute, GATHERED)

    def _release(self, unit: Unit) -> None:
        self._arrive(unit)
        unit.ungathered, unit.used, unit.awaiting_backward = True, False, False
        del self.gathered[id(unit)]
        for i in sorted(unit.held):
            self.pool.give(unit.held.pop(i))

    # -- backward ----------------------------------------------------------------------------------

    def _backward(self, deferring: bool) -> None:
        self.phase, self.deferring, self.renewing = "backward", deferring, False
        self.under_way: list[Reduction] = []
        self.on_next_hop: list[Reduction] = []
        # Bytes of sums that were sent on, and what `.grad` keeps of them
        self.sent_on: list[tuple[int, int]] = []
        self.adding = 0  # bytes in which the device adds to gradients on the host
        self.order.begin([u for u in self.needed if u.ungathered or u.awaiting_backward])
        around: list[Unit] = []
        # The root, if it only holds what follows the blocks: it completes before them
        tail: list[Unit] = []
        for unit in backwards(self.units):
            if tail and any(c.isdigit() for c in unit.name):
                self._complete(tail.pop())
            while around and not around[-1].encloses(unit):
                self._complete(around.pop())
            if not unit.looks_up_only:
                self._acquire(unit)
            self._pass(unit)
            ends = unit.path == "" and self.ends_first
            if unit not in self.outer and not ends:
                self._complete(unit)
                continue
            # Its parameters get their last gradient after the units inside. Some (a final norm, a
            # head) get theirs before: the buffer exists from then on
            (tail if ends else around).append(unit)
            self._store(unit)
        for unit in (*tail, *reversed(around)):
            self._complete(unit)
        for under_way in (self.under_way, self.on_next_hop):
            while under_way:
                self._land(under_way.pop(0))
        self.pool.drain()  # nothing more is sent
        for summed, kept in self.sent_on:
            self._becomes(summed, kept)
        self.leaving.clear()  # the host waits for them
        self.ledger.set(LEAVING, 0)
        for unit in list(self.gathered.values()):
            self._release(unit)
        self.pool.drain()
        for unit in self.units:
            self._own_gradients(unit)
        self._moment("(end)")

    def _complete(self, unit: Unit) -> None:
        """Handle the last gradient of a unit."""
        if self.unsharded:
            self._own_gradients(unit)
        flats = self._store(unit)
        for flat in flats:  # gradients are copied into the buffer, or added to what is there
            d, more = flat.dtypes, 2 if self.micro else 1
            into = more * d.sums.itemsize if self.late else d.wire.itemsize
            self._op("kernel", COMPUTE, flat.numel * (d.compute.itemsize + into))
        if not self.deferring:
            for flat in flats:
                r = Reduction(unit, flat)
                r.hops = self._hops(r, self.grads.pop(id(flat)))
                next(r.hops)
                self.under_way.append(r)
            while is_due(self.under_way, self.recipe.in_flight):
                self._land(self.under_way.pop(0))
            while len(self.on_next_hop) > self.recipe.in_flight or are_large(self.on_next_hop):
                self._land(self.on_next_hop.pop(0))
        if not unit.ungathered:
            self._release(unit)
        self._moment(unit.name)

    def _own_gradients(self, unit: Unit) -> None:
        """Count the gradients that autograd leaves in parameters without hooks of the engine."""
        for flat in unit.flats:
            if flat.unsharded and flat.trainable and id(flat) not in self.has_grad:
                self.has_grad.add(id(flat))
                self.ledger.add(GRADIENTS, flat.layout.content * flat.dtypes.master.itemsize)

    def _store(self, unit: Unit) -> list[Flat]:
        """Take the buffers in which the unit's gradients are collected, if they are not there."""
        flats = [f for f in unit.flats if f.trainable and not f.unsharded]
        for flat in flats:
            if id(flat) not in self.grads:
                dtype = flat.dtypes.sums if self.deferring else flat.dtypes.wire
                category = GRADIENTS if self.deferring else REDUCTION
                self.grads[id(flat)] = self.pool.take(flat.numel, dtype, category)
        return flats

    def _land(self, r: Reduction) -> None:
        """Land a hop. What is sent on is under way again."""
        if next(r.hops, "handed over") is None:
            self.on_next_hop.append(r)

    def _hops(self, r: Reduction, buffer: torch.Tensor) -> Iterator[None]:
        """Send the parts of each hop, and land them: the sums are sent on, held or handed over."""
        flat, d, done = r.flat, r.flat.dtypes, -1
        move = "all-reduce" if flat.whole_master else "reduce-scatter"
        wire = d.wire.itemsize
        for at, hop in enumerate(flat.hops):
            r.is_last, r.sent_bytes = at + 1 == len(flat.hops), hop.span * wire
            encodes, adds = flat.encodes(hop), flat.added_by(hop)
            others, part = hop.size - 1, hop.own * wire
            if d.sums != d.wire and (at or self.late):
                # Parts for others are cast to the wire's dtype; this rank's stays, in the wider dtype
                cast = others * (d.sums.itemsize + wire) + d.sums.itemsize - wire
                self._op("kernel", COMPUTE, hop.own * cast)
            if encodes and flat.reduce_codec is not None:
                part = flat.reduce_codec.encoded_bytes(hop.own)
                # What encoding lost is read and written in fp32 too
                self._op("code", COMPUTE, others * (hop.own * (wire + 2 * _FP32) + 2 * part))
            after, ring = (done, self.last[COMPUTE]), adds == "backend"
            done = self._move("reductions", move, flat, hop.level, others * part, after, ring)
            if adds != "pairwise" and flat.ranks > 1:
                written = (flat.landed if r.is_last else d.sums).itemsize
                parts = (hop.size if adds == "at once" else 1) * wire
                done = self._op("sum", "sums", hop.own * (parts + written), (done,))
            room = flat.exchange(at, buffer.dtype)
            # Parts that are added at once, not one by one
            at_once = room.rows > 0 and adds != "pairwise"
            # Bytes of the sums of a last hop, with room for those of other ranks; or those of a part
            # that is received into memory of its own, and becomes the sums
            apart = room.apart * room.dtype.itemsize
            landed = apart or (flat.own if flat.broadcast_back else hop.own) * flat.landed.itemsize
            sent = self.pool.take(room.sent, room.dtype, REDUCTION) if room.sent else None
            self.ledger.add(REDUCTION, apart)
            taken = [self.pool.take(room.received, room.dtype, REDUCTION)] if room.rows else []
            total = self._total(r, hop, landed) if at_once else None
            yield
            self._op("wait", COMPUTE, after=(done,))
            if sent is not None and encodes:
                taken.append(sent)
            elif sent is not None:
                self.pool.give(sent)
            self.ledger.add(REDUCTION, -apart)
            if not at_once:
                total = self._total(r, hop, landed)
                if encodes and r.is_last and flat.landed != d.sums:
                    self.pool.give(self.pool.take(hop.own, d.sums, REDUCTION))
            for one in (*taken, buffer):
                self.pool.give(one)
            if total is None:
                self._hand_over(flat, landed, done)
                return
            # See [Note: held sums] in runtime/reduce.py
            if (held := self.held_sums.pop(id(flat), None)) is not None:
                self.pool.give(held)
            if self.holding:
                self.held_sums[id(flat)] = self.pool.take(total.numel(), total.dtype, GRADIENTS)
                self.pool.give(total)
                return
            buffer = total

    def _total(self, r: Reduction, hop: Hop, landed: int) -> torch.Tensor | None:
        """Take memory for the sums of a hop: of the pool, or what becomes `.grad`."""
        if r.is_last:
            self.ledger.add(GRADIENTS, landed)
            return None
        return self.pool.take(hop.own, r.flat.dtypes.sums, REDUCTION)

    def _hand_over(self, flat: Flat, nbytes: int, done: int) -> None:
        """Hand sums over: `.grad` is a view of them, or a copy in the masters' dtype, or they were
        added to it. Sums that were sent on are handed over at the end of the backward pass.
        """
        d = flat.dtypes
        for hop in flat.broadcast_back:
            sent = (hop.size - 1) * hop.own * d.wire.itemsize
            done = self._move("reductions", "all-reduce", flat, hop.level, sent, (done,), True)
        if flat.landed != d.master:
            self._op("kernel", COMPUTE, flat.own * (flat.landed.itemsize + d.master.itemsize))
        again = id(flat) in self.has_grad
        if again:  # added to the sums of earlier micro-batches
            self._op("kernel", COMPUTE, flat.own * 3 * d.master.itemsize)
        self.has_grad.add(id(flat))
        leaves = flat.tiers is not None
        if leaves and flat.own:
            self._leaves(flat, done, again)
        kept = (
            0
            if leaves or again or flat.only_padding
            else nbytes // flat.landed.itemsize * d.master.itemsize
        )
        if flat.broadcast_back:
            self.sent_on.append((nbytes, kept))
            return
        self._becomes(nbytes, kept)
        if leaves and self.streams:
            self._go_down(flat, nbytes, again)

    def _becomes(self, summed: int, kept: int) -> None:
        """Sums become what `.grad` keeps: the same, a cast of them, or nothing."""
        if summed != kept:
            self.ledger.add(GRADIENTS, kept)
            self.ledger.add(GRADIENTS, -summed)

    def _leaves(self, flat: Flat, after: int, again: bool) -> None:
        """Sums go to the host or to a disk, where earlier micro-batches may have left some."""
        master = flat.own * flat.dtypes.master.itemsize
        on_disk = self.gradients_on_disk and not flat.only_padding
        if again and on_disk:
            self._disk("read", master)
        elif again and self.streams:
            self._copy("up", master)
        down = master if self.streams else flat.own * flat.landed.itemsize
        arrived = self._copy("down", down, (after,))
        if on_disk:
            self._disk("written", master, (arrived,))
        if self.steps_in_backward and not flat.only_padding:
            self._step_away(flat, (arrived, self._read_states(flat, (arrived,))))

    def _go_down(self, flat: Flat, nbytes: int, again: bool) -> None:
        """Copies to the host read sums as long as the window allows: the slowest case."""
        # They are added to those on the host, or cast, in two buffers on the device
        adds = again and not self.gradients_on_disk
        if not self.adding and (adds or flat.landed != flat.dtypes.master):
            away = (f for u in self.rank for f in u.flats if f.tiers is not None)
            self.adding = 2 * chunk_for(max(f.own * f.dtypes.master.itemsize for f in away))
            self.ledger.add(LEAVING, self.adding)
        self.leaving.append(nbytes)
        self.ledger.add(LEAVING, nbytes)
        while not within(WINDOW, sum(self.leaving), self.leaving):
            self.ledger.add(LEAVING, -self.leaving.pop(0))

    # -- the update --------------------------------------------------------------------------------

    def _update(self) -> None:
        """The optimizer steps: this rank's elements on the device, whole matrices by their owners, and
        offloaded state on the host, buffer by buffer.
        """
        flats = [f for u in self.rank for f in u.flats if f.trainable]
        if self.owned is not None:
            self._owners(self.owned, flats[0])
        else:
            numel = sum(f.local(s) for f in flats if f.tiers is None for s in f.layout.slots)
            self._op("update", COMPUTE, touched_by(PLANNED[self.optimizer]) * numel)
        if self.steps_in_backward:
            return
        arrived = self.last["down" if self.streams else COMPUTE], self.last[DISK]
        away = [f for f in flats if f.tiers is not None and not f.only_padding]
        reads = [self._read_states(f, arrived) for f in away[:1]]
        for at, flat in enumerate(away):  # the next buffer is read while this one is stepped
            reads += [self._read_states(f, arrived) for f in away[at + 1 : at + 2]]
            self._step_away(flat, (*arrived, reads[at]))

    def _read_states(self, flat: Flat, after: Sequence[int]) -> int:
        """Read what a step needs of a buffer whose state is on a disk."""
        if not self.on_disk:
            return -1
        states = states_on_disk(flat, flat.own, self.optimizer)
        masters = (1 + self.gradients_on_disk) * flat.own * flat.dtypes.master.itemsize
        return self._disk("read", states + masters, after)

    def _step_away(self, flat: Flat, after: Sequence[int]) -> None:
        """Step a buffer whose state is on the host or a disk, and write what the model computes with."""
        d, own, parameters = flat.dtypes, flat.own, self.recipe.parameters.tier
        compute, master = own * d.compute.itemsize, own * d.master.itemsize
        numel = 0 if self.owned is not None else sum(flat.local(s) for s in flat.layout.slots)
        # Without streams the copy to the device casts
        casts = d.compute != d.master and (parameters is not Tier.DEVICE or self.streams)
        touched = touched_by(PLANNED[self.optimizer]) * numel + casts * (master + compute)
        stepped = self._op("update", HOST, touched or None, after)
        if self.on_disk:
            states = master + states_on_disk(flat, own, self.optimizer)
            self._disk("written", states + (compute if flat.lies_apart else 0), (stepped,))
        if parameters is Tier.DEVICE:
            self._copy("up", compute, (stepped,))

    def _owners(self, owned: Owned, flat: Flat) -> None:
        """Owners get the pieces of their matrices, step them, and send them back, in rounds: the moves
        of one round run beside the products of another.
        """
        rounds = max(1, owned.messages // 2)
        for move in ("up", "down"):
            self._copy(move, owned.carried)
        over = members(flat.topology, flat.held, flat.position, owned.level)
        begun, calls = self.last[COMPUTE], owned.messages / rounds
        for at in range(rounds):
            after = () if at else (begun,)
            moved = self._op(
                "move", OWNERS, owned.sent / rounds, after, move=OWNERS, calls=calls, over=over
            )
            each = owned.touched / rounds
            self._op("update", COMPUTE, each, (moved,), flops=owned.flops / rounds)
        self._op("update", HOST, owned.host_touched)


def _coded(flat: Flat) -> int:
    """Return the bytes of this rank's part, plain and encoded."""
    return flat.layout.shard_numel * flat.dtypes.compute.itemsize + flat.each


@lru_cache(maxsize=64)
def program_of(
    stage: Stage,
    degrees: Degrees,
    recipe: Recipe,
    optimizer: str,
    micro_batches: int,
    per_node: int | None,
    nccl: bool = False,
    rank: int | None = None,
    away: tuple[tuple[str, int], ...] = (),
    layers: tuple[Layer, ...] = (),
) -> Program:
    """Return the program of a rank of a stage: of None the first, with the largest figures of owners.

    Args:
        nccl: the device is a GPU.
        away: (unit, bytes of its activations on the host). layers: what each block sends in a pass.
    """
    units = units_of(stage, recipe, degrees, rank or 0, per_node, nccl)
    owned = owned_matrices(units, stepped_whole(stage, optimizer), optimizer, rank is not None)
    sent = dict.fromkeys(stage.names, layers)
    return Program(
        units, recipe, micro_batches, nccl, nccl, optimizer, owned, degrees.pp > 1, dict(away), sent
    )
