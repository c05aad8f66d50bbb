"""`--stage auto`: choose the lowest stage whose peak memory fits on every rank. With
`--micro-batch auto`, also choose the largest micro-batch that fits.

The first rank traces the model and asks the plan (`onefold.plan`); the others take its answer. One
rank uses stage 0, because there is nothing to divide. A model whose code cannot be traced gets the
stage that needs least. The plan accounts for offloaded state (plan/offloaded.py).

With tensor or expert parallelism the plan counts a rank of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from onefold.memory import free_host_memory
from onefold.plan.account import Candidate
from onefold.plan.api import machine_here, planned
from onefold.plan.schema import Account
from onefold.processes.ranks import Ranks
from onefold.recipe.core import NODES, TIERS
from onefold.recipe.optimizers import PLANNED, WHOLE
from onefold.train.config import TrainConfig
from onefold.wording import TrainError, readable


@dataclass(frozen=True)
class Choice:
    """What was chosen and why.

    Attributes:
        stage: 0 to 3. micro_batch: sequences a rank computes at once.
        reason: one sentence.
        needed: {stage: bytes of one rank at peak}; {} if the model could not be traced.
        available: bytes that the run may use on the rank that has the least.
        planned: the chosen stage in the plan, None if the model could not be traced.
        flops_per_token: model FLOPs. peak_flops: measured FLOP/s of a rank's hardware, None if
            nobody measured it.
        notes: assumptions of the plan.
    """

    stage: int
    micro_batch: int
    reason: str
    needed: Mapping[int, int]
    available: int
    planned: Candidate | None = None
    flops_per_token: float | None = None
    peak_flops: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def predicted(self) -> Account | None:
        """The account of the chosen stage, if data ranks alone divide the model."""
        here = self.planned
        return here.account if here is not None and here.scheme.degrees.data_only else None


def possible_stages(config: TrainConfig, ranks: int) -> list[int]:
    """Return the stages to choose from, the lowest first. One rank gets stage 0, or stage 3 if the
    options need it; several ranks get 1 to 3. Raises ValueError: no stage has these options.
    """
    if config.stage != "auto":
        return [int(config.stage)]
    possible, last = [], None
    for stage in (0, 3) if ranks == 1 else (1, 2, 3):
        try:
            config.recipe(stage)
        except ValueError as error:
            last = error
        else:
            possible.append(stage)
    if not possible:
        raise ValueError(str(last))
    return possible[:1] if ranks == 1 else possible


def choose(model: nn.Module, config: TrainConfig, ranks: Ranks, free: int) -> Choice:
    """Choose the stage that was asked for, or the lowest that fits. `free`: bytes on the rank that has
    the least.
    Raises TrainError for a batch that does not divide, units that do not exist, or state that no
    stage can store on the tier that was asked for.
    """
    try:
        possible = possible_stages(config, ranks.world_size)
        try:
            return _planned(model, config, ranks, free, possible)
        except Exception as error:
            known = config.axes or "does not divide" in str(error)
            if isinstance(error, ValueError) and known:
                raise
            # A model's code may fail in any way under a trace, and still train
            why = f"{type(error).__name__}: {str(error)[:120]}"
            reason = (
                f"stage {possible[-1]}, which needs least: the model could not be traced ({why}), so"
                " nothing is known of the others"
            )
            return Choice(possible[-1], config.job().micro_batch or 1, reason, {}, free)
    except ValueError as error:
        raise TrainError(str(error)) from None


def _planned(
    model: nn.Module, config: TrainConfig, ranks: Ranks, free: int, possible: list[int]
) -> Choice:
    """Choose by the account of each stage, on a mesh of --tp and --ep if there is one. Raises
    ValueError: it is not possible for the model.
    """
    job, mesh, notes, more = config.job(), bool(config.axes), list[str](), dict[str, Any]()
    if mesh:
        more = {"axes": {"tp": config.tp, "ep": config.ep}, "sequence_parallel": False}
        count = ranks.world_size // config.tp
        job = replace(job, global_batch=job.global_batch or job.micro_batch * count)
        if PLANNED[job.optimizer].update == WHOLE:
            counted = PLANNED[job.optimizer].rest or "sgd-momentum"
            notes.append(f"on a mesh states of {job.optimizer} are counted as {counted} has them")
            job = replace(job, optimizer=counted)
        if config.arguments(NODES):
            notes.append("on a mesh the plan does not count groups")

    def batch(samples: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros((samples, job.seq), dtype=torch.long, device="cpu")
        return {"input_ids": ids, "labels": ids.clone()}

    beside = free_host_memory(), math.inf  # the disks are looked at before the run itself
    # Measured speeds are not by axis
    machine = machine_here(
        ranks.world_size, ranks.local_world_size, free, ranks.device.type, beside, not mesh
    )
    stages = tuple(possible) if mesh or config.stage != "auto" else ()
    found = planned(model, machine, job, stages=stages, batch=batch, largest=False, **more)
    everything = mesh or not config.arguments(TIERS, NODES)
    shown = {c.scheme.stage: c for c in found.stages if everything or c.scheme.stage in possible}
    # A plan of a mesh recommends the fastest
    lowest = next((c for c in found.stages if c.fits), None) if mesh else found.recommended
    chosen = lowest or shown[possible[-1]]
    held = chosen.account.host
    if not machine.shared and held * machine.local > machine.host.memory:
        notes.append(
            f"the host has no room for the {readable(held)} a rank that are to be stored there: it may"
            " run out of memory"
        )
    why = "the lowest that fits" if config.stage == "auto" else "as asked"
    why = why if chosen.fits else "which may run out of memory"
    peak = f"its peak takes {readable(chosen.needed)} of {readable(chosen.usable)} a rank may use"
    beyond = chosen.account.by_tier.items()
    if parts := [f"{readable(size)} {tier.where}" for tier, size in beyond if size]:
        peak += f", with {' and '.join(parts)}"
    degrees = f" on {chosen.scheme.degrees}" if mesh else ""
    return Choice(
        chosen.scheme.stage,
        chosen.scheme.micro_batch,
        f"stage {chosen.scheme.stage}{degrees}, {why}: {peak}",
        {c.scheme.stage: c.needed for c in (*shown.values(), chosen)},
        chosen.usable,
        chosen,
        found.model.flops_per_token(job.seq),
        machine.peak(job.precision or "fp32") if machine.is_timed else None,
        (*notes, *found.notes, *found.assumptions),
    )
