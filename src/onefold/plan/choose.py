"""The choice: the lowest stage that fits, then what slows least; what each further step would buy;
and what to say if nothing fits.

    stage 1 ► 2 ► 3    nothing recomputed, everything on the device
      └► rungs, ordered by the planned seconds of a step, each again from the lowest stage:
         recompute (nothing, every second block, every block) × offload (nothing, the optimizer in
         part or whole, all states; to the host, to NVMe)

If a part of the optimizer is enough, the smallest part that fits leaves (`smallest_share`): whole
units, the last ones first, since their transfers have the longest time to hide
(runtime/unit.py). On several ranks the ladder starts at stage 1: stage 0 sends the same bytes
and divides nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from onefold.plan.activity import Activity, blocks_of
from onefold.plan.evaluate import Candidate, evaluate
from onefold.plan.hardware import Machine, builtin
from onefold.plan.job import (
    CHECKPOINTING,
    COMMUNICATION_OPTIONS,
    OFFLOAD,
    PLACES,
    Job,
    Scheme,
)
from onefold.plan.shapes import ModelShape
from onefold.recipe.optimizers import PLANNED, WHOLE

#: Where the searches end: samples of a micro-batch, blocks of a model, devices.
MOST_SAMPLES, MOST_BLOCKS, MOST_RANKS = 4096, 1024, 1 << 17

# (samples of a micro-batch, checkpointing) → their activity
Activities = Callable[[int, str], Activity]


@dataclass(frozen=True)
class Question:
    """Everything that a choice needs: the model, its activities, the machine and the job."""

    model: ModelShape
    activities: Activities
    machine: Machine
    job: Job
    _told: dict[Scheme, Candidate] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def answer(self, scheme: Scheme) -> Candidate:
        """Account for one scheme. Raises ValueError if the global batch does not divide."""
        if scheme not in self._told:
            activity = self.activities(scheme.micro_batch, scheme.checkpointing)
            self._told[scheme] = evaluate(self.model, activity, self.machine, self.job, scheme)
        return self._told[scheme]


# -- the ladder ------------------------------------------------------------------------------------


def rungs(
    job: Job, ranks: int, stages: tuple[int, ...] = (), places: Collection[str] = tuple(OFFLOAD)
) -> list[list[Scheme]]:
    """Return the possible combinations of recompute and offload, each as its schemes from the
    lowest possible stage. The first combination changes least. What the job fixes stays fixed.

    Args:
        places: the names in `OFFLOAD` that may be chosen if the job fixes none.

    Raises:
        ValueError: no asked stage can store states where the job says.
    """
    out = []
    whole = PLANNED[job.optimizer].update == WHOLE  # its states cannot be on a disk
    possible_places = [
        n for n, way in OFFLOAD.items() if n in places and not (whole and way.on_disk)
    ]
    for offload in (job.offload,) if job.offload else possible_places:
        possible: tuple[int, ...] = (3,)
        if offload == "none":
            possible = tuple(
                s for s in ((0, 3) if ranks == 1 else (1, 2, 3)) if can_be(Scheme(s), job)
            )
            possible = possible[:1] if ranks == 1 else possible
        elif OFFLOAD[offload].from_stage < 3:
            possible = (2, 3)
        if stages:  # `Scheme` refuses an asked offload that a stage cannot have
            possible = tuple(s for s in stages if job.offload or offload == "none" or s in possible)
        for checkpointing in (job.checkpointing,) if job.checkpointing else CHECKPOINTING:
            schemes = [Scheme(s, checkpointing, offload, job.micro_batch or 1) for s in possible]
            out += [schemes] if schemes else []
    for scheme in (s for rung in out for s in rung if job.places):
        scheme.recipe(job)  # raises if it cannot be
    if not job.communication:
        return out
    # Leave out schemes with which the asked groups and codecs cannot be combined
    found = [[s for s in rung if can_be(s, job)] for rung in out]
    if not any(found):
        out[0][0].recipe(job)  # raises and says why
    return [rung for rung in found if rung]


def can_be(scheme: Scheme, job: Job) -> bool:
    """Return whether a scheme can be combined with the job's own tiers, groups and codecs."""
    try:
        scheme.recipe(job)
    except ValueError:
        return False
    return True


