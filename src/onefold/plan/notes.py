"""What a plan says in sentences: what may change a decision, and what its figures rest on."""

from __future__ import annotations

from collections.abc import Iterator

from onefold.plan.account import Candidate, Question
from onefold.plan.job import Job
from onefold.plan.owned import stepped_whole
from onefold.plan.shapes import ModelShape
from onefold.recipe import COMPUTE_DTYPES
from onefold.recipe.optimizers import PLANNED, WHOLE
from onefold.wording import readable


def in_a_line(best: Candidate) -> str:
    """Return a candidate with what it needs, in words."""
    accumulated = f" x {best.accumulation} accumulated" if best.accumulation > 1 else ""
    others = [f", {readable(n)} {tier.where}" for tier, n in best.account.by_tier.items() if n]
    return (
        f"{best.scheme}, micro-batch {best.scheme.micro_batch}{accumulated}: {readable(best.needed)} of the"
        f" {readable(best.usable)} that a rank may use{''.join(others)}"
    )


def notes_of(question: Question, shown: Candidate) -> Iterator[str]:
    """Yield notes on speeds that are not known, and on options without effect in the recipe that a plan
    shows. Of others without effect, `onefold.shard` tells (runtime/state/start.py).
    """
    machine, computes = question.machine, question.job.computes
    recipe, gpu = shown.scheme.recipe(question.job), machine.gpu
    if computes not in gpu.rates and not machine.is_here:
        other = computes == "bf16" and "fp16" in gpu.rates
        yield (
            f"{gpu.title or gpu.name} has no {computes}: seconds are at its fp32 rate"
            f"{'; --precision fp16 would run at its own rate' if other else ''}"
        )
    if not machine.is_timed:
        yield (
            "speeds of this machine are not measured: onefold doctor --calibrate would add seconds to"
            " the plan"
        )
    yield from (n for n in recipe.notes if " has no effect " in n)


def assumptions_of(question: Question, shown: Candidate) -> Iterator[str]:
    """Yield notes on what the figures of a plan rest on."""
    yield _of_job(question)
    yield from _of_whole_matrices(question.job, question.model)
    if shown.reserve.communicators:
        yield (
            f"{readable(shown.reserve.nbytes)} of each GPU are not for training, by assumption:"
            f" {shown.reserve}"
        )
    degrees, dims = shown.scheme.degrees, question.model.transformer
    if not degrees.data_only:
        yield (
            "on a mesh a rank has its share of each block's activations; what layers send along tp, cp"
            " and ep is not hidden"
        )
        if dims is not None and dims.tied and degrees.pp > 1:
            yield (
                "embedding and head are tied: both ends of the pipeline hold the matrix, and add its"
                " gradients up (not counted)"
            )
        if degrees.ep > 1:
            yield "tokens are counted as spread evenly over the experts"
    yield (
        "MFU counts model FLOPs (6N + 12Lhs a token, no recompute) over the nominal rate of the device"
    )


def _of_job(question: Question) -> str:
    """Return a note on the bytes per parameter."""
    job = question.job
    sums, found = job.recipe(3).gradients.dtype, job.convention
    kept = job.moment_bytes
    names = {dtype: name for name, dtype in COMPUTE_DTYPES.items()}
    return (
        f"bytes per trained parameter: {found.parameters} parameters + {found.gradients} gradients"
        f" ({names.get(sums, sums)}) + {found.optimizer - kept:g} master weights + {kept:g}"
        f" {job.optimizer} states = {found.total:g}; gradients are gone between steps"
    )


def _of_whole_matrices(job: Job, model: ModelShape) -> Iterator[str]:
    """Yield a note on what an optimizer of whole matrices steps."""
    row = PLANNED[job.optimizer]
    if row.update != WHOLE:
        return
    names = stepped_whole(model, job.optimizer)
    numel = sum(p.numel for u in model.units for p in u.parameters if p.name in names)
    others = f"; {row.rest} steps the others" if row.rest else ""
    yield (
        f"{job.optimizer} steps {len(names):,} parameters whole, {numel / max(model.trainable, 1):.0%} of all"
        f" trained elements{others}. States, bytes and seconds of owners are those of the rank that has most"
    )
