"""`--stage auto`: the lowest stage, and with `--micro-batch auto` the largest micro-batch, whose
peak fits on every rank.

The first rank traces the model and asks the plan (`onefold.plan`); the others take its answer. On
one rank it is stage 0: there is nothing to divide. A model whose code cannot be traced is judged by
its states alone. Where state rests off the device, the plan knows it (plan/offloaded.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onefold.memory.host import free_host_memory
from onefold.plan.api import USABLE, Beside, plan_here
from onefold.plan.evaluate import Candidate
from onefold.plan.formulas import transformer_flops_per_token
from onefold.plan.from_module import model_shape
from onefold.plan.job import Job
from onefold.plan.offloaded import offloaded_bytes
from onefold.plan.planner import Plan
from onefold.plan.schema import Account
from onefold.plan.shapes import ModelShape
from onefold.plan.states import at_rest, units_of
from onefold.recipe import Recipe
from onefold.recipe.options import Precision
from onefold.train.errors import TrainError, readable


@dataclass(frozen=True)
class Choice:
    """What was chosen and why.

    Attributes:
        stage: 0 to 3. micro_batch: sequences a rank computes at once.
        reason: one sentence.
        needed: {stage: bytes of one rank at peak}; of its states alone if the model could not be
            traced.
        available: bytes that may be taken on the rank that has the least.
        predicted: the account of the chosen stage, None if the model could not be traced.
        flops_per_token: model FLOPs. peak_flops: what a rank's hardware can do, FLOP/s; None where
            nobody measured it.
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
    """What the configuration and the machine say.

    Attributes:
        micro_batch: 0 is auto. free: bytes on the rank that has least.
        reduce_at, units: the recipe's, None for what is usual.
        tiers: arguments of `Recipe.zero` that say where state rests; () keeps it on the device.
        communication: those about groups and codecs.
    """

    stage: str
    micro_batch: int
    global_batch: int
    seq: int
    precision: Precision
    checkpointing: str
    ranks: int
    local_ranks: int
    free: int
    device: str
    reduce_at: str | None = None
    units: tuple[str, ...] | None = None
    tiers: tuple[tuple[str, Any], ...] = ()
    communication: tuple[tuple[str, Any], ...] = ()

    @property
    def given(self) -> tuple[tuple[str, Any], ...]:
        """Arguments of `Recipe.zero` that not every stage can have."""
        return (*self.tiers, *self.communication)

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """What the recipe will have beside stage, precision and tiers, as `plan.job.Job` takes
        it.
        """
        return tuple(
            (k, v)
            for k, v in (("reduce_at", self.reduce_at), ("units", self.units))
            if v is not None
        )

    @property
    def job(self) -> Job:
        """The question to the plan."""
        return Job(
            seq=self.seq,
            micro_batch=self.micro_batch,
            global_batch=self.global_batch,
            precision=self.precision,
            checkpointing=self.checkpointing,
            offload="none",
            options=(*self.options, *self.given),
        )

    def recipe(self, stage: int) -> Recipe:
        """What the run would execute at a stage, tiers and all. Raises ValueError where no recipe
        can be so.
        """
        options = {k: v for k, v in self.options if k != "reduce_at" or stage >= 2}
        return Recipe.zero(stage, precision=self.precision, **options, **dict(self.given))


def choose(model: nn.Module, asked: Asked) -> Choice:
    """Take the stage that was asked for, or the lowest that fits.

    Raises:
        TrainError: the batch does not divide, `units` names nothing, or no stage can keep state
            where it is asked for.
    """
    try:
        job = asked.job
        return _planned(model, asked, job)
    except Exception as error:
        # A model's own code may do anything under a trace; training it may still work
        if isinstance(error, TrainError) or (
            isinstance(error, ValueError) and "does not divide" in str(error)
        ):
            raise TrainError(str(error)) from None
        return _by_states(
            model,
            asked,
            f"the model could not be traced ({type(error).__name__}: {str(error)[:120]})",
        )


def _plan(model: nn.Module, asked: Asked, job: Job, stages: tuple[int, ...], free: int) -> Plan:
    beside = Beside(free_host_memory(), math.inf)  # the disks are looked at before the run itself
    return plan_here(
        model, job, ranks=asked.ranks, local_ranks=asked.local_ranks, free=free, device=asked.device, stages=stages,
        batch=_batch_of(asked.seq), beside=beside,
    )  # fmt: skip


