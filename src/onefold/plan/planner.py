"""A plan: does the job fit, how fast is it, which stage is needed.

model    a module, a folder or config.json, `module:factory`, a public architecture's name, a number of parameters
machine  `machine(gpus, per_node, gpu, link)`, or this one as `onefold doctor --calibrate` measured it
job      sequence, micro-batch, global batch, precision, checkpointing, optimizer, LoRA, offload
         └──► Plan: every stage side by side, the recommendation, what the next steps would buy
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.plan.alternatives import SlowLinks, Sums, slow_links, sums_of
from onefold.plan.choose import (
    MOST_BLOCKS,
    MOST_SAMPLES,
    Question,
    can_be,
    cannot_fit,
    deeper,
    ladder,
    largest_micro_batch,
    largest_model,
    recommend,
    rungs,
)
from onefold.plan.evaluate import Candidate
from onefold.plan.hardware import Machine
from onefold.plan.job import COMMUNICATION, SOMEWHERE, Job, Scheme, as_recipe
from onefold.plan.owned import stepped_whole
from onefold.plan.shapes import ModelShape
from onefold.plan.states import MOMENTS_OF, topology_of, units_of
from onefold.plan.subject import subject_of
from onefold.recipe import COMPUTE_DTYPES, Recipe
from onefold.recipe.optimizers import PLANNED, WHOLE
from onefold.recipe.rows import FLAT
from onefold.runtime.units import offload_notes


@dataclass(frozen=True, repr=False)
class Plan:
    """The answers, per rank. `print` shows them as `onefold plan` does.

    Attributes:
        stages: one candidate for each stage that the job's options allow, as the job is asked (or
            with the recommendation's checkpointing and micro-batch).
        recommended: what to run; None if nothing fits. `why_not` then says what is nearest.
        next_steps: what the further steps of the ladder would buy.
        largest_micro_batch: samples that fit, by stage; 0: none.
        largest_model: parameters of the deepest model of this width that fits, by stage.
        source: where the activations come from.
        notes: sentences about assumptions; the first states the bytes per parameter.
        slow_links: every way to send less between nodes; None if their links are not slow.
        sums: the recommendation with gradients added up by Onefold and by NCCL; None if there is no
            choice.
        asked: the stages that may be recommended; (): all.
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
    slow_links: SlowLinks | None = None
    sums: Sums | None = None
    asked: tuple[int, ...] = ()

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
        measured = self.machine.measured
        disk = measured.disk if measured is not None else None
        if disk is None:
            raise ValueError(
                f"the plan is {self.recommended.scheme}, and no folder for it is known: give"
                f" nvme='/path/on/the/disk'."
            )
        return recipe.replace(nvme=(disk.folder,))

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
            "job": {**vars(self.job), "options": {k: _plain(v) for k, v in self.job.options}},
            "activations": self.source,
            "stages": [_candidate_json(c) for c in self.stages],
            "recommended": _candidate_json(self.recommended) if self.recommended else None,
            "recipe": self._recipe_json(),
            "slow_links": self.slow_links.to_json() if self.slow_links is not None else None,
            "sums": self.sums.to_json() if self.sums is not None else None,
            "next_steps": [_candidate_json(c) for c in self.next_steps],
            "largest_micro_batch": dict(self.largest_micro_batch),
            "largest_model": dict(self.largest_model),
            "why_not": self.why_not,
            "notes": list(self.notes),
        }

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
    """Return an option of a recipe as plain data: dtypes and classes by name."""
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, type):
        return value.__name__
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _candidate_json(c: Candidate) -> dict[str, Any]:
    return {
        **vars(c.scheme),
        "accumulation": c.accumulation,
        "fits": c.fits,
        "states": c.states,
        "usable": c.usable,
        "reserve": {**vars(c.reserve), "nbytes": c.reserve.nbytes},
        **({"owners": vars(c.balance)} if c.balance is not None else {}),
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
    largest: bool = True,
) -> Plan:
    """Account for every stage of a job on a machine and recommend one.

    Args:
        model, batch, loss, largest: as for `onefold.plan.api.plan`.
        machine: from `onefold.plan.hardware.machine`, or `hardware.calibrated` for this one.
        stages: those that may be recommended; (): all.

    Raises:
        ValueError: an unknown name, a batch that does not divide, a module that cannot be traced.
    """
    subject = subject_of(model, job or Job(), batch, loss, machine)
    job, shape = subject.job, subject.shape
    if not subject.repeats and not job.checkpointing:
        job = replace(job, checkpointing="none")  # there is no block to recompute
    question = Question(shape, subject.activities, machine, job)
    best = recommend(question, stages)
    like = best.scheme if best is not None else rungs(job, machine.ranks, stages)[0][0]
    shown = tuple(
        question.answer(_column(stage, like, job))
        for stage in (0, 1, 2, 3)
        if not (job.places or job.communication) or can_be(Scheme(stage), job)
    )
    slow = slow_links(question, best, stages) if best is not None else None
    best = slow.taken if slow is not None else best
    schemes = [c.scheme for c in shown if largest]
    fitting = {s.stage: largest_micro_batch(question, s) for s in schemes}
    micro = {stage: c.scheme.micro_batch if c else 0 for stage, c in fitting.items()}
    models = {s.stage: largest_model(question, s, subject.another) for s in schemes}
    chosen = {best.scheme.micro_batch} if best is not None and not job.micro_batch else set()
    notes = (
        *_of_job(job, machine),
        *_of_whole_matrices(job, shape, best or _last_asked(shown, stages)),
        *subject.notes,
        *_of_recipe(question, best or _last_asked(shown, stages)),
        *shown[0].notes,
        *_of_reserve(best or _last_asked(shown, stages)),
        *_ends(shape, {*micro.values(), *chosen}, models),
    )
    return Plan(
        model=shape,
        machine=machine,
        job=job,
        stages=shown,
        recommended=best,
        next_steps=tuple(_next_steps(question, best, stages)) if best is not None else (),
        largest_micro_batch=micro,
        largest_model=models,
        source=subject.source,
        why_not="" if best is not None else cannot_fit(question, stages),
        notes=notes,
        slow_links=slow,
        sums=sums_of(question, best) if best is not None else None,
        asked=stages,
    )


