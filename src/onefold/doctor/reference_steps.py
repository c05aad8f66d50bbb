"""Reference steps of a calibration: the engine trains a small transformer made of blocks that were
also measured alone.

    sum of parts   passes ▒▒▒▒▒▒▒▒▒▒▒▒  moves ▒▒▒  optimizer ▒            each measured alone, again and again
    a step         casts, hooks, cold caches, waits ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒

The gap between the two is the software's efficiency (`onefold.plan.times`), which is measured
here instead of assumed.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.doctor.bench import Bench
from onefold.doctor.benchmark_blocks import (
    REFERENCE_BLOCKS,
    REFERENCE_VOCABULARY,
    Gated,
    RootMeanSquare,
    gated_flops,
)
from onefold.machine.kernels import Kernels, count
from onefold.machine.measured import StepPoint
from onefold.plan.modules import model_shape
from onefold.plan.program import Program
from onefold.plan.rank import units_of
from onefold.recipe import Recipe
from onefold.recipe.options import Precision

PRECISION: dict[str, Precision] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
#: Stages that are measured: one that keeps parameters whole, one that gathers them. A single rank
#: does the same work at both.
STAGES = (0, 3)
#: Micro-batches of a step; all but the last under `onefold.no_sync`.
MICRO_BATCHES = 2
#: Warm-up steps (they make optimizer states and record the order of units), and steps of a round
#: that count.
WARMUP, COUNTED = 2, 3


class Reference(nn.Module):
    """[1, tokens] → the mean cross-entropy of predicting each token from itself."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(REFERENCE_VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Gated(hidden) for _ in range(REFERENCE_BLOCKS))
        self.norm = RootMeanSquare(hidden)
        self.head = nn.Linear(hidden, REFERENCE_VOCABULARY, bias=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTH = self.embedding(ids_BT)
        for block in self.blocks:
            x_BTH = block(x_BTH)
        return F.cross_entropy(self.head(self.norm(x_BTH)).float().flatten(0, 1), ids_BT.flatten())


class Training:
    """A sharded reference model at one stage, ready to step."""

    def __init__(
        self, bench: Bench, members: Any, dtype: str, stage: int, hidden: int, tokens: int
    ) -> None:
        self.dtype, self.stage, self.hidden, self.tokens = dtype, stage, hidden, tokens
        self.recipe = Recipe.zero(
            stage, precision=PRECISION[dtype], stall_timeout=bench.group.timeout
        )
        torch.manual_seed(0)
        self.kernels = _kernels(dtype, hidden, tokens, bench.device)
        model = Reference(hidden).to(bench.device)
        self.shape = model_shape(model)
        self.model = onefold.shard(model, self.recipe, group=members)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.ids = torch.randint(0, REFERENCE_VOCABULARY, (1, tokens), device=bench.device)
        self.ranks = bench.group.size

    def step(self) -> None:
        """Run one optimizer step."""
        for number in range(1, MICRO_BATCHES + 1):
            last = number == MICRO_BATCHES
            with contextlib.nullcontext() if last else onefold.no_sync(self.model):
                self.model(self.ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def point(self, seconds: float) -> StepPoint:
        """Return what such a step computes and sends, with the seconds that it took."""
        units = units_of(self.shape, self.recipe, self.ranks)
        program = Program(units, self.recipe).run(MICRO_BATCHES)
        sent, calls = program.sent(), Counter(op.move for op, _ in program.counted() if op.over)
        head = 6 * self.hidden * REFERENCE_VOCABULARY * self.tokens
        flops = REFERENCE_BLOCKS * gated_flops(self.hidden, self.tokens) + head
        slots = (
            slot for unit in units for f in unit.flats for slot in map(f.local, f.layout.slots)
        )
        return StepPoint(
            dtype=self.dtype,
            stage=self.stage,
            hidden=self.hidden,
            tokens=self.tokens,
            micro_batches=MICRO_BATCHES,
            flops=float(MICRO_BATCHES * flops),
            kernels=self.kernels * MICRO_BATCHES,
            numel=self.shape.numel,
            stepped=sum(slots),
            wire={move: float(nbytes) for move, nbytes in sent.items()},
            # There and back is one collective
            calls={m: calls[m] // (2 if m == "all-reduce" else 1) for m in sent},
            seconds=seconds,
        )


@lru_cache(maxsize=64)
def _kernels(dtype: str, hidden: int, tokens: int, device: torch.device) -> Kernels:
    """Return the work of one forward and backward pass of the reference model."""
    model = Reference(hidden).to(device=device, dtype=getattr(torch, dtype))
    ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
    return count(lambda: model(ids).backward())


def take_steps(bench: Bench, members: Any) -> tuple[StepPoint, ...]:
    """Run reference steps at every size and dtype, alternating between the stages.
    Collective over the bench's ranks.

    Args:
        members: the process group of these ranks, None for a single process.
    """
    out = []
    for dtype in bench.sizes.dtypes:
        for hidden, tokens in bench.sizes.steps:
            stages = STAGES if bench.group.size > 1 else STAGES[:1]
            trained = [Training(bench, members, dtype, stage, hidden, tokens) for stage in stages]
            for training in trained * WARMUP:
                training.step()
            spans = [bench.span(training.step) for _ in range(COUNTED) for training in trained]
            seconds = bench.group_seconds(spans)
            for i, training in enumerate(trained):
                mine = sorted(seconds[i :: len(trained)])
                out.append(training.point(mine[len(mine) // 2]))
            del trained, training
            gc.collect()  # close the engines' groups before new ones open
    return tuple(out)
