"""What the ledgers of a real engine say of a cell of the matrix, on this rank."""

from __future__ import annotations

import contextlib
import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import onefold
from benchmarks.plan_matrix.settings import Cell, batch, build
from onefold.observe.measure import measured
from onefold.observe.trace import record
from onefold.train.blocks import checkpoint_activations

#: Steps before anything is measured: optimizer states are made, orders learned.
WARMUP = 3


def measure(cell: Cell, steps: int = 0, activations: bool = True) -> dict[str, Any]:
    """Train `cell` and read the ledgers. Collective over `cell.ranks` ranks.

    Args:
        steps: how many steps are timed; 0 times none.
        activations: also record a step with everything that autograd saves.

    Returns:
        rest, ledger, peak: bytes by category; wire: of a step, by move; seconds: of each timed step.
    """
    model: nn.Module = build(cell.architecture)
    checkpoint_activations(model, cell.checkpointing)
    model = onefold.shard(model.train(), onefold.Recipe.zero(cell.stage, precision=cell.precision, stall_timeout=60.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine = onefold.engine_of(model)
    for number in range(WARMUP):
        step(cell, model, optimizer, number)
    rest = measured(model, optimizer).rest
    engine.memory.reset_peak()
    engine.traffic.reset()
    step(cell, model, optimizer, WARMUP)
    wire, ledger = engine.traffic.by_move(), engine.memory.peak()
    seconds = []
    for number in range(steps):
        if cell.ranks > 1:
            dist.barrier()
        start = time.perf_counter()
        step(cell, model, optimizer, 100 + number)
        seconds.append(time.perf_counter() - start)
    peak: dict[str, int] = {}
    if activations:
        with record(model, optimizer, activations=True) as seen:
            step(cell, model, optimizer, 1000)
        peak = dict(measured(model, optimizer, seen).peak)
    del model, optimizer, engine
    gc.collect()
    return {"rest": dict(rest), "wire": wire, "ledger": ledger, "peak": peak, "seconds": seconds}


def step(cell: Cell, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One optimizer step with all its micro-batches."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for k in range(cell.accumulation):
        with contextlib.nullcontext() if k + 1 == cell.accumulation else onefold.no_sync(model):
            given = batch(cell, cell.micro_batch, 10_000 * number + 100 * k + rank)
            model(**given).loss.backward()
    onefold.engine_of(model).memory.now()  # one rank has no hooks: its ledger sees gradients when it is asked
    optimizer.step()
    optimizer.zero_grad()