def _of_job(job: Job, machine: Machine) -> Iterator[str]:
    """Yield notes on the bytes per parameter, and on a precision without a rate."""
    sums, found, kept = job.recipe(3).gradients.dtype, job.convention, job.moment_bytes
    names = {dtype: name for name, dtype in COMPUTE_DTYPES.items()}
    yield (
        f"bytes per trained parameter: {found.parameters} parameters + {found.gradients} gradients"
        f" ({names.get(sums, _plain(sums))}) + {found.optimizer - kept:g} master weights + {kept:g}"
        f" {job.optimizer} states = {found.total:g}; gradients are gone between steps"
    )
    rates, gpu = machine.gpu.rates, machine.gpu
    if job.computes not in rates and not machine.is_here:
        other = job.computes == "bf16" and "fp16" in rates
        yield (
            f"{gpu.title or gpu.name} has no {job.computes}: seconds are at its fp32 rate"
            f"{'; --precision fp16 would run at its own rate' if other else ''}"
        )


def _of_whole_matrices(job: Job, model: ModelShape, shown: Candidate) -> Iterator[str]:
    """Yield notes on what an optimizer of whole matrices steps, and on a division among owners that
    cannot be even.
    """
    rest = PLANNED[job.optimizer].rest
    if PLANNED[job.optimizer].update != WHOLE:
        return
    trained = [p for u in model.units for p in u.parameters if p.trainable]
    names = stepped_whole(model, job.optimizer)
    if not rest:
        yield (
            f"{job.optimizer} steps all {len(names):,} parameters whole. States, bytes and seconds of"
            " owners are those of the rank that has most"
        )
        return
    share = sum(p.numel for p in trained if p.name in names) / max(model.trainable, 1)
    if not names:
        yield f"{model.name} has no matrices that {job.optimizer} would step: {rest} steps everything"
        return
    yield (
        f"{job.optimizer} steps the {len(names):,} matrices of the body, {share:.0%} of the trained"
        f" parameters; {rest} steps the others, with {MOMENTS_OF[rest]} states each. States, bytes"
        " and seconds of owners are those of the rank that has most"
    )
    stacks = stepped_whole(model, job.optimizer, stacks=True) - names
    stacked = sum(p.numel for p in trained if p.name in stacks)
    if stacked:
        yield (
            f"stacks of matrices in three dimensions ({stacked / max(model.trainable, 1):.0%} of the"
            f" trained parameters, such as experts) are stepped by {rest}: torch's"
            f" {PLANNED[job.optimizer].name} takes two dimensions only"
        )
    found = shown.balance
    if found is not None and found.least > _UNEVEN:
        yield (
            f"{found.matrices:,} matrices among {found.ranks:,} owners: the largest alone is"
            f" {found.least:.2f} times the mean of all ranks. With shard_group= a group of fewer ranks"
            " has owners for all matrices, and each does as much as the others"
        )