def places_on(machine: Machine) -> tuple[str, ...]:
    """Return the names in `OFFLOAD` that can help on this machine. Moving states to the host frees
    nothing if the device is a CPU.
    """
    useless = {"nvme"} if machine.host.nvme <= 0 else set[str]()
    useless |= {"cpu"} if machine.shared else set()
    return tuple(name for name, way in OFFLOAD.items() if not useless & {*way.options.values()})


def ladder(question: Question, stages: tuple[int, ...] = ()) -> Iterator[Candidate]:
    """Yield candidates from the least slowdown to the most, as in the picture above; at micro-batch
    1 if the job leaves it open.
    """
    machine = question.machine
    first, *others = rungs(question.job, machine.ranks, stages, places_on(machine))
    yield from (question.answer(scheme) for scheme in first)
    answered = []
    for rung in others:
        whole = [question.answer(scheme) for scheme in rung]
        parts: list[Candidate] = []
        if not question.job.offload and OFFLOAD[rung[0].offload].in_part:
            smallest = (smallest_share(question, scheme) for scheme in rung)
            parts = [part for part in smallest if part is not None]
        answered += [parts, whole] if parts else [whole]
    # If the machine's speeds are unknown, the order is that of the picture
    for found in sorted(answered, key=slowdown) if machine.is_timed else answered:
        yield from found


def shares_of(sizes: Sequence[int]) -> list[float]:
    """Return the shortest decimal shares that take just the last 1, 2, ... units with trained
    parameters, but not all of them.

    Args:
        sizes: trained elements by unit.
    """
    total, taken = sum(sizes), list(accumulate(n for n in reversed(sizes) if n))
    return [_shortest(low, high, total) for low, high in zip([0, *taken], taken[:-1], strict=False)]


def _shortest(low: int, high: int, total: int) -> float:
    """Return the decimal of fewest digits that takes more than `low` of `total` elements, and at
    most `high`.
    """
    for digits in range(1, 16):
        share = math.floor(high / total * 10**digits) / 10**digits
        if low < total * share <= high:
            return share
    return (low + high) / 2 / total


def smallest_share(question: Question, scheme: Scheme) -> Candidate | None:
    """Return `scheme` with the smallest share below 1 that leaves enough room on the device. None
    if everything or nothing has to leave, or if that share does not fit on its tier.
    """
    answer = question.answer
    if answer(scheme).spare < 0 or answer(scheme.with_(offload="none")).fits:
        return None
    shares = shares_of([u.trainable for u in question.model.units])
    least = bisect_left(
        shares, True, key=lambda share: answer(scheme.with_(share=share)).spare >= 0
    )
    if least == len(shares):
        return None
    found = answer(scheme.with_(share=shares[least]))
    return found if found.fits else None


def slowdown(rung: Sequence[Candidate]) -> float:
    """Return the seconds that order rungs: those of a step at the lowest stage that fits, else at
    the last.
    """
    return next((c for c in rung if c.fits), rung[-1]).account.seconds["step"]


def recommend(question: Question, stages: tuple[int, ...] = ()) -> Candidate | None:
    """Return the first candidate of the ladder that fits; None if none does. If the job leaves the
    micro-batch open, it is the largest that fits.
    """
    found = next((candidate for candidate in ladder(question, stages) if candidate.fits), None)
    if found is None or question.job.micro_batch:
        return found
    return largest_micro_batch(question, found.scheme) or found


def largest_micro_batch(question: Question, scheme: Scheme) -> Candidate | None:
    """Return the scheme at the largest micro-batch that fits and divides the global batch; None if
    not even 1 fits. Memory grows with the micro-batch, so bisection finds it.
    """
    sizes = _sizes(question)
    best: Candidate | None = None
    low, high = 0, len(sizes) - 1
    # Without a global batch double first: a small answer then costs few traces
    doubling = isinstance(sizes, range)
    while low <= high:
        doubling = doubling and low < high
        at = min(high, max(1, low * 2)) if doubling else (low + high) // 2
        found = question.answer(scheme.with_(micro_batch=sizes[at]))
        if found.fits:
            best, low = found, at + 1
        else:
            high, doubling = at - 1, False
    return best


def _sizes(question: Question) -> range | list[int]:
    job, ranks = question.job, question.machine.ranks
    if not job.global_batch:
        return range(1, MOST_SAMPLES + 1)
    if job.global_batch % ranks:
        near = max(ranks, round(job.global_batch / ranks) * ranks)
        raise ValueError(
            f"a global batch of {job.global_batch} does not divide among {ranks} ranks: use {near}."
        )
    each = job.global_batch // ranks
    return [b for b in range(1, min(each, MOST_SAMPLES) + 1) if each % b == 0]


