"""The choice: the lowest stage that fits, then what slows least, and what each further step would
buy.

    stage 1 ► 2 ► 3    nothing recomputed, everything on the device
      └► rungs, in the order of the seconds that a step is planned to take on them, each again from the lowest stage:
         recompute (nothing, every second block, every block) × off the device (nothing, the
         optimizer in part or whole, all states; to the host, to NVMe)

Of the optimizer the smallest part that just fits leaves (`smallest_share`): units leave whole, the last ones first,
since their transfers have the longest time to hide (runtime/unit.py). On several ranks the
ladder starts at stage 1: stage 0 sends the same bytes and divides nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import floor

from onefold.plan.activity import Activity, blocks_of
from onefold.plan.evaluate import Candidate, evaluate
from onefold.plan.hardware import Machine
from onefold.plan.job import (
    CHECKPOINTING,
    IN_PART,
    OFFLOAD,
    Job,
    Scheme,
)
from onefold.plan.shapes import ModelShape


def shares_of(sizes: Sequence[int]) -> list[float]:
    """For 1, 2, ... of the last units with trained parameters, all left out: the shortest decimal
    share that takes just these.

    Args:
        sizes: trained elements by unit.
    """
    total, taken = sum(sizes), list(accumulate(n for n in reversed(sizes) if n))
    return [_shortest(low, high, total) for low, high in zip([0, *taken], taken[:-1], strict=False)]


def _shortest(low: int, high: int, total: int) -> float:
    """The decimal of fewest digits by which more than `low` elements of `total` leave, and no more
    than `high`.
    """
    for digits in range(1, 16):
        share = floor(high / total * 10**digits) / 10**digits
        if low < total * share <= high:
            return share
    return (low + high) / 2 / total


def smallest_share(
    model: ModelShape, scheme: Scheme, answer: Callable[[Scheme], Candidate]
) -> Candidate | None:
    """`scheme` with the smallest share below 1 at which the device has room for the rest; None if
    all of it has to leave or nothing, or if that share does not fit off the device.
    """
    if answer(scheme).spare < 0 or answer(scheme.with_(offload="none")).fits:
        return None
    shares = shares_of([u.trainable for u in model.units])
    least = bisect_left(
        shares, True, key=lambda share: answer(scheme.with_(share=share)).spare >= 0
    )
    if least == len(shares):
        return None
    found = answer(scheme.with_(share=shares[least]))
    return found if found.fits else None


#: Where the searches end: samples of a micro-batch, blocks of a model.
MOST_SAMPLES, MOST_BLOCKS = 4096, 1024

# (samples of a micro-batch, checkpointing) → what they keep
Activities = Callable[[int, str], Activity]


@dataclass(frozen=True)
class Question:
    """Everything a choice needs: the model, its activations at any micro-batch, the machine and the
    job.
    """

    model: ModelShape
    activities: Activities
    machine: Machine
    job: Job
    _told: dict[Scheme, Candidate] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def answer(self, scheme: Scheme) -> Candidate:
        """The account of one scheme. Raises ValueError where the global batch does not divide."""
        if scheme not in self._told:
            activity = self.activities(scheme.micro_batch, scheme.checkpointing)
            self._told[scheme] = evaluate(self.model, activity, self.machine, self.job, scheme)
        return self._told[scheme]


def rungs(
    job: Job, ranks: int, stages: tuple[int, ...] = (), places: Collection[str] = tuple(OFFLOAD)
) -> list[list[Scheme]]:
    """What may be recomputed and may leave the device, each with the stages at which it can, from
    the lowest. What the job fixes stays fixed. The first is the one that changes least.

    Args:
        places: those of `OFFLOAD` that may be taken where the job fixes none.

    Raises:
        ValueError: no asked stage can keep states where the job says.
    """
    out = []
    for offload in (job.offload,) if job.offload else [name for name in OFFLOAD if name in places]:
        possible: tuple[int, ...] = (3,)
        if offload == "none":
            possible = tuple(s for s in ((0, 3) if ranks == 1 else (1, 2, 3)) if can_be(job, s))
            possible = possible[:1] if ranks == 1 else possible
        elif "offload_param" not in OFFLOAD[offload]:
            possible = (2, 3)
        if stages:  # of an offload that was asked for, what cannot be is refused by the scheme
            possible = tuple(s for s in stages if job.offload or offload == "none" or s in possible)
        for checkpointing in (job.checkpointing,) if job.checkpointing else CHECKPOINTING:
            schemes = [Scheme(s, checkpointing, offload, job.micro_batch or 1) for s in possible]
            out += [schemes] if schemes else []
    for scheme in (s for rung in out for s in rung if job.places):
        scheme.recipe(job)  # says what cannot be
    if not job.communication:
        return out
    # Without what groups and codecs cannot go with
    found = [[s for s in rung if _can_be(s, job)] for rung in out]
    if not any(found):
        out[0][0].recipe(job)  # says what cannot be
    return [rung for rung in found if rung]


def _can_be(scheme: Scheme, job: Job) -> bool:
    try:
        scheme.recipe(job)
    except ValueError:
        return False
    return True


def can_be(job: Job, stage: int) -> bool:
    """Whether a stage can do what the job's own options say of tiers, groups and codecs."""
    return _can_be(Scheme(stage), job)


