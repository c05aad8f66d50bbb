"""A plan: does the job fit, how fast is it, which stage is needed.

model    a module, a folder or config.json, `module:factory`, a public architecture's name, a number of parameters
machine  `machine(gpus, per_node, gpu, link)`, or this one as `onefold doctor --calibrate` measured it
job      sequence, micro-batch, global batch, precision, checkpointing, optimizer, LoRA, offload
axes     tensor, pipeline, context and expert parallelism
         └──► Plan: every stage side by side (or the best meshes), the recommendation, what the next steps would buy
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.plan import search
from onefold.plan.account import Candidate, Question, on_nccl
from onefold.plan.hardware import Machine
from onefold.plan.job import SOMEWHERE, Convention, Job
from onefold.plan.notes import assumptions_of, notes_of
from onefold.plan.search import SlowLinks
from onefold.plan.shapes import ModelShape
from onefold.plan.subject import subject_of
from onefold.recipe import Recipe
from onefold.recipe.optimizers import PLANNED, WHOLE

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
        slow_links: every way to send less between nodes; None if their links are not slow.
        native: the recommendation with gradients added up by NCCL, or in rank order if it has that;
            None if there is no choice.
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
    slow_links: SlowLinks | None = None
    native: Candidate | None = None
    asked: tuple[int, ...] = ()
    searched: int = 0

    @property
    def shown(self) -> Candidate:
        """The candidate that is shown in detail: the recommendation, or if nothing fits the last of
        the asked stages.
        """
        return self.recommended or _last_asked(self.stages, self.asked)

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
                "per_node": machine.per_node,
                "bytes": machine.capacity,
            },
            "job": {**vars(self.job), "options": _plain(dict(self.job.options))},
        }
        return {"schema": 2, **own, "recipe": self._recipe_json()}

    def _recipe_json(self) -> dict[str, Any] | None:
        if self.recommended is None:
            return None
        scheme, options = self.recommended.scheme, dict(self.job.options)
        if scheme.stage < 2:
            options.pop("reduce_at", None)  # these stages always reduce at the boundary
        options.pop("nvme", None)
        options |= scheme.asked
        with suppress(ValueError):  # the planned machine has folders that are not known here
            if self.recipe.on_disk:
                options["nvme"] = self.recipe.nvme
        asked = {
            "stage": scheme.stage,
            "precision": self.job.precision,
            "accumulate_dtype": self.job.accumulate_dtype,
            **options,
        }
        return {name: _plain(value) for name, value in asked.items()}


def _plain(value: Any) -> Any:
    """Return plain data: dtypes and classes by name."""
    if isinstance(value, (Candidate, SlowLinks)):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, type):
        return value.__name__
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def plan(
    model: nn.Module | ModelShape | str | Path | float,
    machine: Machine,
    job: Job | None = None,
    *,
    stages: tuple[int, ...] = (),
    batch: Callable[[int], Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    largest: bool = True,
    axes: Mapping[str, int | str] | None = None,
    convention: Convention | None = None,
    **options: Any,
) -> Plan:
    """Account for every stage of a job on a machine and recommend one.

    Args:
        model, batch, loss, largest: as for `onefold.plan.api.plan`.
        machine: from `onefold.plan.hardware.machine`, or `hardware.calibrated` for this one.
        stages: those that may be recommended; (): all.
        axes: tp, pp, cp and ep, each a number or "auto": the plan searches. None: data ranks alone.
        convention: bytes per parameter of the papers' count of states; None: the job's.
        options: further fields of `Degrees`: chunks, schedule, sequence_parallel, expert_tp.

    Raises:
        ValueError: an unknown name, a batch that does not divide, a module that cannot be traced, a
            mesh that is not possible, with what to choose instead.
    """
    if axes is not None:
        _refuse(job or Job(), machine)
    subject = subject_of(model, job or Job(), batch, loss, machine)
    job, shape = subject.job, subject.shape
    if not subject.repeats and not job.checkpointing:
        job = replace(job, checkpointing="none")  # there is no block to recompute
    question = Question(shape, subject.activities, machine, job, convention)
    if axes is not None:
        rows, searched = search.meshes_of(question, axes, options, stages)
        best = min((c for c in rows if c.fits), key=search.in_order, default=None)
        shown = best or (rows[-1] if rows else None)
        return Plan(
            model=shape,
            machine=machine,
            job=job,
            stages=tuple(rows),
            recommended=best,
            activations=subject.source,
            why_not="" if best else search.no_mesh_fits(question, rows, searched),
            assumptions=(*_assumptions(question, shown), *subject.notes)
            if shown
            else subject.notes,
            asked=stages,
            searched=searched,
        )
    best = search.recommend(question, stages)
    rows = search.side_by_side(question, best, stages)
    slow = search.slow_links(question, best, stages) if best is not None else None
    best = slow.taken if slow is not None else best
    micro_batches = dict[int, int]()
    for c in rows if largest else ():
        fitting = search.largest_micro_batch(question, c.scheme)
        micro_batches[c.scheme.stage] = fitting.scheme.micro_batch if fitting else 0
    shown = best or _last_asked(rows, stages)
    return Plan(
        model=shape,
        machine=machine,
        job=job,
        stages=tuple(rows),
        recommended=best,
        next_steps=tuple(search.next_steps(question, best, stages)) if best is not None else (),
        largest_micro_batch=micro_batches,
        activations=subject.source,
        why_not="" if best is not None else search.cannot_fit(question, stages),
        notes=tuple(notes_of(question, shown)),
        assumptions=(*_assumptions(question, shown), *subject.notes),
        slow_links=slow,
        native=_otherwise_added(question, best) if best is not None else None,
        asked=stages,
    )


def _assumptions(question: Question, shown: Candidate) -> tuple[str, ...]:
    return (*assumptions_of(question, shown), *shown.notes)


def _otherwise_added(question: Question, best: Candidate) -> Candidate | None:
    """Return the recommendation with gradients added up the other way, by NCCL or in rank order. None
    if there is no choice (one rank, gloo, encoded gradients), or if the machine's speeds are unknown.
    """
    machine, job, recipe = question.machine, question.job, best.scheme.recipe(question.job)
    # Calibrations measure ordered sums only
    if (
        machine.ranks == 1
        or machine.is_here
        or not on_nccl(machine)
        or recipe.gradients.codec is not None
    ):
        return None
    other = "native" if recipe.reduce != "native" else "ordered"
    options = tuple((k, v) for k, v in job.options if k != "reduce")
    otherwise = replace(job, options=(*options, ("reduce", other)))
    return replace(question, job=otherwise).answer(best.scheme)


def _last_asked(candidates: Sequence[Candidate], stages: tuple[int, ...]) -> Candidate:
    """Return the last candidate at one of `stages`; without any, the last of all."""
    return ([c for c in candidates if c.scheme.stage in stages] or candidates)[-1]


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
    given += ["offload"] if job.offload not in ("", "none") else []
    given += ["lora"] if job.lora_rank else []
    given += [f"optimizer {job.optimizer}"] if PLANNED[job.optimizer].update == WHOLE else []
    if given:
        flags = ", ".join(f"--{n.replace('_', '-')}" for n in given)
        raise ValueError(
            f"{flags}: a plan of a mesh (--tp, --pp, --cp, --ep) does not count it; leave one of the"
            " two out."
        )
