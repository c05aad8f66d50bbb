"""A plan: does the job fit, how fast is it, which stage is needed; for a machine of the table
(`onefold.plan(...)`) or for the one that this process runs on (`onefold.plan.recipe_for`, `onefold
train --stage auto`).

model    a module, a folder or config.json, `module:factory`, a public architecture's name, a number of parameters
machine  `machine(gpus, per_node, gpu, link)`, or this one as `onefold doctor --calibrate` measured it
job      sequence, micro-batch, global batch, precision, checkpointing, optimizer, LoRA, offload
axes     tensor, pipeline, context and expert parallelism
         └──► Plan: every stage side by side (or the best meshes), the recommendation, what the next steps would buy
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onefold.comm.communicators import ranks_of_a_node
from onefold.device import default_device, device_count, free_memory, with_index
from onefold.machine.calibration import Calibration
from onefold.memory import free_host_memory
from onefold.plan import hardware, search
from onefold.plan.account import Candidate, assumptions_of, in_a_line, notes_of
from onefold.plan.hardware import Gpu, Machine
from onefold.plan.job import SOMEWHERE, Job
from onefold.plan.shapes import ModelShape
from onefold.plan.subject import question_of
from onefold.recipe import Recipe
from onefold.recipe.optimizers import PLANNED, WHOLE

#: Fields of `Degrees` as a plan of data ranks alone has them.
MESH = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "chunks": 1, "sequence_parallel": True}
#: The share of free memory that training may take. The rest is for buffers of libraries and for
#: later processes.
USABLE = 0.9
#: Options of a job that a plan of a mesh does not count.
_NOT_COUNTED = (
    "offload_optimizer", "offload_gradients", "offload_param", "offload_activations", "nvme", "step_in_backward", "units",
    "gather_codec", "reduce_codec", "frozen", "second_copy", "shard_group", "optimizer_over",
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Plan:
    """The answers, per rank. `print` shows them as `onefold plan` does.

    Attributes:
        stages: one candidate for each stage that the job's options allow, as the job is asked (or
            with the recommendation's checkpointing and micro-batch); of a search the best meshes.
        recommended: what to run; None if nothing fits. `why_not` then says what is nearest.
        next_steps: what further steps would buy, each slower than those before.
        largest_micro_batch: samples that fit, by stage; 0: none.
        activations: where they come from.
        notes: sentences that may change a decision. assumptions: what the figures rest on; the first
            states the bytes per parameter.
        slow_links: every way to send between nodes; () if their links are not slow.
        asked: the stages that may be recommended; (): all.
        searched: how many meshes were looked at; 0: none was searched for.
    """

    model: ModelShape
    machine: Machine
    job: Job
    stages: tuple[Candidate, ...]
    recommended: Candidate | None
    next_steps: tuple[Candidate, ...] = ()
    largest_micro_batch: Mapping[int, int] = field(default_factory=dict)
    activations: str = ""
    why_not: str = ""
    notes: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    slow_links: tuple[Candidate, ...] = ()
    asked: tuple[int, ...] = ()
    searched: int = 0

    @property
    def shown(self) -> Candidate:
        """The candidate that is shown in detail: the recommendation, or if nothing fits the last of
        the asked stages. Raises ValueError: no mesh of a search is near enough to be accounted for.
        """
        found = self.recommended or _last_asked(self.stages, self.asked)
        if found is None:
            raise ValueError(self.why_not)
        return found

    @property
    def recipe(self) -> Recipe:
        """The recommended recipe, for `onefold.shard`. Raises ValueError: nothing fits, or states
        go to NVMe and no folder there is known.
        """
        if self.recommended is None:
            raise ValueError(self.why_not)
        recipe = self.recommended.scheme.recipe(self.job)
        if not recipe.on_disk or SOMEWHERE not in recipe.nvme:
            return recipe
        if not self.machine.disk:
            raise ValueError(
                f"the plan is {self.recommended.scheme}, and no folder for it is known: give"
                f" nvme='/path/on/the/disk'."
            )
        return recipe.replace(nvme=(self.machine.disk,))

    def __repr__(self) -> str:
        scheme = self.recommended.scheme if self.recommended else None
        best = f"{scheme}, micro-batch {scheme.micro_batch}" if scheme else "nothing fits"
        return f"Plan({self.model.name} on {self.machine.ranks} × {self.machine.gpu.name}: {best})"

    def __str__(self) -> str:
        try:
            from rich.console import Console

            from onefold.plan.tables import show
        except ModuleNotFoundError:  # rich comes with the commands, the core does without it
            return json.dumps(self.to_json(), indent=2)
        text = io.StringIO()
        show(self, Console(file=text, width=140, highlight=False, soft_wrap=True))
        return text.getvalue().rstrip()

    def to_json(self) -> dict[str, Any]:
        """Return plain data, as `onefold plan --json` prints it. `recipe` has the arguments of
        `Recipe.zero`, with torch's names of dtypes.
        """
        model, machine = self.model, self.machine
        own = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        own |= {
            "model": {
                "name": model.name,
                "parameters": model.numel,
                "active": model.active_numel,
                "trainable": model.trainable,
            },
            "machine": {
                "gpu": machine.gpu.name,
                "ranks": machine.ranks,
                "per_node": machine.local,
                "bytes": machine.capacity,
            },
            "job": {**vars(self.job), "options": _plain(dict(self.job.options))},
        }
        return {"schema": 2, **own, "recipe": self._recipe_json()}

    def _recipe_json(self) -> dict[str, Any] | None:
        if self.recommended is None:
            return None
        recipe, job = self.recommended.scheme.recipe(self.job), self.job
        own = {"precision": job.precision, "accumulate_dtype": job.accumulate_dtype}
        given = {"stage": recipe.stage, **own, **recipe.given}
        if SOMEWHERE in given.get("nvme", ()):
            del given["nvme"]
            given |= {"nvme": [self.machine.disk]} if self.machine.disk else {}
        plain: dict[str, Any] = _plain(given)
        return plain


def _plain(value: Any) -> Any:
    """Return plain data: dtypes and classes by name."""
    if isinstance(value, Candidate):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, type):
        return value.__name__
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def planned(
    model: nn.Module | ModelShape | str | Path | float,
    machine: Machine,
    job: Job | None = None,
    *,
    stages: tuple[int, ...] = (),
    batch: Callable[[int], Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    largest: bool = True,
    axes: Mapping[str, int | str] | None = None,
) -> Plan:
    """Account for every stage of a job on a machine and recommend one.

    Args:
        model, batch, loss, largest: as for `plan`.
        machine: from `onefold.plan.hardware.machine`, or `hardware.calibrated` for this one.
        stages: those that may be recommended; (): all.
        axes: fields of `Degrees`; tp, pp, cp and ep may be "auto": the plan searches. None: data
            ranks alone.

    Raises:
        ValueError: an unknown name, a batch that does not divide, a module that cannot be traced, a
            mesh that is not possible, with what to choose instead.
    """
    if axes is not None:
        _refuse(job or Job(), machine)
    question = question_of(model, machine, job or Job(), batch, loss)
    more: dict[str, Any] = {}
    why = tuple[str, ...]()
    if axes is not None:
        rows, more["searched"] = search.meshes_of(question, axes, stages)
        best = min((c for c in rows if c.fits), key=search.in_order, default=None)
        why_not = "" if best else search.no_mesh_fits(question, rows, more["searched"])
    else:
        best = search.recommend(question, stages)
        rows = search.side_by_side(question, best, stages)
        why_not = "" if best else search.cannot_fit(question, stages)
        if best is not None:
            best, more["slow_links"], why = search.slow_links(question, best, stages)
            more["next_steps"] = tuple(search.next_steps(question, best, stages))
        sizes = more["largest_micro_batch"] = dict[int, int]()
        for c in rows if largest else ():
            fitting = search.largest_micro_batch(question, c.scheme)
            sizes[c.scheme.stage] = fitting.scheme.micro_batch if fitting else 0
    shown, said = best or _last_asked(rows, stages), list(question.notes)
    if shown is not None:
        said = [*assumptions_of(question, shown), *shown.notes, *said]
        more["notes"] = (*why, *notes_of(question, shown)) if axes is None else ()
    return Plan(
        question.model, machine, question.job, tuple(rows), best,
        activations=question.source, why_not=why_not, assumptions=tuple(said), asked=stages, **more,
    )  # fmt: skip


def _last_asked(candidates: Sequence[Candidate], stages: tuple[int, ...]) -> Candidate | None:
    """Return the last candidate at one of `stages`; without any, the last of all."""
    asked = [c for c in candidates if c.scheme.stage in stages] or candidates
    return asked[-1] if asked else None


# -- meshes ----------------------------------------------------------------------------------------


def _refuse(job: Job, machine: Machine) -> None:
    if machine.is_here and machine.is_timed:
        raise ValueError(
            "--here measured moves among all ranks, none along an axis: give --gpus and --gpu instead."
        )
    if not job.micro_batch:
        raise ValueError(
            "--micro-batch auto: a plan of a mesh takes a number of samples, since more of them at once"
            " change the pipeline's bubble; give --micro-batch 1, 2 or 4 and compare."
        )
    given = [n for n in _NOT_COUNTED if dict(job.options).get(n) not in (None, False)]
    given += ["lora"] if job.lora_rank else []
    given += [f"optimizer {job.optimizer}"] if PLANNED[job.optimizer].update == WHOLE else []
    if given:
        flags = ", ".join(f"--{n.replace('_', '-')}" for n in given)
        raise ValueError(
            f"{flags}: a plan of a mesh (--tp, --pp, --cp, --ep) does not count it; leave one of the"
            " two out."
        )


# -- on this machine, and for users ----------------------------------------------------------------


def room_beside(folders: Sequence[str]) -> tuple[float, float]:
    """Return this node's free bytes beside its devices: of the host's memory, and of the disks that may
    be used, with state divided among `folders`: each takes the same, and folders on one disk share its
    free bytes. Raises ValueError for a folder that does not exist.
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
    return free_host_memory(), min(each, default=0.0) * len(folders)


