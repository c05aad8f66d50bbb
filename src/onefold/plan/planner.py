"""`onefold.plan`: will it fit, how fast will it go, which stage is needed.

    model    a module, a folder or config.json, `module:factory`, a public architecture's name, or a number of parameters
    machine  `machine(gpus, per_node, gpu, link)`, or this one as `onefold doctor --calibrate` measured it
    job      sequence, micro-batch, global batch, precision, checkpointing, optimizer, LoRA, offload
             └──► Plan: every stage side by side, the recommendation, what the next steps would buy
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.plan.activity import Activity, assumed_dims, blocks_of, frozen_active
from onefold.plan.architectures import architecture, known
from onefold.plan.choose import Activities, Question, cannot_fit, ladder, largest_micro_batch, largest_model, recommend
from onefold.plan.evaluate import Candidate
from onefold.plan.from_module import model_shape, module_of
from onefold.plan.hardware import Machine
from onefold.plan.job import Job, Scheme
from onefold.plan.recompute import repeated_blocks
from onefold.plan.shapes import ModelShape, Parameter, UnitShape
from onefold.plan.states import MOMENTS_OF
from onefold.plan.times import Software
from onefold.plan.trace import trace, trace_at
from onefold.recipe import COMPUTE_DTYPES, Recipe

#: The note of a plan with adapters.
_LORA = "LoRA: activations are those of training everything, which adapters need less than"


@dataclass(frozen=True)
class Plan:
    """The answers, per rank.

    Attributes:
        stages: one candidate a stage, 0 to 3, as the job is asked (or at the recommendation's checkpointing and micro-batch).
        recommended: what to run, None if nothing fits; `why_not` says what is nearest then.
        next_steps: what the steps of the ladder behind the recommendation would buy.
        largest_micro_batch: samples that fit, by stage; 0 where none does.
        largest_model: parameters of the deepest model of this width that fits, by stage.
        notes: sentences about what had to be assumed; the first states the bytes per parameter.
    """

    model: ModelShape
    machine: Machine
    job: Job
    stages: tuple[Candidate, ...]
    recommended: Candidate | None
    next_steps: tuple[Candidate, ...]
    largest_micro_batch: Mapping[int, int]
    largest_model: Mapping[int, int]
    source: str
    why_not: str
    notes: tuple[str, ...]

    @property
    def recipe(self) -> Recipe:
        """The recommendation as `onefold.shard` takes it.

        Raises:
            ValueError: nothing fits.
            NotImplementedError: only a scheme that offloads fits, which the runtime cannot execute yet.
        """
        if self.recommended is None:
            raise ValueError(self.why_not)
        if not self.recommended.scheme.runs:
            raise NotImplementedError(f"the plan is {self.recommended.scheme}; the runtime keeps all states on the device so far.")
        return self.recommended.scheme.recipe(self.job)

    def to_json(self) -> dict[str, Any]:
        """Plain data: what `onefold plan --json` prints."""
        return {
            "schema": 1,
            "model": {
                "name": self.model.name,
                "parameters": self.model.numel,
                "active": self.model.active_numel,
                "trainable": self.model.trainable,
            },
            "machine": {
                "gpu": self.machine.gpu.name,
                "ranks": self.machine.ranks,
                "per_node": self.machine.per_node,
                "bytes": self.machine.capacity,
            },
            "job": dict(vars(self.job)),
            "activations": self.source,
            "stages": [_candidate_json(c) for c in self.stages],
            "recommended": _candidate_json(self.recommended) if self.recommended else None,
            "next_steps": [_candidate_json(c) for c in self.next_steps],
            "largest_micro_batch": dict(self.largest_micro_batch),
            "largest_model": dict(self.largest_model),
            "why_not": self.why_not,
            "notes": list(self.notes),
        }


def _candidate_json(c: Candidate) -> dict[str, Any]:
    return {
        "stage": c.scheme.stage,
        "checkpointing": c.scheme.checkpointing,
        "offload": c.scheme.offload,
        "micro_batch": c.scheme.micro_batch,
        "accumulation": c.accumulation,
        "fits": c.fits,
        "usable": c.usable,
        "account": c.account.to_json(),
    }


def plan(
    model: nn.Module | ModelShape | str | Path | float,
    machine: Machine,
    job: Job | None = None,
    *,
    stages: tuple[int, ...] = (),
    batch: Callable[[int], Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    software: Software | None = None,
    largest: bool = True,
) -> Plan:
    """Account for every stage of a job on a machine and recommend one.

    Args:
        model: see this module's table. A module (or its code) is traced on fake tensors; a name or a size is taken by formulas.
        machine: from `onefold.plan.hardware.machine`, or `hardware.calibrated` for this one.
        stages: those that may be recommended; () for all.
        batch: the batch of a given number of samples, for modules that are no language model of `input_ids` and `labels`.
        loss: the scalar of the module's output.
        largest: also find the largest micro-batch and model for every stage.

    Raises:
        ValueError: a name that is not known, a batch that does not divide, a module that cannot be traced.
    """
    job = job or Job()
    subject = _subject(model, job, batch, loss, machine)
    if not subject.repeats and not job.checkpointing:
        job = replace(job, checkpointing="none")  # there are no blocks to recompute
    shape, activities = subject.shape, subject.activities
    question = Question(shape, activities, machine, job, software)
    best = recommend(question, stages)
    like = best.scheme if best is not None else next(iter(ladder(job, machine.ranks, stages)))
    shown = tuple(question.answer(_column(s, like, job)) for s in (0, 1, 2, 3))
    micro, models = {}, {}
    for candidate in shown if largest else ():
        scheme = candidate.scheme
        found = largest_micro_batch(question, scheme)
        micro[scheme.stage] = found.scheme.micro_batch if found else 0
        models[scheme.stage] = largest_model(question, scheme, lambda m: _by_formula(m, job))
    further = tuple(_next_steps(question, best, stages)) if best is not None else ()
    return Plan(
        model=shape,
        machine=machine,
        job=job,
        stages=shown,
        recommended=best,
        next_steps=further,
        largest_micro_batch=micro,
        largest_model=models,
        source=subject.source,
        why_not="" if best is not None else cannot_fit(question, stages),
        notes=(_convention(job), *subject.notes, *(shown[0].notes)),
    )


def _column(stage: int, like: Scheme, job: Job) -> Scheme:
    """The scheme of one stage side by side with the others: offloaded only if that was asked for and the stage can be."""
    try:
        return Scheme(stage, like.checkpointing, job.offload or "none", like.micro_batch)
    except ValueError:
        return Scheme(stage, like.checkpointing, "none", like.micro_batch)


def _next_steps(question: Question, best: Candidate, stages: tuple[int, ...]) -> list[Candidate]:
    """The steps of the ladder behind the recommendation, at its micro-batch, each of which saves more than those before it."""
    out: list[Candidate] = []
    micro = best.scheme.micro_batch
    order = [scheme.with_(micro_batch=micro) for scheme in ladder(question.job, question.machine.ranks, stages)]
    for later in order[order.index(best.scheme) + 1 :]:
        found = question.answer(later)
        if found.account.peak_bytes < min([best.account.peak_bytes, *(c.account.peak_bytes for c in out)]):
            out.append(found)
    return out


# -- what is asked about -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Subject:
    shape: ModelShape
    activities: Activities
    source: str
    notes: tuple[str, ...] = ()
    repeats: bool = True


def _subject(model: Any, job: Job, batch: Callable[[int], Any] | None, loss: Any, machine: Machine) -> _Subject:
    if isinstance(model, bool) or (isinstance(model, (int, float)) and not 1 <= model < math.inf):
        raise ValueError(f"a model of {model!r} parameters: expected a positive number, such as 7.5e9.")
    if isinstance(model, (int, float)):
        model = ModelShape.of_size(int(model), f"{model:,.0f} parameters")
    if isinstance(model, (str, Path)):
        model = architecture(str(model)) if known(str(model)) else _module(model)
        if hasattr(getattr(model, "config", None), "use_cache"):
            model.config.use_cache = False  # ours alone: training keeps no cache of keys and values
    if isinstance(model, nn.Module):
        return _traced(model, job, batch, loss, machine)
    if not isinstance(model, ModelShape):
        raise ValueError(f"a plan was asked for {type(model).__name__}: expected a module, a name, a folder or a number of parameters.")
    shape = with_lora(model, job.lora_rank) if job.lora_rank else model
    note = () if model.transformer else ("activations assume a decoder with heads of 128 and a vocabulary of 50,304",)
    return _Subject(shape, _by_formula(shape, job), "from dimensions", note)


def _module(source: str | Path) -> nn.Module:
    try:
        return module_of(source)
    except ValueError as error:
        if ":" in str(source) or "/" in str(source) or Path(source).exists():
            raise
        try:
            architecture(str(source))
        except ValueError as names:
            raise ValueError(f"{names} Or give a folder with a config.json, package.module:factory, or --params.") from error
        raise


def _by_formula(shape: ModelShape, job: Job) -> Activities:
    dims = shape.transformer or assumed_dims(shape, job.seq)
    element = COMPUTE_DTYPES[job.precision].itemsize

    @lru_cache(maxsize=256)
    def activities(micro_batch: int, checkpointing: str) -> Activity:
        return Activity.from_dims(shape, dims, micro_batch, job.seq, element, checkpointing)

    return activities


def _traced(module: nn.Module, job: Job, batch: Callable[[int], Any] | None, loss: Any, machine: Machine) -> _Subject:
    shape = model_shape(module, seq=job.seq)
    shape = with_lora(shape, job.lora_rank) if job.lora_rank else shape
    make = batch or _tokens(module, job.seq)
    device = "cpu" if machine.gpu.name == "here" and getattr(machine.measured, "device", "cpu") == "cpu" else "cuda"
    options: dict[str, Any] = {"precision": job.precision, "device": device, "loss": loss}
    memo: dict[Any, Any] = {}

    @lru_cache(maxsize=256)
    def activities(micro_batch: int, checkpointing: str) -> Activity:
        how: Any = checkpointing
        if micro_batch < 4:
            return Activity.from_trace(trace(module, make(micro_batch), checkpointing=how, **options))
        return Activity.from_trace(trace_at(module, make, [micro_batch], memo=memo, checkpointing=how, **options)[micro_batch])

    if job.lora_rank:
        return _Subject(shape, _frozen(activities, shape, job.seq), "traced from the module", (_LORA,))
    return _Subject(shape, activities, "traced from the module", repeats=bool(repeated_blocks(module)))


def _frozen(activities: Activities, shape: ModelShape, seq: int) -> Activities:
    """The activities less the FLOPs of gradients that frozen parameters do not have."""

    def fewer(micro_batch: int, checkpointing: str) -> Activity:
        found = activities(micro_batch, checkpointing)
        return replace(found, flops=found.flops - 2 * frozen_active(shape) * micro_batch * seq)

    return fewer


def _tokens(module: nn.Module, seq: int) -> Callable[[int], Any]:
    taken = inspect.signature(module.forward).parameters
    if "input_ids" not in taken:
        raise ValueError(
            f"{type(module).__name__}.forward takes no input_ids, so it is no language model: give plan() a batch=function from a number "
            "of samples to a batch."
        )
    names = [name for name in ("input_ids", "labels") if name in taken]

    def make(samples: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros((samples, seq), dtype=torch.long, device="meta")
        return dict.fromkeys(names, ids)

    return make


def with_lora(model: ModelShape, rank: int) -> ModelShape:
    """The model frozen, with adapters of `rank` on every matrix of its blocks: A of rank × in, B of out × rank (Hu et al. 2022, 4.1)."""
    blocks = {u.name for u in blocks_of(model)}
    units = []
    for unit in model.units:
        frozen = [replace(p, trainable=False) for p in unit.parameters]
        adapters: list[Parameter] = []
        for p in unit.parameters if unit.name in blocks else ():
            if len(p.shape) == 2:
                rows, columns = p.shape
                adapters += [Parameter(f"{p.name}.lora_A", (rank, columns)), Parameter(f"{p.name}.lora_B", (rows, rank))]
        units.append(UnitShape(unit.name, (*frozen, *adapters), unit.looks_up_only))
    added = sum(u.numel for u in units) - model.numel
    if not added:
        raise ValueError(f"{model.name} has no blocks with matrices to put adapters on: LoRA needs a model with its real shapes.")
    name = f"{model.name}, LoRA of rank {rank}"
    return replace(model, name=name, units=tuple(units), active_numel=model.active_numel + added)


def _convention(job: Job) -> str:
    compute, sums = COMPUTE_DTYPES[job.precision].itemsize, COMPUTE_DTYPES[job.accumulate].itemsize
    masters, states = 0 if compute == 4 else 4, 4 * MOMENTS_OF[job.optimizer]
    return (
        f"bytes per trained parameter: {compute} parameters + {sums} gradients ({job.accumulate}) + {masters} master weights + {states} "
        f"{job.optimizer} states = {compute + sums + masters + states}; gradients are gone between steps"
    )
