"""`onefold.plan(...)`: one call from a model and a machine to the recommended recipe. And the plan for
the machine that this process runs on: what `onefold.plan.recipe_for` and `onefold train --stage
auto` ask.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onefold.device import available, default_device, device_count, free_memory, with_index
from onefold.doctor.calibration import Calibration, CalibrationError
from onefold.memory.host import free_host_memory
from onefold.plan import hardware
from onefold.plan.evaluate import Candidate
from onefold.plan.hardware import Gpu, Machine
from onefold.plan.job import Job
from onefold.plan.planner import Plan
from onefold.plan.planner import plan as _plan
from onefold.plan.shapes import ModelShape
from onefold.recipe import Recipe

#: Of what is free, the share that training may take: the rest is for buffers of libraries and for
#: what starts later.
USABLE = 0.9


def machine_here(
    ranks: int, local_ranks: int, free: int, device: str, beside: Beside | None = None
) -> tuple[Machine, bool]:
    """(this machine with `ranks` ranks that may take `free` bytes each, whether its speeds were
    measured).

    The speeds are those that `onefold doctor --calibrate` left; without them bytes are planned all
    the same, and no seconds.
    """
    beside = beside or Beside.here(())
    try:
        calibration = Calibration.load()
        found = hardware.calibrated(calibration, ranks)
        measured = calibration.device == device and ranks == local_ranks
    except (CalibrationError, ValueError, OSError):
        measured = False
    if not measured:
        known = hardware.builtin()
        between = known.link("100g") if ranks > local_ranks else None
        gpu = Gpu("here", "this machine", free, {"fp32": 1e12}, 1.0, 1e10, 1e9, 1e9)
        host, shared = known.hosts["default"], device == "cpu"
        found = Machine(gpu, ranks, local_ranks, between, host, shared=shared)
    host = replace(found.host, memory=beside.host, nvme=beside.disk)
    return replace(found, gpu=replace(found.gpu, capacity=free), host=host), measured


@dataclass(frozen=True)
class Beside:
    """Bytes that a node has beside its devices: free memory of the host, and what is free on disks
    that may be used.
    """

    host: float
    disk: float

    @classmethod
    def here(cls, folders: Sequence[str]) -> Beside:
        """Of this node, with state striped over `folders`. Raises ValueError for one that is not
        there.
        """
        return cls(free_host_memory(), _free_at(folders))


def _free_at(folders: Sequence[str]) -> float:
    """Bytes that may be written at folders over which state is striped: each takes the same; those
    on one disk share what is free there.
    """
    disks: dict[int, list[Path]] = {}
    for path in map(Path, folders):
        if not path.is_dir():
            raise ValueError(
                f"nvme={str(path)!r}: there is no such folder; make one on the disk that is to be"
                " used."
            )
        disks.setdefault(path.stat().st_dev, []).append(path)
    each = [shutil.disk_usage(there[0]).free / len(there) for there in disks.values()]
    return min(each) * len(folders) if each else 0.0


def plan_here(
    model: nn.Module | str,
    job: Job,
    *,
    ranks: int,
    local_ranks: int,
    free: int,
    device: str,
    stages: tuple[int, ...] = (),
    batch: Callable[[int], Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    beside: Beside | None = None,
) -> Plan:
    """The plan of a real module on this machine. Local: the same on every rank that is given the
    same figures.

    Args:
        free: bytes that are free for a rank, on the rank that has least. beside: what its node has;
            None looks.
        device: "cpu" or "cuda".

    Raises:
        ValueError: the module cannot be traced, or the batch does not divide.
    """
    machine, measured = machine_here(
        ranks, local_ranks, int(free * USABLE), device, beside or Beside.here(job.folders)
    )
    found = _plan(model, machine, job, stages=stages, batch=batch, loss=loss, largest=False)
    if measured:
        return found

    def bytes_only(candidate: Candidate) -> Candidate:
        account = replace(candidate.account, seconds={}, tiers={}, tokens_per_s=0.0, mfu=None)
        return replace(candidate, account=account)

    note = (
        "speeds of this machine are not measured: onefold doctor --calibrate would add seconds to"
        " the plan"
    )
    return replace(
        found,
        stages=tuple(map(bytes_only, found.stages)),
        recommended=bytes_only(found.recommended) if found.recommended is not None else None,
        next_steps=tuple(map(bytes_only, found.next_steps)),
        notes=(*found.notes, note),
    )


def _least(free: int, folders: Sequence[str], ranks: int) -> tuple[int, Beside]:
    """What is free on the rank that has least, of its device and beside it. Collective; raises
    ValueError on every rank if one's folder is not there.
    """
    found: Beside | str
    try:
        found = Beside.here(folders)
    except ValueError as error:
        found = str(error)
    every: list[Any] = [(free, found)] * ranks
    if ranks > 1:
        dist.all_gather_object(every, (free, found))
    for _, said in every:
        if isinstance(said, str):
            raise ValueError(said)
    least = Beside(min(b.host for _, b in every), min(b.disk for _, b in every))
    return min(f for f, _ in every), least


def recipe_for(
    model: nn.Module | str,
    *,
    batch: Callable[[int], Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Recipe:
    """The lowest stage whose peak fits what is free on the rank that has least, with as little as
    need be off the device.

    States leave a GPU for the host's memory where nothing else fits, and for a disk only if `nvme=`
    names folders there. Collective if torch.distributed is initialized. The module may be on the
    meta device; it is not changed. The recipe's last note says which micro-batch was planned; the
    whole account is `onefold.plan(model, ...)`'s.

    Args:
        model: a module, or what else `onefold.plan` takes.
        batch: as of `onefold.plan`.
        loss: the same.
        device: where it will be computed; None takes CUDA if there is any.
        options: fields of `plan.job.Job` (seq, micro_batch, of which 0 takes the largest that fits,
            global_batch, precision, which is None here unless told otherwise: as the model is,
            checkpointing, optimizer, offload, ...) and arguments of `Recipe.zero` (reduce_at,
            units, nvme, offload_optimizer, shard_group, gather_codec, ...). What rounds on the wire
            is taken if it is asked for, never else.

    Raises:
        ValueError: nothing fits (with what is nearest), an unknown option, or a figure that cannot
            be.
    """
    if "stage" in options:
        raise ValueError(
            f"recipe_for chooses the stage; for stage {options['stage']} write"
            f" Recipe.zero({options['stage']}, ...)."
        )
    job = Job.of({"precision": None, "checkpointing": "none", **options}, "onefold.plan.recipe_for")
    where = with_index(device) if device is not None else default_device()
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    local = min(ranks, ranks if where.type == "cpu" else device_count())
    free = free_memory(where) if where.type != "cpu" else free_host_memory() // local
    free, beside = _least(free, job.folders, ranks)
    found = plan_here(
        model,
        job,
        ranks=ranks,
        local_ranks=local,
        free=free,
        device=where.type,
        batch=batch,
        loss=loss,
        beside=beside,
    )
    if found.recommended is None:
        raise ValueError(found.why_not)
    recipe = found.recipe
    return recipe.replace(notes=(*recipe.notes, _planned(found.recommended, ranks)))


def _planned(best: Candidate, ranks: int) -> str:
    """The note of a recipe that was planned."""
    accumulated = f" x {best.accumulation} accumulated" if best.accumulation > 1 else ""
    peak = f"{best.needed / 2**20:,.0f} MiB of {best.usable / 2**20:,.0f}"
    others = [
        f"{n / 2**20:,.0f} MiB {where}"
        for n, where in ((best.account.host, "on the host"), (best.account.nvme, "on NVMe"))
        if n
    ]
    more = f", {' and '.join(others)}" if others else ""
    return (
        f"planned: {best.scheme}, micro-batch {best.scheme.micro_batch}{accumulated} on {ranks}"
        f" ranks, {peak} at peak{more}."
    )


def plan(
    model: nn.Module | ModelShape | str | Path | float,
    machine: Machine | None = None,
    *,
    gpus: int | None = None,
    per_node: int = 8,
    gpu: str = "h100-80",
    link: str = "8x200g",
    stage: int | None = None,
    batch: Callable[[int], Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    largest: bool = True,
    **job: Any,
) -> Plan:
    """What every stage of a job would hold, send and take on a machine, and which to use. `print`
    it, or `shard(model, plan.recipe)`.

        onefold.plan("llama-3-70b", gpus=64, gpu="h100-80", seq=4096)
        onefold.plan(model, micro_batch=4, seq=1024, precision="bf16")     # on this machine

    Args:
        model: a module (also on the meta device), an architecture's name, a Hugging Face folder or
            config.json, `package.module:factory`, or a number of parameters.
        machine: what to plan for; else `gpus` of a kind, in nodes of `per_node` joined by `link`;
            else one rank of this machine.
        stage: only this one; None for the lowest that fits.
        batch: for modules that are no language model of `input_ids` and `labels`: makes the batch of
            a given number of samples.
        loss: for the same modules: the scalar of the module's output.
        largest: also find the largest micro-batch and model for each stage.
        job: the fields of `plan.job.Job`: seq, micro_batch, global_batch, precision,
            accumulate_dtype, checkpointing, optimizer, lora_rank, offload; and arguments of `Recipe.zero` (reduce_at,
            units, offload_optimizer, nvme, tile, shard_group, gather_codec, ...), which the plan
            and its recipe follow. On this machine states go to a disk only if `nvme` names folders
            there.

    Raises:
        ValueError: a name, an option or a figure that cannot be; the message says what to change.
    """
    if stage is not None and stage not in (0, 1, 2, 3):
        raise ValueError(
            f"stage={stage!r}: expected 0, 1, 2 or 3, or None for the lowest that fits."
        )
    asked = Job.of(job, "onefold.plan")
    if machine is None and gpus is not None:
        for name, count in (("gpus", gpus), ("per_node", per_node)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"{name}={count!r}: expected a whole number, 1 or more.")
        for name, text in (("gpu", gpu), ("link", link)):
            if not isinstance(text, str):
                raise ValueError(
                    f"{name}={text!r}: expected a name such as"
                    f" {'h100-80' if name == 'gpu' else '8x200g'}."
                )
        machine = hardware.machine(gpus, min(per_node, gpus), gpu, link)
    if machine is None:
        free = free_memory() if available() else free_host_memory()
        machine, _ = machine_here(1, 1, free, default_device().type, Beside.here(asked.folders))
    stages = () if stage is None else (stage,)
    return _plan(model, machine, asked, stages=stages, batch=batch, loss=loss, largest=largest)