def largest_model(
    question: Question,
    scheme: Scheme,
    build: Callable[[ModelShape], Activities],
    most: int = MOST_BLOCKS,
) -> int:
    """Return the parameters of the deepest model of this width that fits, with up to `most` of the
    same blocks; 0 if not even one block fits.

    At the model's own depth the model itself is asked, so the answer is at least its size if and
    only if it fits. The peak is nearly affine in the number of blocks: a line through two depths
    says where to look next.

    Args:
        build: the activations of a model of another depth.
    """
    blocks = len(blocks_of(question.model))
    seen: dict[int, Candidate] = {}

    def at(count: int) -> Candidate:
        if count not in seen:
            asked = question
            if count != blocks:
                model = deeper(question.model, count)
                asked = replace(question, model=model, activities=build(model))
            seen[count] = asked.answer(scheme)
        return seen[count]

    if not blocks or not at(1).fits:
        return 0
    most = max(most, blocks)
    low, high = 1, most + 1  # fits, does not (or is not asked)
    before, guess = 1, max(blocks, 2)
    for tried in range(32):
        if high - low <= 1:
            break
        guess = min(max(guess, low + 1), high - 1)
        low, high = (guess, high) if at(guess).fits else (low, guess)
        slope = (at(before).spare - at(guess).spare) / (guess - before) if guess != before else 0.0
        straight = slope > 0 and tried < 12
        following = guess + int(at(guess).spare / slope) if straight else (low + high) // 2
        before, guess = guess, following
    if low == blocks:
        return question.model.numel
    # `deeper` has equal blocks, and the model may have others
    found = deeper(question.model, low).numel
    return (
        max(found, question.model.numel) if low > blocks else min(found, question.model.numel - 1)
    )


def deeper(model: ModelShape, blocks: int) -> ModelShape:
    """Return the model with `blocks` copies of its first block, or of its last if the first has no
    experts and the last has; everything else stays.
    """
    found = blocks_of(model)
    routed = [any(p.routed for p in block.parameters) for block in found]
    copied = len(found) - 1 if routed[-1] and not routed[0] else 0
    one = found[copied]
    prefix, _, suffix = one.name.partition(str(copied))
    tiles = tuple(f"{b.name}." for b in found)
    others = [u for u in model.units if u not in found and not u.name.startswith(tiles)]
    inside = [u for u in model.units if u.name.startswith(f"{one.name}.")]
    copies = [
        replace(u, name=f"{prefix}{i}{suffix}{u.name[len(one.name) :]}")
        for i in range(blocks)
        for u in (one, *inside)
    ]
    at = model.units.index(one)
    before, behind = (
        [u for u in part if u in others] for part in (model.units[:at], model.units[at:])
    )
    units = (*before, *copies, *behind)
    dims = replace(model.transformer, layers=blocks) if model.transformer else None
    passed_by = (model.numel - model.active_numel) * blocks // (sum(routed) or len(found))
    active = sum(u.numel for u in units) - passed_by
    return ModelShape(f"{model.name} with {blocks} blocks", units, dims, active)


# -- nothing fits ----------------------------------------------------------------------------------


def cannot_fit(question: Question, stages: tuple[int, ...] = ()) -> str:
    """Return the sentence for a job that does not fit on this machine: what is nearest, what is
    missing, and what would fit.
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
        held = nearest.account.by_tier.items()
        parts = " and ".join(f"{_gib(nbytes)} of {tier.title}" for tier, nbytes in held)
        said = (
            f"{model.name} does not fit: {nearest.scheme} needs {parts} for each rank, more than a"
            " node has."
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
            if blocks_of(model):  # first ask what needs least
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
    """Yield the question with fewer and fewer demands: on the micro-batch, the stage, the
    checkpointing, where states are stored, and groups.
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
    """Return the groups and codecs that an answer leaves out, in words."""
    left_out = sorted(set(asked.communication) - set(answered.communication))
    return f", without {', '.join(left_out)}," if left_out else ""


def _more_ranks(machine: Machine) -> Iterator[int]:
    """Yield doubled numbers of ranks: first within a node, then in whole nodes."""
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
