"""`--stage auto`: choose the lowest stage whose peak memory fits on every rank. With
`--micro-batch auto`, also choose the largest micro-batch that fits.

The first rank traces the model and asks the plan (`onefold.plan`); the others take its answer. One
rank uses stage 0, because there is nothing to divide. A model whose code cannot be traced gets the
stage that needs least. The plan accounts for offloaded state (plan/states.py).

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
from onefold.plan.api import Plan, machine_here, planned
from onefold.plan.job import Job
from onefold.plan.schema import Account
from onefold.recipe.core import NODES, OPTIONS, TIERS
from onefold.recipe.optimizers import PLANNED, WHOLE
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


@dataclass(frozen=True)
class Asked:
    """What the configuration asks for and the machine has.

    Attributes:
        stage: "auto" or a number.
        job: what is trained, with all arguments of `Recipe.zero` except the stage.
        ranks, local_ranks: in all, and on this machine. free: bytes on the rank that has the least.
        device: the device's type.
        tp, ep: tensor-parallel ranks; data-parallel ranks with different experts.
    """

    stage: str
    job: Job
    ranks: int
    local_ranks: int
    free: int
    device: str
    tp: int = 1
    ep: int = 1

    def says(self, *panels: str) -> bool:
        """Whether an option of these panels is given. Not every stage supports those options."""
        return any(OPTIONS[name].panel in panels for name, _ in self.job.options)

    def stages(self) -> list[int]:
        """Return the stages to choose from, the lowest first.
        One rank gets stage 0, or stage 3 if the options need it; several ranks get 1 to 3.
        """
        if self.stage != "auto":
            return [int(self.stage)]
        possible, last = [], None
        for stage in (0, 3) if self.ranks == 1 else (1, 2, 3):
            try:
                self.job.recipe(stage)
            except ValueError as error:
                last = error
            else:
                possible.append(stage)
        if not possible:
            raise TrainError(str(last))
        return possible[:1] if self.ranks == 1 else possible


def choose(model: nn.Module, asked: Asked) -> Choice:
    """Choose the stage that was asked for, or the lowest that fits.
    Raises TrainError for a batch that does not divide, units that do not exist, or state that no
    stage can store on the tier that was asked for.
    """
    try:
        try:
            return _planned(model, asked)
        except TrainError:
            raise
        except Exception as error:
            mesh = max(asked.tp, asked.ep) > 1
            if isinstance(error, ValueError) and (mesh or "does not divide" in str(error)):
                raise
            # A model's code may fail in any way under a trace, and still train
            stage, why = asked.stages()[-1], f"{type(error).__name__}: {str(error)[:120]}"
            reason = (
                f"stage {stage}, which needs least: the model could not be traced ({why}), so"
                " nothing is known of the others"
            )
            return Choice(stage, asked.job.micro_batch or 1, reason, {}, asked.free)
    except ValueError as error:
        raise TrainError(str(error)) from None


def _planned(model: nn.Module, asked: Asked) -> Choice:
    """Choose by the account of each stage, on a mesh of `tp` and `ep` if there is one. Raises
    ValueError: it is not possible for the model.
    """
    job, possible, notes = asked.job, asked.stages(), list[str]()
    mesh, more = max(asked.tp, asked.ep) > 1, dict[str, Any]()
    if mesh:
        more = {"axes": {"tp": asked.tp, "ep": asked.ep}, "sequence_parallel": False}
        count = asked.ranks // asked.tp
        job = replace(job, global_batch=job.global_batch or job.micro_batch * count)
        if PLANNED[job.optimizer].update == WHOLE:
            counted = PLANNED[job.optimizer].rest or "sgd-momentum"
            notes.append(f"on a mesh states of {job.optimizer} are counted as {counted} has them")
            job = replace(job, optimizer=counted)
        if asked.says(NODES):
            notes.append("on a mesh the plan does not count groups")

    def batch(samples: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros((samples, job.seq), dtype=torch.long, device="cpu")
        return {"input_ids": ids, "labels": ids.clone()}

    beside = free_host_memory(), math.inf  # the disks are looked at before the run itself
    # Measured speeds are not by axis
    machine = machine_here(
        asked.ranks, asked.local_ranks, asked.free, asked.device, beside, measured=not mesh
    )
    stages = tuple(possible) if mesh or asked.stage != "auto" else ()
    found = planned(model, machine, job, stages=stages, batch=batch, largest=False, **more)
    everything = mesh or not asked.says(TIERS, NODES)
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
    return _chosen(asked, found, chosen, shown, (*notes, *found.notes, *found.assumptions))


def _chosen(
    asked: Asked,
    plan: Plan,
    chosen: Candidate,
    shown: Mapping[int, Candidate],
    notes: tuple[str, ...],
) -> Choice:
    stage, job, machine = chosen.scheme.stage, asked.job, plan.machine
    beside = [
        f"{readable(size)} {tier.where}" for tier, size in chosen.account.by_tier.items() if size
    ]
    peak = f"its peak takes {readable(chosen.needed)} of {readable(chosen.usable)} a rank may use"
    peak += f", with {' and '.join(beside)}" if beside else ""
    why = "the lowest that fits" if asked.stage == "auto" else "as asked"
    why = why if chosen.fits else "which may run out of memory"
    degrees = chosen.scheme.degrees
    on = "" if degrees.data_only else f" on {degrees}"
    return Choice(
        stage,
        chosen.scheme.micro_batch,
        f"stage {stage}{on}, {why}: {peak}",
        {c.scheme.stage: c.needed for c in (*shown.values(), chosen)},
        chosen.usable,
        chosen,
        plan.model.flops_per_token(job.seq),
        machine.peak(job.precision or "fp32") if machine.is_timed else None,
        notes,
    )
