"""What the ledgers and the clock say of cells of the matrix, on this rank.

Cells of one setting (the stages) live side by side and take their timed steps in turns, so that a
slow moment of the machine meets all of them and their order can be judged round by round:

    round    1            2            3
    stage    0 1 2 3      1 2 3 0      2 3 0 1       a turn is a step that warms up, and one that counts
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import onefold
from benchmarks.plan_matrix.pace import Pace
from benchmarks.plan_matrix.settings import Cell, batch, build
from onefold.comm import MOVES
from onefold.models.build import checkpoint_activations
from onefold.observe.measure import measured
from onefold.observe.trace import record

#: Steps before anything is measured: optimizer states are made, orders learned.
WARMUP = 3


class Training:
    """A cell's model under the engine, warmed up. Collective, as are its methods."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.number = cell, 0
        model = build(cell.architecture)
        checkpoint_activations(model, cell.checkpointing)
        recipe = onefold.Recipe.zero(cell.stage, precision=cell.precision, stall_timeout=60.0)
        self.model = onefold.shard(model.train(), recipe)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.engine = onefold.engine_of(self.model)
        for _ in range(WARMUP):
            self.step()

    def step(self) -> None:
        """One optimizer step with all its micro-batches."""
        self.number += 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        for k in range(self.cell.accumulation):
            with (
                contextlib.nullcontext()
                if k + 1 == self.cell.accumulation
                else onefold.no_sync(self.model)
            ):
                given = batch(
                    self.cell, self.cell.micro_batch, 10_000 * self.number + 100 * k + rank
                )
                self.model(**given).loss.backward()
        # One rank has no hooks: its ledger sees gradients when it is asked
        self.engine.memory.now()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def ledgers(self, activations: bool) -> dict[str, Any]:
        """rest, ledger, peak (with `activations`): bytes by category; wire: by move."""
        rest = measured(self.model, self.optimizer).rest
        self.engine.memory.reset_peak()
        self.engine.traffic.reset()
        self.step()
        # Buffers that follow rank 0 (the move "state") are the model's own: the plan speaks of
        # parameters and gradients.
        wire = {
            move: nbytes for move, nbytes in self.engine.traffic.by_move().items() if move in MOVES
        }
        ledger, peak = self.engine.memory.peak(), {}
        if activations:
            with record(self.model, self.optimizer, activations=True) as seen:
                self.step()
            peak = dict(measured(self.model, self.optimizer, seen).peak)
        return {"rest": dict(rest), "wire": wire, "ledger": ledger, "peak": peak}

    def span(self) -> tuple[float, float]:
        """(begin, end) of a step on this machine's clock, which all ranks begin together."""
        if self.cell.ranks > 1:
            dist.barrier()
        begin = time.perf_counter()
        self.step()
        return begin, time.perf_counter()


def measure(
    cells: Sequence[Cell],
    rounds: int = 0,
    usual: float = 0.0,
    patience: float = 30.0,
    activations: bool = True,
) -> list[dict[str, Any]]:
    """Train `cells`, which differ in their stage alone, and read their ledgers. Collective over
    their ranks.

    Args:
        rounds: how often each cell's step is timed; 0 times none.
        usual, patience: see `Pace`; `usual` 0 takes every round as it comes.
        activations: also record a step with everything that autograd saves.

    Returns:
        For each cell rest, ledger, peak, wire (see `Training.ledgers`), spans: (begin, end) of the
        timed step of each round, and paces: the machine's in that round.
    """
    trained = [Training(cell) for cell in cells]
    seen = [training.ledgers(activations) | {"spans": [], "paces": []} for training in trained]
    pace = Pace(usual, patience) if usual and rounds else None
    number = 0
    while number < rounds:
        before = pace.wait() if pace else 1.0
        begin = time.perf_counter()
        spans: dict[int, tuple[float, float]] = {}
        for i in range(len(trained)):
            at = (number + i) % len(trained)
            trained[at].step()
            spans[at] = trained[at].span()
        after = pace.now() if pace else 1.0
        if pace and not (pace.counts(before) and pace.counts(after)) and pace.patience > 0:
            pace.spend(time.perf_counter() - begin)
            continue
        for at, span in spans.items():
            seen[at]["spans"].append(span)
            seen[at]["paces"].append((before + after) / 2)
        number += 1
    trained.clear()
    gc.collect()
    return seen
