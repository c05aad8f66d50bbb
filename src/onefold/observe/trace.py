"""Record a window of steps: the moves, the waits, the optimizer's steps, and the memory held.

    with onefold.observe.trace.record(model, optimizer) as seen:
        one_step()
    seen.peak(), seen.exposed, seen.wire()

`measured` makes an account of it, in the schema of the plan. Times are `time.perf_counter` seconds of this
process. On CUDA they are host times: when the host enqueued work and when it saw the work done.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from onefold.comm import STEP_MOVES, TrafficEvent
from onefold.device import memory_figures
from onefold.observe.activations import Activations
from onefold.observe.memory import DEVICE, HOST, NVME, Held, held_by_tier, moments_by_tier, ordered
from onefold.plan.schema import ENGINE, FRAGMENTATION, MOMENTS, MOVED, Account
from onefold.runtime.engine import Engine
from onefold.runtime.hooks import engine_of


@dataclass
class Recording:
    """What `record` recorded on one rank.

    Attributes:
        start, end: times of the window. steps: optimizer steps in it.
        moves: in the order in which they began; `landed` of those that had not by `end` is `end`, and
            of copies and reads, whose end is not known, `launched`. updates: when the optimizer stepped, (start, end).
        tiers: the memory of the device, and of the offload tiers that held anything ("host", "nvme").
        exposed: seconds that this rank waited for other ranks, including small control messages.
        io: seconds that this rank waited for NVMe.
    """

    start: float = 0.0
    end: float = 0.0
    steps: int = 0
    moves: list[TrafficEvent] = field(default_factory=list)
    updates: list[tuple[float, float]] = field(default_factory=list)
    tiers: dict[str, Held] = field(default_factory=lambda: {DEVICE: Held()})
    exposed: float = 0.0
    io: float = 0.0
    activations_watched: bool = False

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def compute(self) -> float:
        """Seconds that were no wait and no step of the optimizer."""
        return self.seconds - covered([*self.waits(), *self.updates])

    @property
    def optimizer(self) -> float:
        """Seconds of the optimizer's steps."""
        return covered(self.updates)

    def waits(self) -> list[tuple[float, float]]:
        """Return when this rank waited for a move's payload: (start, end)."""
        return [(m.landed - m.exposed, m.landed) for m in self.moves if m.exposed > 0]

    def wire(self, moves: Sequence[str] = STEP_MOVES) -> dict[str, int]:
        """Return the payload bytes sent in the window, by move. With `MOVED`, those moved between
        tiers.
        """
        sent = Counter[str]()
        for m in self.moves:
            sent[m.move] += m.nbytes
        return {move: sent[move] for move in moves if sent[move]}

    def peak(self, only: Container[str] | None = None, tier: str = DEVICE) -> dict[str, int]:
        """Return the bytes of a tier by category at the moment when their sum was largest.
        `only`: consider these categories alone.
        """
        return self.tiers.get(tier, Held()).peak(only)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds covered by at least one of the spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@contextlib.contextmanager
def record(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, activations: bool = False
) -> Iterator[Recording]:
    """Record the steps inside the `with` block. The `Recording` is complete when the block ends.
    Local, no synchronization.

    Args:
        model: what `onefold.shard` returned.
        optimizer: adds its moments to the memory, and when it stepped.
        activations: also record what autograd keeps; see `Activations`.

    Raises:
        ValueError: the model was not sharded.
        RuntimeError: a recording of this model is running already.
    """
    engine = engine_of(model)
    if engine.memory.record:
        raise RuntimeError("this model is being recorded already: end the other record() first.")
    seen = Recording(activations_watched=activations)
    traffic, moved, ledgers = engine.traffic, engine.transfers.moved, engine.transfers.ledgers
    with contextlib.ExitStack() as stack:
        saved = stack.enter_context(Activations(model)) if activations else None
        _watch_steps(optimizer, engine, seen, stack)
        for each in (traffic, moved):
            each.events.clear()
        for ledger in ledgers.values():
            ledger.timeline.clear()
            ledger.record = True
        exposed, waited = traffic.exposed, moved.exposed
        seen.start = time.perf_counter()
        try:
            yield seen
        finally:
            for tier, ledger in ledgers.items():
                ledger.look()  # so that the ledger notices gradients that were dropped
                ledger.record = False
                seen.tiers[tier.value].changes += ledger.timeline
            seen.tiers[DEVICE].changes += saved.changes if saved is not None else ()
            seen.end = time.perf_counter()
            seen.exposed, seen.io = traffic.exposed - exposed, moved.exposed - waited
            for e in (*traffic.events, *moved.events):
                landed = e.launched if e.move in MOVED else min(e.landed, seen.end)
                seen.moves.append(replace(e, landed=landed))
            seen.moves.sort(key=lambda move: move.launched)
            for name, held in list(seen.tiers.items()):
                held.changes.sort(key=lambda change: change[0])
                if name != DEVICE and not held.held and not held.changes:
                    del seen.tiers[name]