def machine_here(
    ranks: int,
    local: int,
    free: int,
    device: str,
    beside: tuple[float, float],
    measured: bool = True,
) -> Machine:
    """Return this machine with `ranks` ranks, `local` of them on this node, of whose `free` bytes
    training may take USABLE. `beside`: see `room_beside`.

    `onefold doctor --calibrate` measures its speeds. Without them, or if they shall not be asked for, a
    plan has bytes and no seconds.
    """
    known, shared = hardware.builtin(), device == "cpu"
    found = None
    with suppress(ValueError):
        found = hardware.calibrated(Calibration.load()) if measured else None
    if found is None or (found.ranks, found.ranks, found.shared) != (ranks, local, shared):
        between = known.link("100g") if ranks > local else None
        gpu = Gpu(
            name="here", title="this machine", capacity=free, memory_bandwidth=1e10, fp32=1e12
        )
        host = known.host
        found = Machine(
            gpu, ranks, local, between, host, shared=shared, is_timed=False, is_here=True
        )
    host = found.host.model_copy(update={"memory": beside[0], "nvme": beside[1]})
    gpu = found.gpu.model_copy(update={"capacity": int(free * USABLE)})
    return replace(found, gpu=gpu, host=host)


def _here(job: Job, ranks: int, device: torch.device | str | None = None) -> Machine:
    """Return the machine whose `ranks` this process is one of, with the free bytes of the rank that has
    least, on its device and beside it. Collective among several; raises ValueError on every rank if a
    folder of any rank does not exist.
    """
    where = with_index(device) if device is not None else default_device()
    local = min(ranks, ranks_of_a_node() or device_count() or ranks)
    free = free_memory(where) if where.type != "cpu" else free_host_memory() // local
    found: Any
    try:
        found = free, local, *(nbytes / local for nbytes in room_beside(job.folders))
    except ValueError as error:
        found = str(error)
    every = [found] * ranks
    if ranks > 1:
        dist.all_gather_object(every, found)
    for said in every:
        if isinstance(said, str):
            raise ValueError(said)
    free, local, host, disk = map(min, zip(*every, strict=True))
    if ranks % local or any(one[1] != local for one in every):
        local = 1  # the engine does not divide at the borders of unequal nodes
    return machine_here(ranks, local, free, where.type, (host * local, disk * local))


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
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    machine = _here(job, ranks, device)
    found = planned(model, machine, job, largest=False, batch=batch, loss=loss)
    return found.recipe.replace(remarks=(f"planned: {in_a_line(found.shown)}.",))


