"""The choice: the lowest stage that fits, then what slows least; the best meshes; what each further
step would buy; ways to send less between nodes; and what to say if nothing fits.

    stage 1 ► 2 ► 3    nothing recomputed, everything on the device
      └► everything else that fits, by the planned seconds of a step:
         recompute (nothing, every second block, every block) × offload (nothing, a quarter, half, three
         quarters or all of the optimizer, all states; to the host, to NVMe)

If a part of the optimizer leaves, it is whole units, the last ones first, since their transfers have
the longest time to hide (runtime/units.py). On several ranks the choice starts at stage 1: stage 0
sends the same bytes and divides nothing.

Over other axes the search takes every tensor-parallel degree that stays inside a node and divides the
heads; every number of stages of which the fullest has at most 10 % more blocks than the mean; every
degree that divides the experts; and for each the ZeRO stages and recompute that fit. Meshes are
accounted for in the order of a lower bound of their seconds per token, until no other can be faster
than those that are kept.

Slow links. Every way to send less between nodes is accounted for, side by side:

    the recommendation waits for links for more than SLOW of its step?
        ├── ways that only change the order of sums: the fastest that fits is taken if it is GAIN faster
        └── ways that round (codecs): the fastest that fits is named, with the line that asks for it, if it is MORE faster still

Rows have the recommendation's stage or stage 3, its checkpointing, its micro-batch and its tiers.
Only rows of its own stage are taken: the lowest stage that fits remains. A plan does not know how
much convergence a codec costs.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from onefold.plan.account import Candidate, Question, bubble, flop_seconds, unlike
from onefold.plan.degrees import Degrees, check, dims_of, divisors, most_tp
from onefold.plan.hardware import Machine, builtin
from onefold.plan.job import (
    CHECKPOINTING,
    COMMUNICATION,
    OFFLOAD,
    PARTS,
    PLACES,
    Scheme,
    as_recipe,
)
from onefold.plan.rank import Stage, local_numel, stages_of
from onefold.plan.shapes import ModelShape
from onefold.recipe.optimizers import PLANNED, WHOLE
from onefold.wording import readable

#: Where the searches end: samples of a micro-batch, devices.
MOST_SAMPLES, MOST_RANKS = 4096, 1 << 17


# -- one scheme of all -----------------------------------------------------------------------------


def schemes(question: Question, stages: tuple[int, ...] = ()) -> list[Scheme]:
    """Return every scheme that the job allows on this machine, what changes least first. Raises
    ValueError: no asked stage can be combined with the job's own tiers, groups and codecs.
    """
    job, machine = question.job, question.machine
    # Moving states to the host frees nothing if the device is a CPU
    useless = {"nvme"} if machine.host.nvme <= 0 else set[str]()
    useless |= {"cpu"} if machine.shared else set()
    whole = PLANNED[job.optimizer].update == WHOLE  # its states cannot be on a disk
    places = [
        name
        for name, way in OFFLOAD.items()
        if not useless & {*way.options.values()} and not (whole and way.on_disk)
    ]
    usual = (0, 3) if machine.ranks == 1 else (1, 2, 3)
    found, refused = [], None
    for offload in ("none",) if job.offload else places:
        way = OFFLOAD[offload]
        for checkpointing in (job.checkpointing,) if job.checkpointing else CHECKPOINTING:
            for share in PARTS if way.in_part else (1.0,):
                possible = []
                for stage in stages or (usual if offload == "none" else (2, 3)):
                    if stage == 0 and offload != "none":  # the ranks divide nothing
                        continue
                    try:
                        scheme = Scheme(
                            stage, checkpointing, offload, job.micro_batch or 1, share,
                            degrees=Degrees(dp=machine.ranks),
                        )  # fmt: skip
                        scheme.recipe(job)
                        possible.append(scheme)
                    except ValueError as error:
                        refused = refused or error
                # One rank has nothing to divide
                found += possible[:1] if machine.ranks == 1 and offload == "none" else possible
    if not found and refused is not None:
        raise refused
    return found


def ladder(question: Question, stages: tuple[int, ...] = ()) -> list[Candidate]:
    """Return candidates from the least slowdown to the most, as in the picture above; at micro-batch
    1 if the job leaves it open. If the machine's speeds are unknown, they keep their order.
    """
    every = [question.answer(scheme) for scheme in schemes(question, stages)]
    first = every[0].scheme
    # Sorting keeps the order of what is equal (to the nanosecond, below which rounding errors decide)
    return sorted(
        every,
        key=lambda c: c.scheme != replace(first, stage=c.scheme.stage) and round(c.step, 9),
    )


def recommend(question: Question, stages: tuple[int, ...] = ()) -> Candidate | None:
    """Return the first candidate of the ladder that fits; None if none does. If the job leaves the
    micro-batch open, it is the largest that fits.
    """
    found = next((candidate for candidate in ladder(question, stages) if candidate.fits), None)
    if found is None or question.job.micro_batch:
        return found
    return largest_micro_batch(question, found.scheme) or found


def next_steps(
    question: Question, best: Candidate, stages: tuple[int, ...] = ()
) -> list[Candidate]:
    """Return the steps of the ladder after the recommendation, at its micro-batch. Each of them
    saves more than those before.
    """
    out, own = [best], best.scheme
    order = [replace(c.scheme, micro_batch=own.micro_batch) for c in ladder(question, stages)]
    for later in order[order.index(replace(own, communication="")) + 1 :]:
        found = question.answer(later)
        with suppress(ValueError):  # that way excludes these tiers
            found = question.answer(replace(later, communication=own.communication))
        if found.account.peak_bytes < out[-1].account.peak_bytes:
            out.append(found)
    return out[1:]


def side_by_side(
    question: Question, best: Candidate | None, stages: tuple[int, ...]
) -> list[Candidate]:
    """Return a candidate for each stage that the job's own tiers, groups and codecs allow, with the
    checkpointing and the micro-batch of the recommendation.
    """
    like = best.scheme if best is not None else schemes(question, stages)[0]
    found = []
    for stage in (0, 1, 2, 3):
        with suppress(ValueError):  # this stage excludes them
            column = replace(like, stage=stage, offload="none", share=1.0)
            column.recipe(question.job)
            found.append(question.answer(column))
    return found


# -- the largest that fits -------------------------------------------------------------------------


def largest_micro_batch(question: Question, scheme: Scheme) -> Candidate | None:
    """Return the scheme at the largest micro-batch that fits and divides the global batch; None if
    not even 1 fits. What is spare says where to look next. Raises ValueError: the global batch does
    not divide among the ranks.
    """
    job, ranks = question.job, question.machine.ranks
    sizes: Sequence[int] = range(1, MOST_SAMPLES + 1)
    if job.global_batch:
        replace(job, micro_batch=1).accumulation(ranks)
        sizes = [b for b in divisors(job.global_batch // ranks) if b <= MOST_SAMPLES]
    best = question.answer(replace(scheme, micro_batch=1))
    if not best.fits:
        return None
    each = max(1, question.activities(1, scheme.checkpointing).peak)
    low, high, step = 1, len(sizes) + 1, 1
    while high - low > 1:
        # Not all of `each` grows with the samples: steps that fit become longer
        guess = bisect_right(sizes, sizes[low - 1] + best.spare // each)
        if guess <= low:
            guess, step = low + step, 2 * step
        guess = guess if guess < high else (low + high) // 2
        found = question.answer(replace(scheme, micro_batch=sizes[guess - 1]))
        low, high, best = (guess, high, found) if found.fits else (low, guess, best)
    return best


# -- slow links ------------------------------------------------------------------------------------

#: Links are slow from this share of a step that waits for them on. A way has to be faster by this
#: much to be taken, or named.
SLOW, GAIN, MORE = 0.05, 0.05, 0.1
#: Ways that are this near to each other count as equally fast.
ALIKE = 0.02


def waiting(candidate: Candidate) -> float:
    """Return the share of a step in which a rank waits for others."""
    seconds = candidate.account.seconds
    return seconds["exposed communication"] / candidate.step if candidate.step else 0.0


def slow_links(
    question: Question, best: Candidate, stages: tuple[int, ...] = ()
) -> tuple[Candidate, tuple[Candidate, ...], tuple[str, ...]]:
    """Return (the recommendation, which may send in another way; every way to send between nodes, the
    plain one first of each stage; sentences on them). There are none if the links between nodes are
    not slow (one node, little waiting, slower links inside nodes), if their speed is unknown, or if
    the job itself chooses a way.
    """
    machine, own, account = question.machine, best.scheme.stage, best.account
    if machine.between is None or waiting(best) < SLOW or question.job.communication:
        return best, (), ()
    inside = account.links.get("inside", 0) / machine.gpu.link
    if account.sent_between / machine.between.bandwidth <= inside:
        return best, (), ()
    rows = []
    for stage in sorted({own, 3} if not stages or 3 in stages else {own}):
        for name in COMMUNICATION:
            with suppress(ValueError):  # this stage or the tiers exclude this way
                asked = replace(best.scheme, stage=stage, communication=name)
                rows.append(question.answer(asked))
    lossy = [c for c in rows if c.scheme.way.lossy]
    plain = [c for c in rows if c not in lossy and c.scheme.stage == own]
    taken = _faster(best, plain, GAIN, lambda c: c.account.peak_bytes) or best
    named = _faster(taken, lossy, MORE, lambda c: len(c.scheme.way.options))
    said = f"links between nodes are slow: {waiting(best):.0%} of a step of {best.scheme} waits for them;"
    nothing = f"no way that rounds nothing is {GAIN:.0%} faster"
    why = [f"{said} {_saves(taken, best) if taken is not best else nothing}"]
    if named is not None:
        why.append(
            f"{named.scheme.communication} rounds what travels, so it is yours to ask for: {_saves(named, taken)}"
        )
    return taken, tuple(rows), tuple(why)


def _faster(
    than: Candidate, rows: Sequence[Candidate], by: float, simplest: Callable[[Candidate], int]
) -> Candidate | None:
    """Return the fastest of rows that fit, if it gains that share; of equally fast ones the simplest."""
    fitting = [c for c in rows if c.fits]
    fastest = min((c.step for c in fitting), default=than.step)
    if fastest > (1 - by) * than.step:
        return None
    return min((c for c in fitting if c.step <= (1 + ALIKE) * fastest), key=simplest)


def _saves(way: Candidate, than: Candidate) -> str:
    """Return in words what a way saves, and how to ask for it."""
    scheme, sends = way.scheme, (readable(c.account.sent_between) for c in (way, than))
    return (
        f"{as_recipe(scheme.stage, scheme.way.options)} ({scheme.way.words}) takes"
        f" {1 - way.step / than.step:.0%} less: a node sends {' instead of '.join(sends)}"
    )


# -- meshes ----------------------------------------------------------------------------------------

AUTO = "auto"
#: A stage may have this many times as many blocks as the mean.
UNEVEN = 1.1
#: Ranks that divide a sample at most, and the fewest tokens that each of them has.
MOST_CP, FEWEST_TOKENS = 32, 4096
#: How many accounts a search makes at most, and how many meshes it keeps.
MOST_ACCOUNTS, KEPT = 300, 5


def mesh_of(question: Question, asked: Mapping[str, Any]) -> Degrees:
    """Return the mesh of the asked fields of `Degrees`. Raises ValueError: it is not possible for the model, the
    machine, the sequence or the batch.
    """
    machine, job = question.machine, question.job
    check(Degrees(dp=asked.get("ep", 1), **asked), question.model, machine, job.seq)
    degrees = Degrees.on(machine.ranks, **asked)
    question.micro_batches(Scheme(0, degrees=degrees, micro_batch=job.micro_batch))
    return degrees


def meshes(question: Question, asked: Mapping[str, Any]) -> list[Degrees]:
    """Return every mesh that is possible for the model, the machine and the batch. A field of
    `asked` that is not "auto" stays. Raises ValueError: none is, in the words of what refuses the
    first.
    """
    machine, dims, seq = question.machine, dims_of(question.model), question.job.seq
    every = divisors(machine.ranks)
    choices: dict[str, list[Any]] = {
        "tp": most_tp(dims, machine),
        "pp": [
            n
            for n in every
            if n <= dims.layers and -(-dims.layers // n) * n <= UNEVEN * dims.layers
        ],
        "cp": [n for n in every if n <= MOST_CP and seq // n >= FEWEST_TOKENS] or [1],
        "ep": divisors(dims.experts) if dims.experts > 1 else [1],
    }
    choices |= {name: [value] for name, value in asked.items() if value != AUTO}
    found, refused = [], None
    for fields in itertools.product(*choices.values()):
        mesh = dict(zip(choices, fields, strict=True))
        # Chunks are for those meshes of a search that have a pipeline
        if asked.get("pp") == AUTO and mesh["pp"] == 1:
            mesh["chunks"] = 1
        try:
            found.append(mesh_of(question, mesh))
        except ValueError as error:
            refused = refused or error
    if not found and refused is not None:
        raise refused
    return found


@lru_cache(maxsize=4096)
def _held(stage: Stage, degrees: Degrees) -> int:
    """Return the elements that a rank of the stage has if data ranks divide nothing."""
    return sum(local_numel(p, degrees) for p in stage.parameters)


def least(question: Question, scheme: Scheme) -> tuple[float, float]:
    """Return (seconds, bytes) below those of a step of this mesh: what the slowest stage computes,
    with the pipeline's bubble; and states beside the largest sum of activations.
    """
    degrees, kinds = scheme.degrees, question.job.convention
    seconds = nbytes = 0.0
    for stage in unlike(stages_of(question.model, degrees)):
        activity = question.activity(scheme, stage)
        seconds = max(seconds, activity.flops * flop_seconds(question))
        held, even = _held(stage, degrees), stage.numel * degrees.pp / degrees.ranks
        states = (even if scheme.stage == 3 else held) * kinds.parameters
        states += (even if scheme.stage else held) * kinds.optimizer
        nbytes = max(nbytes, activity.peak + states)
    batches = question.micro_batches(scheme)
    return batches * seconds / (1 - bubble(degrees, batches)), nbytes


def meshes_of(
    question: Question,
    asked: Mapping[str, Any],
    stages: tuple[int, ...],
) -> tuple[list[Candidate], int]:
    """Return (the asked mesh at each ZeRO stage, or the fastest candidate of each of the best meshes;
    how many are possible, 0 without a search).
    """
    job, rows = question.job, dict[Degrees, Candidate]()
    recomputes = (job.checkpointing,) if job.checkpointing else CHECKPOINTING
    if AUTO not in asked.values():
        degrees, columns = mesh_of(question, asked), []
        for stage in stages or (0, 1, 2, 3):  # with as little recompute as fits
            schemes = [
                Scheme(stage, how, "none", job.micro_batch, degrees=degrees) for how in recomputes
            ]
            found = [question.answer(scheme) for scheme in schemes]
            columns.append(next((c for c in found if c.fits), found[-1]))
        return columns, 0
    every = meshes(question, asked)
    possible: list[tuple[float, Scheme]] = []
    for degrees in every:
        # In a pipeline stage 2 reduces at the boundary, as stage 1 does
        usual = (1, 3) if degrees.pp > 1 else (1, 2, 3)
        data = degrees.dp * degrees.of_stage_without_dp > 1
        for stage in stages or (usual if data else (0,)):
            for how in recomputes:
                scheme = Scheme(stage, how, "none", job.micro_batch, degrees=degrees)
                seconds, nbytes = least(question, scheme)
                if nbytes <= question.machine.capacity:
                    possible.append((seconds, scheme))
    possible.sort(key=lambda one: (one[0], one[1].stage))
    seen, refused = list[Candidate](), None
    for seconds, scheme in possible[:MOST_ACCOUNTS]:
        kept = sorted(rows.values(), key=in_order)[:KEPT]
        if len(kept) == KEPT and seconds >= kept[-1].step:
            break
        try:
            seen.append(one := question.answer(scheme))
        except ValueError as error:  # the job's groups do not divide the ranks of this mesh
            refused = refused or error
            continue
        if one.fits:
            rows[scheme.degrees] = min(one, rows.get(scheme.degrees, one), key=in_order)
    if refused is not None and not seen:
        raise refused
    best = sorted(rows.values(), key=in_order)[:KEPT]
    return best or sorted(seen, key=lambda c: -c.spare)[:1], len(every)


def in_order(c: Candidate) -> tuple[float, int, float]:
    """Order by seconds to four digits, then by the lower ZeRO stage."""
    return float(f"{c.step:.3e}"), c.scheme.stage, c.step


# -- nothing fits ----------------------------------------------------------------------------------


def cannot_fit(question: Question, stages: tuple[int, ...] = ()) -> str:
    """Return the sentence for a job that does not fit on this machine: what is nearest, what is
    missing, and what would fit: other choices here, or more devices.
    """
    machine, job = question.machine, question.job
    said = too_large(question.model, max(ladder(question, stages), key=lambda c: c.spare))
    kept = "none" if job.offload == "none" and not job.places else ""
    options = tuple((k, v) for k, v in job.options if k not in {*PLACES, "step_in_backward"})
    how = "none"
    with suppress(ValueError):  # there are no blocks to recompute
        question.activities(1, "full")
        how = ""
    free = replace(
        job, micro_batch=1, global_batch=0, checkpointing=how, offload=kept, options=options
    )
    for larger in (machine, *_larger(machine)):
        # First ask what needs least
        there = replace(question, job=free, machine=larger)
        every = schemes(there)
        last = [s for s in every if (s.share, s.checkpointing) == (1.0, every[-1].checkpointing)]
        with suppress(ValueError):  # the job's groups do not divide that many ranks
            if any(there.answer(s).fits for s in last) and (found := recommend(there)) is not None:
                where = "Here" if larger is machine else f"On {larger.ranks} devices"
                return f"{said} {where} {found.scheme} with micro-batch 1 would fit."
    return (
        f"{said} No number of devices would do: one unit is too large. Take smaller units, a"
        " shorter --seq or a larger device."
    )


def no_mesh_fits(question: Question, rows: Sequence[Candidate], searched: int) -> str:
    """Return the sentence for meshes that do not fit."""
    if not rows:
        return (
            f"{question.model.name} does not fit: on each of {searched} meshes states and activations"
            " alone exceed a device. Take more GPUs, a smaller --micro-batch or a shorter --seq."
        )
    nearest = too_large(question.model, max(rows, key=lambda c: c.spare))
    return f"{nearest} Take more GPUs, a higher --tp or --pp, or --tp auto --pp auto to search."


def too_large(model: ModelShape, nearest: Candidate) -> str:
    """Return the sentence on what the nearest candidate lacks."""
    if nearest.spare < 0:
        return (
            f"{model.name} does not fit: the nearest is {nearest.scheme}, whose peak of"
            f" {readable(nearest.needed)} exceeds the {readable(nearest.usable)} of a device by"
            f" {readable(-nearest.spare)}."
        )
    held = nearest.account.by_tier.items()
    parts = " and ".join(f"{readable(nbytes)} of {tier.title}" for tier, nbytes in held)
    return (
        f"{model.name} does not fit: {nearest.scheme} needs {parts} for each rank, more than a"
        " node has."
    )


def _larger(machine: Machine) -> Iterator[Machine]:
    """Yield machines of doubled numbers of ranks: first within a node, then in whole nodes."""
    between = machine.between or builtin().link("8x200g")
    while machine.ranks < MOST_RANKS:
        inside = machine.ranks < machine.per_node
        ranks = min(2 * machine.ranks, machine.per_node) if inside else 2 * machine.ranks
        machine = replace(machine, ranks=ranks, between=between)
        yield machine
