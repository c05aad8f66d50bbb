"""What to say of a job that fits nowhere on a machine: what is nearest, and what would do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from onefold.plan.activity import blocks_of
from onefold.plan.choose import Question, ladder, recommend
from onefold.plan.hardware import Machine, builtin
from onefold.plan.job import COMMUNICATION_OPTIONS, PLACES, Job

#: Devices up to which it is asked how many would do.
MOST_RANKS = 1 << 17


def cannot_fit(question: Question, stages: tuple[int, ...] = ()) -> str:
    """The sentence for a job that fits nowhere on this machine: what is nearest, what is missing,
    and how many ranks would do.
    """
    model, machine, job = question.model, question.machine, question.job
    nearest = max(ladder(question, stages), key=lambda c: c.spare)
    if nearest.spare < 0:
        said = (
            f"{model.name} does not fit: the nearest is {nearest.scheme}, whose peak of"
            f" {_gib(nearest.needed)} exceeds the {_gib(nearest.usable)} of a device by"
            f" {_gib(-nearest.spare)}."
        )
    else:
        said = (
            f"{model.name} does not fit: {nearest.scheme} needs {_gib(nearest.account.host)} of"
            f" host and {_gib(nearest.account.nvme)} of NVMe for each rank, more than a node has."
        )
    for relaxed, at in _relaxed(question, stages):
        if (found := recommend(relaxed, at)) is not None:
            return (
                f"{said} Here {found.scheme} with micro-batch"
                f" {found.scheme.micro_batch}{_less(job, relaxed.job)} would fit."
            )
    kept = "none" if job.offload == "none" else ""
    one = replace(job, micro_batch=1, global_batch=0, checkpointing="", offload=kept)
    for asked in (one, _without_communication(one)) if one.communication else (one,):
        for ranks in _more_ranks(machine):
            there = replace(question, machine=_on(machine, ranks), job=asked)
            least = there
            if blocks_of(model):  # what needs least, first
                least = replace(there, job=replace(asked, checkpointing="full"))
            if any(c.fits for c in ladder(least)) and (found := recommend(there)) is not None:
                return (
                    f"{said} On {ranks} devices {found.scheme} with micro-batch"
                    f" 1{_less(one, asked)} would fit."
                )
    return (
        f"{said} No number of devices would do: one unit is too large. Take smaller units, a"
        " shorter --seq or a larger device."
    )


def _relaxed(
    question: Question, stages: tuple[int, ...]
) -> Iterator[tuple[Question, tuple[int, ...]]]:
    """The question with less and less of what was asked for: the micro-batch, the stage, the
    checkpointing, where states go, groups.
    """
    if question.job.micro_batch > 1:
        question = replace(question, job=replace(question.job, micro_batch=1))
        yield question, stages
    if stages:
        yield question, ()
    if question.job.checkpointing:
        question = replace(question, job=replace(question.job, checkpointing=""))
        yield question, ()
    if question.job.offload not in ("", "none") or question.job.places:
        options = tuple((k, v) for k, v in question.job.options if k not in PLACES)
        question = replace(question, job=replace(question.job, offload="", options=options))
        yield question, ()
    if question.job.communication:
        yield replace(question, job=_without_communication(question.job)), ()


def _without_communication(job: Job) -> Job:
    return replace(
        job, options=tuple((k, v) for k, v in job.options if k not in COMMUNICATION_OPTIONS)
    )


def _less(asked: Job, answered: Job) -> str:
    """What of groups and codecs an answer leaves out, in words."""
    left_out = sorted(set(asked.communication) - set(answered.communication))
    return f", without {', '.join(left_out)}," if left_out else ""


def _more_ranks(machine: Machine) -> Iterator[int]:
    """Twice as many and twice again: within a node first, then in whole nodes."""
    ranks = machine.ranks
    while ranks < MOST_RANKS:
        ranks = min(2 * ranks, machine.per_node) if ranks < machine.per_node else 2 * ranks
        yield ranks


def _on(machine: Machine, ranks: int) -> Machine:
    between = machine.between or builtin().link("8x200g")
    measured = machine.measured if ranks == machine.ranks else None
    return replace(machine, ranks=ranks, between=between, measured=measured)


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if math.isfinite(nbytes) else "unlimited"