def plan(
    model: nn.Module | ModelShape | str | Path | float,
    machine: Machine | None = None,
    *,
    gpus: int | None = None,
    per_node: int | None = None,
    gpu: str | None = None,
    link: str | None = None,
    tp: int | str = 1,
    pp: int | str = 1,
    cp: int | str = 1,
    ep: int | str = 1,
    stage: int | None = None,
    batch: Callable[[int], Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    largest: bool = True,
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
        machine: the machine to plan for; else `gpus` GPUs of a kind (h100-80), in nodes of `per_node`
            (8) joined by `link` (8x200g); else one rank of this machine.
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
        job: the fields of `plan.degrees.Degrees` beside (chunks, sequence_parallel); those
            of `plan.job.Job`: seq, micro_batch, global_batch, precision, accumulate_dtype,
            checkpointing, optimizer, lora_rank, offload; and arguments of `Recipe.zero` (reduce_at,
            units, offload_optimizer, nvme, shard_group, gather_codec, ...), which the plan and its
            recipe follow. On this machine states go to a disk only if `nvme` names folders on it.

    Raises:
        ValueError: an impossible name, option or figure; the message says what to change.
    """
    axes = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
    axes |= {name: job.pop(name) for name in MESH if name in job}
    asked = Job.of(job, "onefold.plan")
    named: dict[str, Any] = {"gpus": gpus, "per_node": per_node, "gpu": gpu, "link": link}
    named = {name: value for name, value in named.items() if value is not None}
    if named and (gpus is None or machine is not None):
        raise ValueError(
            f"{', '.join(named)}: a machine of the table has a number of gpus, and no machine= beside"
            " it; give gpus= and leave machine= out."
        )
    if named:
        machine = hardware.machine(**{"gpu": "h100-80", **named})
    if machine is None:
        machine = _here(asked, 1)
    return planned(
        model,
        machine,
        asked,
        stages=() if stage is None else (stage,),
        batch=batch,
        loss=loss,
        largest=largest,
        axes=axes if axes.items() - MESH.items() else None,
    )
