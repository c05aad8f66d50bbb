"""`--stage auto`: choose the lowest stage whose peak memory fits on every rank. With
`--micro-batch auto`, also choose the largest micro-batch that fits.

The first rank traces the model and asks the plan (`onefold.plan`); the others take its answer. One
rank uses stage 0, because there is nothing to divide. A model whose code cannot be traced is judged
by its states alone. The plan accounts for offloaded state (plan/states.py).

With tensor or expert parallelism the plan counts a rank of the mesh, from the model's dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from onefold.memory import free_host_memory
from onefold.plan.account import Candidate
from onefold.plan.api import USABLE, Plan, machine_here, room_beside
from onefold.plan.api import planned as plan
from onefold.plan.job import Job
from onefold.plan.modules import model_shape
from onefold.plan.rank import units_of
from onefold.plan.schema import Account
from onefold.plan.states import at_rest, offloaded_bytes
from onefold.recipe.core import NODES, OPTIONS, TIERS
from onefold.recipe.optimizers import PLANNED, WHOLE
from onefold.wording import TrainError, readable


@dataclass(frozen=True)
class Choice:
    """What was chosen and why.

    Attributes:
        stage: 0 to 3. micro_batch: sequences a rank computes at once.
        reason: one sentence.
        needed: {stage: bytes of one rank at peak}. If the model could not be traced, the bytes of
            its states alone.
        available: bytes that the run may use on the rank that has the least.
        predicted: the account of the chosen stage, None if the model could not be traced.
        mesh: the chosen stage on the mesh, if other axes than data divide the model too.
        flops_per_token: model FLOPs. peak_flops: measured FLOP/s of a rank's hardware, None if
            nobody measured it.
        notes: assumptions of the plan.
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
    mesh: Candidate | None = None


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
    if max(asked.tp, asked.ep) > 1:
        try:
            return _on_mesh(model, asked)
        except ValueError as error:
            raise TrainError(str(error)) from None
    try:
        return _planned(model, asked)
    except TrainError:
        raise
    except Exception as error:
        if isinstance(error, ValueError) and "does not divide" in str(error):
            raise TrainError(str(error)) from None
        # A model's code may fail in any way under a trace, and still train
        why = f"the model could not be traced ({type(error).__name__}: {str(error)[:120]})"
    try:
        return _by_states(model, asked, why)
    except ValueError as error:  # no run could have these units, or these options
        raise TrainError(str(error)) from None


