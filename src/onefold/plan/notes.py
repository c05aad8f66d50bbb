"""What a plan says in sentences: what may change a decision, and what its figures rest on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from onefold.plan.account import Candidate, Question
from onefold.plan.job import COMMUNICATION, Job, as_recipe
from onefold.plan.owned import stepped_whole
from onefold.plan.rank import exchanges, units_of
from onefold.plan.shapes import ModelShape
from onefold.recipe import COMPUTE_DTYPES
from onefold.recipe.optimizers import PLANNED, WHOLE
from onefold.recipe.rows import FLAT
from onefold.runtime.units import offload_notes
from onefold.wording import readable

#: A division among owners above this is told of.
_UNEVEN = 1.1


def notes_of(question: Question, shown: Candidate) -> Iterator[str]:
    """Yield notes on options without effect in the recipe that a plan shows, in the words of the
    engine (runtime/state/start.py), and on choices that the plan leaves to the user.
    """
    machine, asked = question.machine, question.job.communication
    recipe, gpu = shown.scheme.recipe(question.job), machine.gpu
    computes = question.job.computes
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
    found = shown.balance
    if found is not None and found.least > _UNEVEN:
        yield (
            f"{found.matrices:,} matrices among {found.ranks:,} owners: the largest alone is"
            f" {found.least:.2f} times the mean of all ranks. With shard_group= a group of fewer ranks"
            " has owners for all matrices, and each does as much as the others"
        )
    yield from (n for n in recipe.notes if " has no effect " in n)
    topology, _ = exchanges(range(machine.ranks), recipe, machine.node_ranks, True, machine.ranks)
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
        with_copy = question.answer(replace(shown.scheme, communication="hpZ"))
        plain, less = (c.account.sent_between for c in (shown, with_copy))
        way = as_recipe(shown.scheme.stage, COMMUNICATION["hpZ"].options)
        yield (
            f"a node sends {readable(plain)} to the others in a step, and {readable(less)}"
            f" with {way}: the plan does not know how fast they are linked, so that is yours to"
            " choose"
        )


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
    """Yield notes on what an optimizer of whole matrices steps."""
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
        f" parameters; {rest} steps the others, with {PLANNED[rest].elementwise_states} states each. States, bytes"
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