#: A division among owners above this is told of.
_UNEVEN = 1.1


def _of_recipe(question: Question, shown: Candidate) -> Iterator[str]:
    """Yield notes on options without effect in the recipe that a plan shows, in the words of the
    engine (runtime/state/start.py), and on choices that the plan leaves to the user.
    """
    machine, asked = question.machine, question.job.communication
    recipe = shown.scheme.recipe(question.job)
    yield from (n for n in recipe.notes if " has no effect " in n)
    topology = topology_of(recipe, machine.ranks, machine.node_ranks)
    named = "group" in asked or "shard_group" in asked
    divides = "second_copy" in asked or "shard_group" in asked
    if machine.ranks == 1 and (divides or "gather_codec" in asked or "reduce_codec" in asked):
        yield f"{', '.join(sorted(asked))}: no effect on one rank, from which nothing travels"
    elif topology.outer == 1 and (named or divides) and recipe.inner != FLAT:
        why = "they are on one node" if recipe.inner == "node" else "they are all"
        yield (
            f"group={recipe.inner!r} makes one group of the {machine.ranks} ranks ({why}): nothing"
            " is divided inside groups only"
        )
    if recipe.frozen is not None:
        units = units_of(question.model, recipe, machine.ranks, per_node=machine.node_ranks)
        if not any(f.stored for u in units for f in u.flats):
            yield (
                f"frozen={recipe.frozen!r} has no effect: no matrix but embeddings is frozen"
                " (--lora freezes those of the model)"
            )
    sizes = [u.trainable for u in question.model.units]
    yield from offload_notes(sizes, recipe, machine.ranks)
    # If the speed of links between nodes is unknown, the plan chooses nothing for them
    if machine.nodes > 1 and not (machine.is_timed or asked) and shown.scheme.stage == 3:
        with_copy = question.answer(shown.scheme.with_(communication="hpZ"))
        plain, less = (c.account.sent_between for c in (shown, with_copy))
        way = as_recipe(shown.scheme.stage, COMMUNICATION["hpZ"].options)
        yield (
            f"a node sends {plain / 1e9:,.2f} GB to the others in a step, and {less / 1e9:,.2f} GB"
            f" with {way}: the plan does not know how fast they are linked, so that is yours to"
            " choose"
        )


def _of_reserve(shown: Candidate) -> Iterator[str]:
    """Yield a note on the bytes of a GPU that hold no tensor (plan/reserve.py)."""
    if shown.reserve.communicators:
        yield (
            f"{shown.reserve.nbytes / 2**30:.2f} GiB of each GPU are not for training, by assumption:"
            f" {shown.reserve}"
        )


def _last_asked(candidates: tuple[Candidate, ...], stages: tuple[int, ...]) -> Candidate:
    """Return the last candidate at one of `stages`; without any, the last of all."""
    return ([c for c in candidates if c.scheme.stage in stages] or candidates)[-1]


def _column(stage: int, like: Scheme, job: Job) -> Scheme:
    """Return a stage's scheme for the table of stages: offloaded only if the job asks for it and
    the stage allows it.
    """
    try:
        return Scheme(stage, like.checkpointing, job.offload or "none", like.micro_batch)
    except ValueError:
        return Scheme(stage, like.checkpointing, "none", like.micro_batch)


def _next_steps(question: Question, best: Candidate, stages: tuple[int, ...]) -> list[Candidate]:
    """Return the steps of the ladder after the recommendation, at its micro-batch. Each of them
    saves more than those before.
    """
    out: list[Candidate] = []
    micro, communication = best.scheme.micro_batch, best.scheme.communication
    order = [candidate.scheme.with_(micro_batch=micro) for candidate in ladder(question, stages)]
    for later in order[order.index(best.scheme.with_(communication="")) + 1 :]:
        try:
            found = question.answer(later.with_(communication=communication))
        except ValueError:  # that way excludes these tiers
            found = question.answer(later)
        if found.account.peak_bytes < (out or [best])[-1].account.peak_bytes:
            out.append(found)
    return out


def _ends(model: ModelShape, micro: Collection[int], models: Mapping[int, int]) -> Iterator[str]:
    """Yield a note for each search that ended at its limit before memory was full."""
    if MOST_SAMPLES in micro:
        yield f"the largest micro-batch is looked for up to {MOST_SAMPLES:,} samples"
    if any(models.values()) and deeper(model, MOST_BLOCKS).numel in models.values():
        yield f"the largest model is looked for up to {MOST_BLOCKS:,} blocks"