def _planned(model: nn.Module, asked: Asked, job: Job) -> Choice:
    found = _plan(
        model, asked, job, () if asked.stage == "auto" else (int(asked.stage),), asked.free
    )
    possible = _stages(asked)
    shown = {
        c.scheme.stage: c for c in found.stages if not asked.given or c.scheme.stage in possible
    }
    best = found.recommended
    chosen = best or shown[possible[-1]]
    needed = {s: c.needed for s, c in shown.items()} | {chosen.scheme.stage: chosen.needed}
    if best is None:
        peak = f"{readable(chosen.needed)} a rank at peak of {readable(chosen.usable)} free"
        why = f"stage {chosen.scheme.stage} needs {peak}: it may run out of memory"
    else:
        why = _why(asked, best.scheme.stage, best.account, best.usable, needed)
    notes = (*found.notes, *_host_without_room(found, chosen))
    return Choice(
        chosen.scheme.stage,
        chosen.scheme.micro_batch,
        why,
        needed,
        chosen.usable,
        chosen.account,
        *_speed(found, asked),
        notes,
    )


def _host_without_room(found: Plan, chosen: Candidate) -> list[str]:
    """A note where what is to rest on the host of a GPU, or to pass through it, finds no room."""
    machine, host = found.machine, chosen.account.host
    if machine.shared or host * machine.local <= machine.host.memory:
        return []
    return [
        f"the host has no room for the {readable(host)} a rank that are to rest there: it may run"
        " out of memory"
    ]


def _stages(asked: Asked) -> list[int]:
    """The stages that may be taken, the lowest first; stage 0 only on one rank, and there another
    only if it must be.
    """
    if asked.stage != "auto":
        return [int(asked.stage)]
    possible, last = [], None
    for stage in (0, 3) if asked.ranks == 1 else (1, 2, 3):
        try:
            asked.recipe(stage)
        except ValueError as error:
            last = error
        else:
            possible.append(stage)
    if not possible:
        raise TrainError(str(last))
    return possible[:1] if asked.ranks == 1 else possible


def _speed(found: Plan, asked: Asked) -> tuple[float | None, float | None]:
    """(model FLOPs of a token, FLOP/s of a rank's hardware where that was measured)."""
    peak = found.machine.peak(asked.precision) if found.machine.measured is not None else None
    return (
        transformer_flops_per_token(found.model.active_numel, found.model.transformer, asked.seq),
        peak,
    )


def _why(asked: Asked, stage: int, account: Account, usable: int, needed: Mapping[int, int]) -> str:
    fits = f"its peak takes {readable(needed[stage])} of {readable(usable)} a rank may use"
    beside = [
        f"{readable(n)} {where}"
        for n, where in ((account.host, "on the host"), (account.nvme, "on NVMe"))
        if n
    ]
    if beside:
        fits += f", with {' and '.join(beside)}"
    if asked.stage != "auto":
        return f"stage {stage}, as asked: {fits}"
    if stage == 0:
        return f"stage 0: with one rank there is nothing to divide; {fits}"
    if stage == 1:
        return f"stage 1: {fits}; it sends what stage 0 sends and divides the optimizer"
    if stage - 1 not in needed:
        why = (
            "can be with the options about groups and codecs"
            if asked.communication
            else "can keep parameters off the device"
        )
        return f"stage {stage}, the only one that {why}: {fits}"
    return (
        f"stage {stage}, the lowest that fits: {fits}, stage {stage - 1} would take"
        f" {readable(needed[stage - 1])}"
    )


def _batch_of(seq: int) -> Any:
    def make(samples: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros((samples, seq), dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

    return make


def _by_states(model: nn.Module, asked: Asked, why: str) -> Choice:
    """Judge by states and reduced gradients alone, with half of the free memory left for
    activations.
    """
    try:
        shape, available = model_shape(model, asked.units), int(asked.free * USABLE / 2)
        candidates = _stages(asked)
        needed = {
            s: _states(shape, asked, s) for s in (candidates if asked.given else (0, 1, 2, 3))
        }
    except ValueError as error:  # no run could have these units, or these options
        raise TrainError(str(error)) from None
    stage = next((s for s in candidates if needed[s] <= available), candidates[-1])
    reason = (
        f"stage {stage}: {why}; its states take {readable(needed[stage])} of {readable(available)}"
        " left for them"
    )
    return Choice(stage, asked.micro_batch or 1, reason, needed, available)


def _states(shape: ModelShape, asked: Asked, stage: int) -> int:
    recipe = asked.recipe(stage)
    units = units_of(shape, recipe, asked.ranks, per_node=asked.local_ranks)
    gradients = sum(
        f.own * f.dtypes.sums.itemsize
        for u in units
        for f in u.flats
        if f.trainable and f.tiers is None
    )
    host = offloaded_bytes(units, recipe).host if asked.device == "cpu" else 0
    return sum(at_rest(units).values()) + gradients + host
