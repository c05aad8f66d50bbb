"""`--stage auto`: the lowest stage, and with `--micro-batch auto` the largest micro-batch, whose peak fits on every rank.

The first rank traces the model and asks the plan (`onefold.plan`); the others take its answer. On one rank it is stage 0: there is nothing
to divide. A model whose code cannot be traced is judged by its states alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onefold.plan.auto import USABLE, plan_here
from onefold.plan.evaluate import Candidate
from onefold.plan.formulas.compute import transformer_flops_per_token
from onefold.plan.from_module import model_shape
from onefold.plan.job import Job
from onefold.plan.schema import GRADIENTS, Account
from onefold.plan.states import at_rest, units_of
from onefold.train.errors import TrainError
from onefold.train.machine import readable


@dataclass(frozen=True)
class Choice:
    """What was chosen and why.

    Attributes:
        stage: 0 to 3. micro_batch: sequences a rank computes at once.
        reason: one sentence.
        needed: {stage: bytes of one rank at peak}; of its states alone if the model could not be traced.
        available: bytes that may be taken on the rank that has the least.
        predicted: the account of the chosen stage, None if the model could not be traced.
        flops_per_token: model FLOPs. peak_flops: what a rank's hardware can do, FLOP/s; None where nobody measured it.
        notes: what the plan assumed.
    """

    stage: int
    micro_batch: int
    reason: str
    needed: Mapping[int, int]
    available: int
    predicted: Account | None = None
    flops_per_token: float | None = None
    peak_flops: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Asked:
    """What the configuration and the machine say. `micro_batch` 0 is auto; `free` are bytes on the rank that has least; `reduce_at` and
    `units` are the recipe's, None for what is usual."""

    stage: str
    micro_batch: int
    global_batch: int
    seq: int
    precision: str
    checkpointing: str
    ranks: int
    local_ranks: int
    free: int
    device: str
    reduce_at: str | None = None
    units: tuple[str, ...] | None = None

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """What the recipe will have beside stage and precision, as `plan.job.Job` takes it."""
        return tuple((k, v) for k, v in (("reduce_at", self.reduce_at), ("units", self.units)) if v is not None)


def choose(model: nn.Module, asked: Asked) -> Choice:
    """Take the stage that was asked for, or the lowest that fits.

    Raises:
        TrainError: the batch does not divide, or `units` names nothing.
    """
    stages = () if asked.stage == "auto" else (int(asked.stage),)
    try:
        job = Job(
            seq=asked.seq,
            micro_batch=asked.micro_batch,
            global_batch=asked.global_batch,
            precision=asked.precision,
            checkpointing=asked.checkpointing,
            offload="none",
            options=asked.options,
        )
        found = plan_here(
            model, job, ranks=asked.ranks, local_ranks=asked.local_ranks, free=asked.free, device=asked.device, stages=stages,
            batch=_batch_of(asked.seq),
        )  # fmt: skip
    except Exception as error:  # a model's own code may do anything under a trace; training it may still work
        if isinstance(error, ValueError) and "does not divide" in str(error):
            raise TrainError(str(error)) from None
        return _by_states(model, asked, f"the model could not be traced ({type(error).__name__}: {str(error)[:120]})")
    needed = {c.scheme.stage: c.account.peak_bytes for c in found.stages}
    flops = transformer_flops_per_token(found.model.active_numel, found.model.transformer, asked.seq)
    peak = found.machine.peak(asked.precision) if found.machine.measured is not None else None
    best = found.recommended
    if best is None:
        last = stages[0] if stages else 0 if asked.ranks == 1 else 3
        shown = next(c for c in found.stages if c.scheme.stage == last)
        why = f"stage {last} needs {readable(needed[last])} a rank at peak of {readable(shown.usable)} free: it may run out of memory"
        return Choice(last, shown.scheme.micro_batch, why, needed, shown.usable, shown.account, flops, peak, found.notes)
    why = _why(asked, best, needed)
    return Choice(best.scheme.stage, best.scheme.micro_batch, why, needed, best.usable, best.account, flops, peak, found.notes)


def _why(asked: Asked, best: Candidate, needed: Mapping[int, int]) -> str:
    stage = best.scheme.stage
    fits = f"its peak takes {readable(best.account.peak_bytes)} of {readable(best.usable)} a rank may use"
    if asked.stage != "auto":
        return f"stage {stage}, as asked: {fits}"
    if asked.ranks == 1:
        return f"stage 0: with one rank there is nothing to divide; {fits}"
    if stage == 1:
        return f"stage 1: {fits}; it sends what stage 0 sends and divides the optimizer"
    return f"stage {stage}, the lowest that fits: {fits}, stage {stage - 1} would take {readable(needed[stage - 1])}"


def _batch_of(seq: int) -> Any:
    def make(samples: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros((samples, seq), dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

    return make


def _by_states(model: nn.Module, asked: Asked, why: str) -> Choice:
    """Judge by states and reduced gradients alone, with half of the free memory left for activations."""
    try:
        shape, available = model_shape(model, asked.units), int(asked.free * USABLE / 2)
        job = Job(precision=asked.precision, options=asked.options)
    except ValueError as error:  # no run could have these units, or these options
        raise TrainError(str(error)) from None
    needed = {}
    for stage in (0, 1, 2, 3):
        units = units_of(shape, job.recipe(stage), asked.ranks)
        gradients = sum(
            (f.numel if f.whole_master else f.layout.shard_numel) * f.dtypes.sums.itemsize for u in units for f in u.flats if f.trainable
        )
        needed[stage] = sum((at_rest(units) | {GRADIENTS: gradients}).values())
    candidates = [int(asked.stage)] if asked.stage != "auto" else [0] if asked.ranks == 1 else [1, 2, 3]
    stage = next((s for s in candidates if needed[s] <= available), candidates[-1])
    reason = f"stage {stage}: {why}; its states take {readable(needed[stage])} of {readable(available)} left for them"
    return Choice(stage, asked.micro_batch or 1, reason, needed, available)