def _planned(model: nn.Module, asked: Asked) -> Choice:
    job = asked.job

    def batch(samples: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros((samples, job.seq), dtype=torch.long, device="cpu")
        return {"input_ids": ids, "labels": ids.clone()}

    beside = free_host_memory(), math.inf  # the disks are looked at before the run itself
    machine = machine_here(asked.ranks, asked.local_ranks, asked.free, asked.device, beside)
    stages = () if asked.stage == "auto" else (int(asked.stage),)
    found = plan(model, machine, job, stages=stages, batch=batch, largest=False)
    possible = asked.stages()
    everything = not asked.says(TIERS, NODES)
    shown = {c.scheme.stage: c for c in found.stages if everything or c.scheme.stage in possible}
    chosen = found.recommended or shown[possible[-1]]
    stage, account = chosen.scheme.stage, chosen.account
    needed = {s: c.needed for s, c in shown.items()} | {stage: chosen.needed}
    notes = list(found.notes)
    if not machine.shared and account.host * machine.local > machine.host.memory:
        notes.append(
            f"the host has no room for the {readable(account.host)} a rank that are to be stored there:"
            " it may run out of memory"
        )
    return Choice(
        stage,
        chosen.scheme.micro_batch,
        _why(asked, chosen, needed, fits=found.recommended is not None),
        needed,
        chosen.usable,
        account,
        found.model.flops_per_token(job.seq),
        machine.peak(job.precision or "fp32") if machine.is_timed else None,
        (*notes, *found.assumptions),
    )


#: Samples at once that --micro-batch auto looks at, with axes.
_SIZES = tuple(2**n for n in range(8))


def _on_mesh(model: nn.Module, asked: Asked) -> Choice:
    """Choose by the account of the mesh. Raises ValueError: it is not possible for the model."""
    job, stages = asked.job, tuple(asked.stages())
    notes: list[str] = []
    if PLANNED[job.optimizer].update == WHOLE:
        counted = PLANNED[job.optimizer].rest or "sgd-momentum"
        notes.append(f"on a mesh states of {job.optimizer} are counted as {counted} has them")
        job = replace(job, optimizer=counted)
    count = asked.ranks // asked.tp
    axes: dict[str, int | str] = {"tp": asked.tp, "ep": asked.ep}

    beside = room_beside(job.folders)
    # Measured speeds are not by axis
    machine = machine_here(
        asked.ranks, asked.local_ranks, asked.free, asked.device, beside, measured=False
    )

    def planned(samples: int) -> Plan:
        batch = job.global_batch or samples * count
        return plan(
            model, machine, replace(job, micro_batch=samples, global_batch=batch), stages=stages, largest=False,
            axes=axes, sequence_parallel=False,
        )  # fmt: skip

    each = job.global_batch // count if job.global_batch else 0
    sizes = [n for n in _SIZES if not each or each % n == 0]
    first = planned(job.micro_batch or 1)
    shape, found = first.model, first.stages
    chosen = next((row for row in found if row.fits), found[-1])
    for samples in () if job.micro_batch else sizes[1:]:
        rows = planned(samples).stages
        larger = next(row for row in rows if row.scheme.stage == chosen.scheme.stage)
        if not larger.fits:
            break
        chosen = larger
    stage, micro_batch, degrees = (
        getattr(chosen.scheme, n) for n in ("stage", "micro_batch", "degrees")
    )
    needed = {row.scheme.stage: row.needed for row in planned(micro_batch).stages}
    peak = f"{readable(chosen.needed)} of {readable(chosen.usable)} a rank may use"
    if not chosen.fits:
        reason = f"stage {stage} needs {peak} at peak: it may run out of memory"
    elif asked.stage != "auto":
        reason = f"stage {stage}, as asked, on {degrees}: its peak takes {peak}"
    else:
        reason = f"stage {stage}, the lowest that fits on {degrees}: its peak takes {peak}"
    if asked.says(TIERS, NODES):
        notes.append("on a mesh the plan does not count groups, codecs and state off the device")
    flops = shape.flops_per_token(job.seq)
    return Choice(
        stage, micro_batch, reason, needed, chosen.usable, flops_per_token=flops, notes=tuple(notes), mesh=chosen,
    )  # fmt: skip


def _why(asked: Asked, chosen: Candidate, needed: Mapping[int, int], fits: bool) -> str:
    stage, account = chosen.scheme.stage, chosen.account
    if not fits:
        return (
            f"stage {stage} needs {readable(chosen.needed)} a rank at peak of"
            f" {readable(chosen.usable)} free: it may run out of memory"
        )
    peak = f"its peak takes {readable(needed[stage])} of {readable(chosen.usable)} a rank may use"
    beside = [f"{readable(size)} {tier.where}" for tier, size in account.by_tier.items() if size]
    if beside:
        peak += f", with {' and '.join(beside)}"
    if asked.stage != "auto":
        return f"stage {stage}, as asked: {peak}"
    if stage == 0:
        return f"stage 0: with one rank there is nothing to divide; {peak}"
    if stage == 1:
        return f"stage 1: {peak}; it sends what stage 0 sends and divides the optimizer"
    if stage - 1 not in needed:
        can = "be with the options about groups and codecs"
        can = can if asked.says(NODES) else "keep parameters off the device"
        return f"stage {stage}, the only one that can {can}: {peak}"
    return (
        f"stage {stage}, the lowest that fits: {peak}, stage {stage - 1} would take"
        f" {readable(needed[stage - 1])}"
    )


def _by_states(model: nn.Module, asked: Asked, why: str) -> Choice:
    """Choose by the bytes of states and reduced gradients.
    Half of the free memory is left for activations.
    """
    shape = model_shape(model, dict(asked.job.options).get("units"))
    available = int(asked.free * USABLE / 2)

    def states(stage: int) -> int:
        recipe = asked.job.recipe(stage)
        units = units_of(shape, recipe, asked.ranks, per_node=asked.local_ranks)
        flats = [f for u in units for f in u.flats if f.trainable and f.tiers is None]
        gradients = sum(f.own * f.dtypes.sums.itemsize for f in flats)
        host = offloaded_bytes(units, recipe).host if asked.device == "cpu" else 0
        return sum(at_rest(units).values()) + gradients + host

    candidates = asked.stages()
    shown = candidates if asked.says(TIERS, NODES) else range(4)
    needed = {stage: states(stage) for stage in shown}
    stage = next((s for s in candidates if needed[s] <= available), candidates[-1])
    reason = (
        f"stage {stage}: {why}; its states take {readable(needed[stage])} of {readable(available)}"
        " left for them"
    )
    return Choice(stage, asked.job.micro_batch or 1, reason, needed, available)