def places_on(machine: Machine) -> tuple[str, ...]:
    """Those of `OFFLOAD` that can help on this machine. Where the host's memory is the device's
    own, going there frees nothing.
    """
    useless = {"nvme"} if machine.host.nvme <= 0 else set()
    useless |= {"cpu"} if machine.shared else set()
    return tuple(name for name, tiers in OFFLOAD.items() if not useless & set(tiers.values()))


def ladder(question: Question, stages: tuple[int, ...] = ()) -> Iterator[Candidate]:
    """Candidates from the least slowdown to the most, as this module's picture has them; at
    micro-batch 1 where the job leaves it open.
    """
    machine = question.machine
    first, *others = rungs(question.job, machine.ranks, stages, places_on(machine))
    yield from (question.answer(scheme) for scheme in first)
    answered = []
    for rung in others:
        whole = [question.answer(scheme) for scheme in rung]
        answered += [part for part in [_in_part(question, rung)] if part] + [whole]
    # A machine of which nobody knows the speeds: in the picture's order
    timed = machine.measured is not None or machine.gpu.name != "here"
    for found in sorted(answered, key=lambda rung: slowdown(rung) if timed else 0.0):
        yield from found


def _in_part(question: Question, rung: Sequence[Scheme]) -> list[Candidate]:
    """A rung with the smallest share of the optimizer that has to leave, at the stages where less
    than all of it will do.
    """
    if question.job.offload or rung[0].offload not in IN_PART:
        return []
    found = (smallest_share(question.model, scheme, question.answer) for scheme in rung)
    return [candidate for candidate in found if candidate is not None]


def slowdown(rung: Sequence[Candidate]) -> float:
    """By what rungs are ordered: the seconds of a step at its lowest stage that fits, else its
    last.
    """
    return next((c for c in rung if c.fits), rung[-1]).account.seconds["step"]


def recommend(question: Question, stages: tuple[int, ...] = ()) -> Candidate | None:
    """The first of the ladder that fits, at the largest micro-batch that fits if the job leaves it
    open; None if nothing fits.
    """
    found = next((candidate for candidate in ladder(question, stages) if candidate.fits), None)
    if found is None or question.job.micro_batch:
        return found
    return largest_micro_batch(question, found.scheme) or found


def largest_micro_batch(question: Question, scheme: Scheme) -> Candidate | None:
    """The scheme at the largest micro-batch that fits (with a global batch, of those that divide
    it); None if not even 1 does.

    Memory grows with the micro-batch, so halving finds it.
    """
    sizes = _sizes(question)
    best: Candidate | None = None
    low, high = 0, len(sizes) - 1
    # Open-ended: double first, so that a small answer costs few traces
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
    return [b for b in range(1, each + 1) if each % b == 0 and b <= MOST_SAMPLES]


def largest_model(
    question: Question,
    scheme: Scheme,
    build: Callable[[ModelShape], Activities],
    most: int = MOST_BLOCKS,
) -> int:
    """Parameters of the deepest model of this width that fits, of up to `most` of the same blocks;
    0 if not even one block does.

    At the model's own depth the model itself is asked: the answer is at least its size if and only
    if it fits. The peak is nearly affine
    in the number of blocks: a line through two depths says where to look.

    Args:
        build: the activations of a model of another depth.
    """
    blocks = len(blocks_of(question.model))
    seen: dict[int, Candidate] = {}

    def at(count: int) -> Candidate:
        if count not in seen:
            seen[count] = _at(question, scheme, build, count)
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
        before, guess = (
            guess,
            (guess + int(at(guess).spare / slope) if straight else (low + high) // 2),
        )
    if low == blocks:
        return question.model.numel
    # Of equal blocks, which those of the model need not be
    found = deeper(question.model, low).numel
    return (
        max(found, question.model.numel) if low > blocks else min(found, question.model.numel - 1)
    )


def _at(
    question: Question, scheme: Scheme, build: Callable[[ModelShape], Activities], blocks: int
) -> Candidate:
    if blocks == len(blocks_of(question.model)):
        return question.answer(scheme)
    model = deeper(question.model, blocks)
    return replace(question, model=model, activities=build(model)).answer(scheme)


def deeper(model: ModelShape, blocks: int) -> ModelShape:
    """The model with `blocks` of its blocks: the first block again and again, everything else as it
    is.
    """
    found = blocks_of(model)
    one = found[0]
    prefix, _, suffix = one.name.partition("0")
    tiles = tuple(f"{b.name}." for b in found)  # of their weights
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
    passed_by = (model.numel - model.active_numel) * blocks // max(len(found), 1)
    active = sum(u.numel for u in units) - passed_by
    return ModelShape(f"{model.name} with {blocks} blocks", units, dims, active)
