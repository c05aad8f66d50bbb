"""The calls for users: `onefold.plan(...)`, from a model and a machine to the recommended recipe,
and the plan for the machine that this process runs on (`onefold.plan.recipe_for`, `onefold train
--stage auto`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onefold.device import available, default_device, device_count, free_memory, with_index
from onefold.machine.calibration import Calibration
from onefold.memory import free_host_memory
from onefold.plan import hardware
from onefold.plan.account import Candidate
from onefold.plan.hardware import Gpu, Machine
from onefold.plan.job import Convention, Job
from onefold.plan.planner import Plan
from onefold.plan.planner import plan as _plan
from onefold.plan.shapes import ModelShape
from onefold.recipe import Recipe
from onefold.wording import readable

#: Fields of `Degrees` that are no degree, with their defaults.
MESH = {"chunks": 1, "schedule": "1f1b", "sequence_parallel": True, "expert_tp": True}
#: The share of free memory that training may take. The rest is for buffers of libraries and for
#: later processes.
USABLE = 0.9


@dataclass(frozen=True)
class Beside:
    """A node's free bytes beside its devices: of the host's memory, and of the disks that may be
    used.
    """

    host: float
    disk: float

    @classmethod
    def here(cls, folders: Sequence[str]) -> Beside:
        """Look at this node, with state divided among `folders`: each takes the same, and folders on
        one disk share its free bytes. Raises ValueError for a folder that does not exist.
        """
        disks: dict[int, list[Path]] = {}
        for path in map(Path, folders):
            if not path.is_dir():
                raise ValueError(
                    f"nvme={str(path)!r}: there is no such folder; make one on the disk"
                    " that is to be used."
                )
            disks.setdefault(path.stat().st_dev, []).append(path)
        each = [shutil.disk_usage(there[0]).free / len(there) for there in disks.values()]
        return cls(free_host_memory(), min(each) * len(folders) if each else 0.0)


def machine_here(
    ranks: int, local: int, free: int, device: str, beside: Beside, measured: bool = True
) -> Machine:
    """Return this machine with `ranks` ranks, `local` of them on this node, of whose `free` bytes
    training may take USABLE.

    `onefold doctor --calibrate` measures its speeds. Without them, or if they shall not be asked for, a
    plan has bytes and no seconds.
    """
    known = hardware.builtin()
    try:
        found = hardware.calibrated(Calibration.load())
    except ValueError:
        measured = False
    if not measured or (found.ranks, found.ranks, found.shared) != (ranks, local, device == "cpu"):
        between = known.link("100g") if ranks > local else None
        gpu = Gpu("here", free, 1e10, "this machine", fp32=1e12)
        found = Machine(
            gpu, ranks, local, between, known.hosts["default"], shared=device == "cpu", is_timed=False
        )  # fmt: skip
    host = replace(found.host, memory=beside.host, nvme=beside.disk)
    return replace(found, gpu=replace(found.gpu, capacity=int(free * USABLE)), host=host)


def plan_here(
    model: nn.Module | str,
    job: Job,
    *,
    ranks: int,
    local_ranks: int,
    free: int,
    device: str,
    beside: Beside | None = None,
    axes: Mapping[str, int | str] | None = None,
    **options: Any,
) -> Plan:
    """Plan a real module on this machine. Not collective: the same figures give every rank the same
    plan.

    Args:
        free: free bytes of a rank, on the rank that has least.
        device: "cpu" or "cuda".
        beside: what its node has; None: looks.
        axes, options: as for `onefold.plan.planner.plan`, with its other arguments.

    Raises:
        ValueError: the module cannot be traced, or the batch does not divide.
    """
    beside = beside or Beside.here(job.folders)
    # Measured speeds are not by axis
    machine = machine_here(ranks, local_ranks, free, device, beside, measured=axes is None)
    return _plan(model, machine, job, largest=False, axes=axes, **options)


def _least(free: int, job: Job, ranks: int) -> tuple[int, Beside]:
    """Return the free bytes of the rank that has least, on its device and beside it. Collective;
    raises ValueError on every rank if a folder of any rank does not exist.
    """
    found: Beside | str
    try:
        found = Beside.here(job.folders)
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
    """Return a recipe of the lowest stage that fits the free memory of the rank that has least.

    It offloads as little as possible. States of a GPU go to the host's memory if nothing else fits,
    and to a disk only if `nvme=` names folders on it. Collective if torch.distributed is
    initialized. The module may be on the meta device; it is not changed. The recipe's last note
    says which micro-batch was planned; `onefold.plan(model, ...)` gives the whole account.

    Args:
        model: a module, or any other model that `onefold.plan` takes.
        batch: as for `onefold.plan`.
        loss: as for `onefold.plan`.
        device: where the model will be computed; None: CUDA if there is any.
        options: fields of `plan.job.Job` (seq, micro_batch, global_batch, precision, checkpointing,
            optimizer, offload, ...) and arguments of `Recipe.zero` (reduce_at, units, nvme,
            offload_optimizer, shard_group, gather_codec, ...). By default `precision` is None, the
            model's own, and nothing is recomputed. Codecs, which round, are only used if asked for.

    Raises:
        ValueError: nothing fits (with what is nearest), an unknown option, or an impossible figure.
    """
    if "stage" in options:
        raise ValueError(
            f"recipe_for chooses the stage; for stage {options['stage']} write"
            f" Recipe.zero({options['stage']}, ...)."
        )
    job = Job.of({"precision": None, "checkpointing": "none", **options}, "onefold.plan.recipe_for")
    where = with_index(device) if device is not None else default_device()
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    local = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", device_count() or ranks)))
    free = free_memory(where) if where.type != "cpu" else free_host_memory() // local
    free, beside = _least(free, job, ranks)
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
    return recipe.replace(remarks=(_planned(found.recommended, ranks),))


def _planned(best: Candidate, ranks: int) -> str:
    """Return the note of a planned recipe."""
    accumulated = f" x {best.accumulation} accumulated" if best.accumulation > 1 else ""
    peak = f"{readable(best.needed)} of {readable(best.usable)}"
    others = [f"{readable(n)} {tier.where}" for tier, n in best.account.by_tier.items() if n]
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
    tp: int | str = 1,
    pp: int | str = 1,
    cp: int | str = 1,
    ep: int | str = 1,
    stage: int | None = None,
    batch: Callable[[int], Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    largest: bool = True,
    convention: Convention | None = None,
    **job: Any,
) -> Plan:
    """Plan what every stage of a job would hold, send and take on a machine, and recommend one.
    `print` the plan, or `shard(model, plan.recipe)`.

        onefold.plan("llama-3-70b", gpus=64, gpu="h100-80", seq=4096)
        onefold.plan("llama-3-405b", gpus=512, tp=8, pp="auto", seq=8192, global_batch=512)
        onefold.plan(model, micro_batch=4, seq=1024, precision="bf16")     # on this machine

    Args:
        model: a module (also on the meta device), an architecture's name, a Hugging Face folder or
            config.json, `package.module:factory`, or a number of parameters.
        machine: the machine to plan for; else `gpus` GPUs of a kind, in nodes of `per_node` joined
            by `link`; else one rank of this machine.
        tp: how many ranks divide each layer; "auto": the plan searches for the best meshes.
        pp: how many stages the blocks are cut into. Data-parallel ranks are what tp, pp and cp
            leave of the GPUs.
        cp: how many ranks divide each sample.
        ep: how many data-parallel ranks divide the experts.
        stage: the only stage to recommend; None: the lowest that fits.
        batch: makes the batch of a given number of samples, for modules that are no language model
            of `input_ids` and `labels`.
        loss: makes the scalar loss of such a module's output.
        largest: also find the largest micro-batch for each stage.
        convention: bytes per parameter by which states are counted papers' way; None: the job's.
        job: the fields of `plan.degrees.Degrees` beside (chunks, schedule, sequence_parallel,
            expert_tp); those of `plan.job.Job`: seq, micro_batch, global_batch, precision,
            accumulate_dtype, checkpointing, optimizer, lora_rank, offload; and arguments of
            `Recipe.zero` (reduce_at, units, offload_optimizer, nvme, shard_group,
            gather_codec, ...), which the plan and its recipe follow. On this machine states go to a
            disk only if `nvme` names folders on it.

    Raises:
        ValueError: an impossible name, option or figure; the message says what to change.
    """
    if stage is not None and stage not in (0, 1, 2, 3):
        raise ValueError(
            f"stage={stage!r}: expected 0, 1, 2 or 3, or None for the lowest that fits."
        )
    mesh = {name: job.pop(name) for name in MESH if name in job}
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
        machine = machine_here(1, 1, free, default_device().type, Beside.here(asked.folders))
    axes = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
    others = {name: mesh[name] for name in mesh if mesh[name] != MESH[name]}
    return _plan(
        model,
        machine,
        asked,
        stages=() if stage is None else (stage,),
        batch=batch,
        loss=loss,
        largest=largest,
        axes=axes if others or any(n != 1 for n in axes.values()) else None,
        convention=convention,
        **mesh,
    )
