"""Record a window of steps: the work, the moves, the waits, and the memory held.

    with onefold.observe.record(model, optimizer) as seen:
        one_step()
    seen.write_chrome("trace.json")        # chrome://tracing, https://ui.perfetto.dev
    seen.peak(), seen.exposed, seen.wire()

Times are `time.perf_counter` seconds of this process. On CUDA they are host times: when the host
enqueued work and when it saw the work done.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from onefold.comm import STEP_MOVES, Sent
from onefold.observe.activations import watch_activations
from onefold.observe.memory import DEVICE, MOVED, ledgers_of, moments_by_tier
from onefold.plan.schema import CATEGORIES, MOMENTS
from onefold.runtime.engine import Engine
from onefold.runtime.hooks import engine_of


@dataclass(frozen=True)
class Move:
    """One move: this rank sent `nbytes` of payload to the ranks of `group`.

    Attributes:
        launched, landed: when it began and ended. exposed: seconds that this rank waited for it,
            ending at `landed`.
        between: the part of `nbytes` that went to other nodes.
        plain, plain_between: the bytes that `nbytes` and `between` were encoded from; 0 if they
            were not encoded.
    """

    move: str
    unit: str
    nbytes: int
    dtype: str
    phase: str
    launched: float
    landed: float
    exposed: float
    group: str = ""
    between: int = 0
    plain: int = 0
    plain_between: int = 0


@dataclass(frozen=True)
class Work:
    """A span of work. `kind` is "compute" (a unit's forward or backward) or "optimizer"."""

    kind: str
    unit: str
    phase: str
    start: float
    end: float


@dataclass
class Held:
    """The memory of one tier. `held`: bytes by category when the window began. `changes`: every
    (seconds, category, unit, bytes gained or lost), in order.
    """

    held: dict[str, int] = field(default_factory=dict)
    changes: list[tuple[float, str, str, int]] = field(default_factory=list)


@dataclass
class Recording:
    """What `record` recorded on one rank.

    Attributes:
        start, end: times of the window. steps: optimizer steps in it, or synchronized backward
            passes if no optimizer was given.
        moves, work: in the order in which they began.
        held: bytes by category on the device when the window began. changes: (seconds, category,
            unit, bytes gained or lost), in order.
        tiers: the same for the offload tiers that held anything, "host" and "nvme".
        io: seconds that this rank waited for NVMe.
        truncated: the ledgers' ring buffers were too short for the window, so its beginning is
            missing.
        exposed: seconds that this rank waited for other ranks, including small control messages.
        epoch: add this to a time to get seconds since 1970.
        borders: what `Move.between` crossed, "2 nodes" or "2 groups" (of the recipe); "" if there
            is one node.
    """

    rank: int
    world_size: int
    start: float
    end: float
    steps: int
    moves: list[Move] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    changes: list[tuple[float, str, str, int]] = field(default_factory=list)
    epoch: float = 0.0
    exposed: float = 0.0
    tiers: dict[str, Held] = field(default_factory=dict)
    io: float = 0.0
    activations_watched: bool = False
    truncated: bool = False
    borders: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def compute(self) -> float:
        """Seconds of the units' forward and backward, without the waits inside them."""
        spans = [(w.start, w.end) for w in self.work if w.kind == "compute"]
        return covered([*spans, *self.waits()]) - covered(self.waits())

    @property
    def optimizer(self) -> float:
        """Seconds of the optimizer's steps."""
        return covered((w.start, w.end) for w in self.work if w.kind == "optimizer")

    def waits(self) -> list[tuple[float, float]]:
        """Return when this rank waited for a move's payload: (start, end)."""
        return [(m.landed - m.exposed, m.landed) for m in self.moves if m.exposed > 0]

    def wire(self) -> dict[str, int]:
        """Return the payload bytes sent in the window, by move (`STEP_MOVES`)."""
        return {
            move: n
            for move in STEP_MOVES
            if (n := sum(m.nbytes for m in self.moves if m.move == move))
        }

    def sent(self) -> dict[str, Sent]:
        """Return the bytes sent by move, with those between nodes and those without codecs."""
        return {
            move: sum(found, Sent())
            for move in STEP_MOVES
            if (found := [Sent.of(m) for m in self.moves if m.move == move and m.nbytes])
        }

    def moved(self) -> dict[str, int]:
        """Return the bytes moved between tiers in the window, by move (`MOVED`)."""
        return {
            move: n for move in MOVED if (n := sum(m.nbytes for m in self.moves if m.move == move))
        }

    def by_unit(self) -> dict[str, dict[str, int]]:
        """Return the bytes sent, by unit, then by move."""
        out: dict[str, Counter[str]] = {}
        for m in self.moves:
            if m.move in STEP_MOVES:
                out.setdefault(m.unit, Counter())[m.move] += m.nbytes
        return {unit: dict(moves) for unit, moves in out.items()}

    def of(self, tier: str) -> Held:
        """Return the memory of a tier: "device", "host" or "nvme"."""
        return Held(self.held, self.changes) if tier == DEVICE else self.tiers.get(tier, Held())

    def levels(self, tier: str = DEVICE) -> tuple[list[float], dict[str, list[int]]]:
        """Return the memory of a tier over the window: (times, {category: bytes from each time
        on}).
        """
        held = self.of(tier)
        times, levels, now = [self.start], [dict(held.held)], Counter(held.held)
        for at, category, _, delta in held.changes:
            now[category] += delta
            if at <= times[-1]:  # changes at the same time are one change
                levels[-1] = dict(now)
            else:
                times.append(at)
                levels.append(dict(now))
        times.append(max(self.end, times[-1]))
        levels.append(dict(now))
        seen = {c for level in levels for c, n in level.items() if n}
        order = [c for c in CATEGORIES if c in seen] + sorted(seen - set(CATEGORIES))
        return times, {c: [level.get(c, 0) for level in levels] for c in order}

    def peak(self, only: Sequence[str] | None = None, tier: str = DEVICE) -> dict[str, int]:
        """Return the bytes of a tier by category at the moment when their sum was largest.
        `only`: consider these categories alone.
        """
        held = self.of(tier)
        now = Counter({c: n for c, n in held.held.items() if only is None or c in only})
        most = total = sum(now.values())
        best = dict(now)
        for _, category, _, delta in held.changes:
            if only is not None and category not in only:
                continue
            now[category] += delta
            total += delta
            if total > most:
                most, best = total, dict(now)
        return {c: n for c, n in best.items() if n}

    def write_chrome(self, path: str | Path) -> Path:
        """Write the window as Chrome trace events."""
        from onefold.observe.chrome import write

        return write(self, Path(path))


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of the spans as disjoint spans, in order."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((start, end))
    return out


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds covered by at least one of the spans."""
    return sum(end - start for start, end in merged(spans))


@contextlib.contextmanager
def record(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    activations: bool = False,
    vocabulary: int | None = None,
) -> Iterator[Recording]:
    """Record the steps inside the `with` block. The `Recording` is complete when the block ends.
    Local, no synchronization.

    Args:
        model: what `onefold.shard` returned.
        optimizer: adds its moments to the memory, and its steps to the work.
        activations: also record what autograd keeps; see `watch_activations`, which takes
            `vocabulary`.

    Raises:
        ValueError: the model was not sharded.
        RuntimeError: a recording of this model is running already.
    """
    engine = engine_of(model)
    if engine.memory.record:
        raise RuntimeError("this model is being recorded already: end the other record() first.")
    seen = Recording(
        engine.rank,
        engine.world_size,
        0.0,
        0.0,
        0,
        activations_watched=activations,
        borders=engine.group.borders,
    )
    with contextlib.ExitStack() as stack:
        saved = stack.enter_context(watch_activations(model, vocabulary)) if activations else None
        steps = _watch_steps(optimizer, engine, seen, stack) if optimizer is not None else None
        seen.held = engine.memory.now()
        seen.tiers = {tier: Held(ledger.now()) for tier, ledger in ledgers_of(engine).items()}
        for tier, nbytes in (
            moments_by_tier(optimizer, engine).items() if optimizer is not None else ()
        ):
            seen.of(tier).held[MOMENTS] = nbytes
        before, exposed, waited = (
            engine.step_count,
            engine.traffic.exposed,
            engine.transfers.moved.exposed,
        )
        _keep_events(engine, True)
        seen.epoch = time.time() - time.perf_counter()
        seen.start = time.perf_counter()
        try:
            yield seen
        finally:
            for ledger in (engine.memory, *ledgers_of(engine).values()):
                ledger.look()  # so that the ledger notices gradients that were dropped
            seen.end = time.perf_counter()
            _keep_events(engine, False)
            seen.exposed = engine.traffic.exposed - exposed
            seen.io = engine.transfers.moved.exposed - waited
            seen.steps = steps[0] if steps is not None else engine.step_count - before
            _collect(engine, seen)
            if saved is not None:
                seen.changes += [
                    (at, category, "", delta)
                    for at, category, delta in saved.timeline
                    if at <= seen.end
                ]
            for tier in (DEVICE, *seen.tiers):
                seen.of(tier).changes.sort(key=lambda change: change[0])
            seen.tiers = {
                tier: held for tier, held in seen.tiers.items() if held.held or held.changes
            }


def _keep_events(engine: Engine, wanted: bool) -> None:
    """Let every ledger keep single events from now on, or stop keeping them."""
    for ledger in (engine.memory, *ledgers_of(engine).values()):
        ledger.record = wanted
    engine.transfers.moved.wanted = (lambda: True) if wanted else bool


def _collect(engine: Engine, seen: Recording) -> None:
    """Copy what the ledgers have noted since the window began."""
    rings: tuple[tuple[deque[Any], str | int], ...] = (
        (engine.traffic.events, "launched"),
        (engine.timeline, "start"),
        (engine.memory.timeline, 0),
        (engine.transfers.moved.events, "launched"),
        *((ledger.timeline, 0) for ledger in ledgers_of(engine).values()),
    )
    seen.truncated = any(_overrun(ring, key, seen.start) for ring, key in rings)
    for e in (*engine.traffic.events, *engine.transfers.moved.events):
        if seen.start <= e.launched <= seen.end:
            # The ledger does not note when a copy or a read ends, only the total wait
            unknown = e.launched if e.move in MOVED else seen.end
            landed = unknown if e.landed is None else e.landed
            wire = e.group, e.between, e.plain, e.plain_between
            seen.moves.append(
                Move(
                    e.move, e.unit, e.nbytes, e.dtype, e.phase, e.launched, landed, e.exposed, *wire
                )
            )
    spans = [s for s in engine.timeline if seen.start <= s.start and s.end <= seen.end]
    seen.work += [Work(s.kind, s.unit, s.phase, s.start, s.end) for s in spans]
    seen.moves.sort(key=lambda m: m.launched)
    seen.work.sort(key=lambda w: w.start)
    for tier, ledger in {DEVICE: engine.memory, **ledgers_of(engine)}.items():
        seen.of(tier).changes += [
            change for change in ledger.timeline if seen.start <= change[0] <= seen.end
        ]


def _overrun(ring: deque[Any], key: str | int, start: float) -> bool:
    """Whether a ring is full and its oldest entry is younger than the window."""
    if ring.maxlen is None or len(ring) < ring.maxlen or not ring:
        return False
    oldest = ring[0][key] if isinstance(key, int) else getattr(ring[0], key)
    return bool(oldest >= start)


def _watch_steps(
    optimizer: torch.optim.Optimizer, engine: Engine, seen: Recording, stack: contextlib.ExitStack
) -> list[int]:
    """Record the optimizer's steps and the moments that they create.
    Returns a list that holds the current count of steps.
    """
    count, begun, held = [0], [0.0], moments_by_tier(optimizer, engine)

    def before(stepping: torch.optim.Optimizer, *_: Any) -> None:
        if stepping is optimizer:
            begun[0] = time.perf_counter()

    def after(*_: Any) -> None:
        end = time.perf_counter()
        count[0] += 1
        seen.work.append(Work("optimizer", "", "optimizer", begun[0], end))
        now = moments_by_tier(optimizer, engine)
        for tier in {*now, *held}:
            if change := now.get(tier, 0) - held.get(tier, 0):
                seen.of(tier).changes.append((end, MOMENTS, "", change))
        held.clear()
        held.update(now)

    first = register_optimizer_step_pre_hook(before)
    hooks: Any = first.hooks_dict_ref()
    # Run first: the engine's own hook steps offloaded states, which belongs to the step
    hooks.move_to_end(first.id, last=False)
    stack.callback(first.remove)
    stack.callback(optimizer.register_step_post_hook(after).remove)
    return count