def _watch_steps(
    optimizer: torch.optim.Optimizer, engine: Engine, seen: Recording, stack: contextlib.ExitStack
) -> None:
    """Record what is held at the beginning, the optimizer's steps, and the moments that they create."""
    begun, held = [0.0], moments_by_tier(optimizer, engine)
    seen.tiers = {tier: Held(now) for tier, now in held_by_tier(engine, held).items()}

    def before(stepping: torch.optim.Optimizer, *_: Any) -> None:
        if stepping is optimizer:
            begun[0] = time.perf_counter()

    def after(*_: Any) -> None:
        nonlocal held
        end, had, held = time.perf_counter(), held, moments_by_tier(optimizer, engine)
        seen.steps += 1
        seen.updates.append((begun[0], end))
        for tier in {*had, *held}:
            if change := held.get(tier, 0) - had.get(tier, 0):
                seen.tiers[tier].changes.append((end, MOMENTS, "", change))

    first = register_optimizer_step_pre_hook(before)
    hooks: Any = first.hooks_dict_ref()
    # Run first: the engine's own hook steps offloaded states, which belongs to the step
    hooks.move_to_end(first.id, last=False)
    stack.callback(first.remove)
    stack.callback(optimizer.register_step_post_hook(after).remove)


def measured(model: nn.Module, optimizer: torch.optim.Optimizer, recording: Recording) -> Account:
    """Return the account of this rank. Call it between steps. Local, no synchronization.

    rest        the ledger of the device now, plus the optimizer's states there
    peak        the recording's peak; on an accelerator also what its allocator reserved and did not use
    offloaded   the same peaks of the host and of NVMe
    wire        bytes per step; links: those inside and between the nodes that the ledger knows
    seconds     per step: waits (for other ranks, for NVMe), optimizer, the whole, and what is left of
                it: compute

    Raises:
        ValueError: the model was not sharded, or the recording holds no whole step.
    """
    engine, n = engine_of(model), recording.steps
    if n < 1:
        raise ValueError(
            "the recording holds no whole step: run at least one step, the optimizer's included,"
            " inside record()."
        )
    figures = memory_figures(engine.device)
    unused = figures.reserved_peak - figures.allocated_peak if figures is not None else 0
    offloaded = {tier: recording.peak(tier=tier) for tier in (HOST, NVME)}
    wire = {move: nbytes // n for move, nbytes in recording.wire().items()}
    # Bytes between the recipe's groups are not bytes between nodes
    of_nodes = engine.group.borders.endswith("nodes")
    between = sum(m.between for m in recording.moves if m.move in STEP_MOVES) // n * of_nodes
    moved = {move: nbytes // n for move, nbytes in recording.wire(MOVED).items()}
    seconds = {
        "compute": recording.compute,
        "exposed communication": recording.exposed,
        "optimizer": recording.optimizer,
        "step": recording.seconds,
        **({"io": recording.io} if moved else {}),
    }
    return Account(
        rest=held_by_tier(engine, moments_by_tier(optimizer, engine))[DEVICE],
        peak=ordered({**recording.peak(), FRAGMENTATION: unused}),
        ledger=recording.peak(ENGINE),
        offloaded={tier: held for tier, held in offloaded.items() if held},
        moved=moved,
        wire=wire,
        links=ordered({"inside": sum(wire.values()) - between, "between": between}),
        seconds={name: value / n for name, value in seconds.items()},
    )
