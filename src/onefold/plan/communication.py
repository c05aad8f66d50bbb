"""Where nodes hang on slow links: every way to send less between them side by side, the one to
take, and the one to ask for.

    the recommendation waits for links for more than SLOW of its step?
        ├── ways that only order sums otherwise: the fastest that fits is taken if it is GAIN faster
        └── ways that round (codecs): the fastest that fits is named, with the line that asks for it, if it is MORE faster still

Rows are of the recommendation's stage and of stage 3, at its checkpointing, its micro-batch and
with its states where they are. Only those of its own stage are taken: the lowest stage that fits
stays. How much convergence a codec costs is nothing that a plan knows.

Beside it: who adds gradients up, Onefold in rank order or NCCL in an order of its own, and which is
faster when. Of one unit whose gradients are P bytes on the wire, over N ranks, with α seconds a message, B
bytes/s of the link and M of memory:

| reduce=     | on the wire                        | in memory                       | receive buffer | bits                               |
|-------------|------------------------------------|---------------------------------|----------------|------------------------------------|
| "ordered"   | P(N−1)/N ÷ B + α: an all-to-all    | (P + sums) ÷ M: N parts, 1 pass | P              | fp32 sums, the same at every stage |
| "native"    | P(N−1)/N ÷ B + (N−1)α: a ring      | (P/N + sums) ÷ M                | P/N            | sums in the wire's dtype, NCCL's   |

So a ring pays (N−2)α more and a pass over P(N−1)/N bytes less: native is the faster from P =
(N−2)α·M·N/(N−1) on. Over two levels both are two moves, each by these formulas; over one level and
several nodes the all-to-all also sends as many times the bytes over a node's border as the node has
ranks. Sources: Thakur, Rabenseifner and Gropp 2005 (Optimization of Collective
Communication Operations in MPICH), section 3.1 for α and B, and 4.3 for the ring's reduce-scatter;
Patarasuk and Yuan 2009 (Bandwidth optimal all-reduce algorithms), section 4;
`onefold.plan.copies.added_bytes` for the pass. What NCCL does besides rings (trees, sums in the
switch) is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from onefold.layout import adds_of, hops_of
from onefold.plan.choose import Question
from onefold.plan.copies import added_bytes
from onefold.plan.evaluate import Candidate, on_nccl
from onefold.plan.hardware import Machine
from onefold.plan.job import COMMUNICATION, as_options, as_recipe
from onefold.plan.states import topology_of, units_of
from onefold.plan.times import SUMMING_ON_A_GPU
from onefold.plan.traffic import Software, traffic_over
from onefold.plan.wire import Leg
from onefold.recipe import Recipe

#: Share of a step that waits for communication from which on links are slow; by how much a way has
#: to be faster to be taken, or named.
SLOW, GAIN, MORE = 0.05, 0.05, 0.1
#: Ways this near to each other are equally fast: the one that changes less is preferred.
ALIKE = 0.02


@dataclass(frozen=True)
class SlowLinks:
    """See this module's picture.

    Attributes:
        rows: every way, the plain one first of each stage.
        taken: the recommendation, which may be the plain one. named: a lossy way that is faster;
            None if none is.
        why: sentences on both.
    """

    rows: tuple[Candidate, ...]
    taken: Candidate
    named: Candidate | None
    why: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data, a dictionary for each row."""
        return {
            "rows": [self._row(c) for c in self.rows],
            "recommended": self.taken.scheme.communication,
            "lossy": self.named.scheme.communication if self.named is not None else None,
            "why": list(self.why),
        }

    def _row(self, c: Candidate) -> dict[str, Any]:
        way, account = c.scheme.way, c.account
        return {
            "stage": c.scheme.stage,
            "communication": c.scheme.communication,
            "options": dict(way.options),
            "lossy": way.lossy,
            "fits": c.fits,
            "rest_bytes": account.rest_bytes,
            "peak_bytes": account.peak_bytes,
            "links": dict(account.links),
            "node_links": dict(account.node_links),
            "seconds": dict(account.seconds),
            "recommended": c.scheme == self.taken.scheme,
        }


def waiting(candidate: Candidate) -> float:
    """Share of a step in which a rank waits for others."""
    seconds = candidate.account.seconds
    return (
        seconds.get("exposed communication", 0.0) / seconds["step"] if seconds.get("step") else 0.0
    )


def slow_links(
    question: Question, best: Candidate, stages: tuple[int, ...] = ()
) -> SlowLinks | None:
    """None where links between nodes are not slow: one node, little waiting, slower ones inside,
    speeds that nobody knows; or where the job says itself what to do.
    """
    machine = question.machine
    unknown = machine.measured is None and machine.gpu.name == "here"
    if (
        machine.nodes < 2
        or question.job.communication
        or unknown
        or waiting(best) < SLOW
        or not _between_is_slower(best, machine)
    ):
        return None
    rows = [c for stage in _stages(best, stages) for c in _rows(question, best, stage)]
    taken = _taken(best, rows)
    named = _named(taken, rows)
    return SlowLinks(tuple(rows), taken, named, tuple(_why(best, taken, named)))


def _between_is_slower(best: Candidate, machine: Machine) -> bool:
    """What goes between nodes takes longer than what stays inside."""
    if machine.between is None:
        return False
    account = best.account
    return (
        account.node_links.get("between", 0) / machine.between.bandwidth
        > account.links.get("inside", 0) / machine.gpu.link
    )


def _stages(best: Candidate, stages: tuple[int, ...]) -> list[int]:
    own = best.scheme.stage
    return [own] if own == 3 or (stages and 3 not in stages) else [own, 3]


def _rows(question: Question, best: Candidate, stage: int) -> list[Candidate]:
    found = []
    for name, way in COMMUNICATION.items():
        if stage < way.from_stage:
            continue
        try:
            found.append(question.answer(best.scheme.with_(stage=stage, communication=name)))
        except ValueError:  # with states where they are, this stage or this way cannot be
            continue
    return found


def _taken(best: Candidate, rows: Sequence[Candidate]) -> Candidate:
    """The fastest that rounds nothing; of those that are as fast the one that holds least."""
    own = [
        c for c in rows if c.fits and c.scheme.stage == best.scheme.stage and not c.scheme.way.lossy
    ]
    fastest = min(map(_step, own), default=_step(best))
    if fastest > (1 - GAIN) * _step(best):
        return best
    return min(
        (c for c in own if _step(c) <= (1 + ALIKE) * fastest), key=lambda c: c.account.peak_bytes
    )


def _named(taken: Candidate, rows: Sequence[Candidate]) -> Candidate | None:
    """The fastest that rounds; of those that are as fast the one with fewest parts."""
    lossy = [c for c in rows if c.fits and c.scheme.way.lossy]
    fastest = min(map(_step, lossy), default=_step(taken))
    if fastest > (1 - MORE) * _step(taken):
        return None
    return min(
        (c for c in lossy if _step(c) <= (1 + ALIKE) * fastest),
        key=lambda c: len(c.scheme.way.options),
    )


def _step(c: Candidate) -> float:
    return c.account.seconds["step"]


def _why(best: Candidate, taken: Candidate, named: Candidate | None) -> list[str]:
    waits = (
        f"links between nodes are slow: {waiting(best):.0%} of a step of {best.scheme} waits for"
        " them"
    )
    if taken is best:
        said = [f"{waits}; no way that rounds nothing is {GAIN:.0%} faster"]
    else:
        way, less = taken.scheme.way, 1 - _step(taken) / _step(best)
        sends = f"{_gb(taken)} instead of {_gb(best)} leave a node in a step"
        said = [
            f"{waits}; with {as_recipe(taken.scheme.stage, way.options)} ({way.words}) {sends}, and"
            f" it takes {less:.0%} less"
        ]
    if named is not None:
        way, stage, less = (named.scheme.way, named.scheme.stage, 1 - _step(named) / _step(taken))
        said.append(
            f"{named.scheme.communication} ({way.words}) would take {less:.0%} less again, {_gb(named)}"
            " between nodes; it rounds what travels, so it is yours to ask for:"
            f" {as_recipe(stage, way.options)}, or {as_options(stage, way.options)}"
        )
    return said


def _gb(c: Candidate) -> str:
    nbytes = c.account.node_links.get("between", 0)
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"


#: Elements of a rank's part for which times are taken, twice: they are straight lines.
_PART = 1 << 16


@dataclass(frozen=True)
class Sums:
    """The recommendation with gradients added either way.

    Attributes:
        ordered, native: its accounts. asked: which of the two the job says.
        faster_from: bytes of a unit's gradients on the wire from which on a reduction is faster
            natively: 0 always, infinity never.
        largest: bytes of the largest unit's gradients here. dtype, sums_dtype: what NCCL would add
            in, and what Onefold does.
    """

    ordered: Candidate
    native: Candidate
    asked: str
    faster_from: float
    largest: int
    dtype: str
    sums_dtype: str

    @property
    def saved(self) -> int:
        """Bytes at peak that native sums save; below 0 if they take more."""
        return self.ordered.account.peak_bytes - self.native.account.peak_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain data; `faster_from` null where native is never faster."""
        return {
            "asked": self.asked,
            "dtype": self.dtype,
            "sums_dtype": self.sums_dtype,
            "ordered": {
                "seconds": dict(self.ordered.account.seconds),
                "peak_bytes": self.ordered.account.peak_bytes,
            },
            "native": {
                "seconds": dict(self.native.account.seconds),
                "peak_bytes": self.native.account.peak_bytes,
            },
            "faster_from": self.faster_from if math.isfinite(self.faster_from) else None,
            "largest_unit": self.largest,
        }


def sums_of(question: Question, best: Candidate) -> Sums | None:
    """None where there is no choice (one rank, gloo, encoded gradients) or where nobody knows what
    it would take.
    """
    machine, job = question.machine, question.job
    recipe = best.scheme.recipe(job)
    # A calibration measures ordered sums only
    unknown = machine.gpu.name == "here" or machine.measured is not None
    if machine.ranks == 1 or unknown or not on_nccl(machine) or recipe.gradients.codec is not None:
        return None
    asked = recipe.reduce
    other = "native" if asked == "ordered" else "ordered"
    options = tuple((k, v) for k, v in job.options if k != "reduce")
    found = replace(question, job=replace(job, options=(*options, ("reduce", other)))).answer(
        best.scheme
    )
    ordered, native = (best, found) if asked == "ordered" else (found, best)
    flats = [
        f for u in units_of(question.model, recipe, machine.ranks) for f in u.flats if f.trainable
    ]
    largest = max(flats, key=lambda f: f.numel * f.dtypes.wire.itemsize, default=None)
    if largest is None:
        return None
    soft, wire, sums = (
        question.software or Software(),
        largest.dtypes.wire.itemsize,
        largest.dtypes.sums.itemsize,
    )
    return Sums(
        ordered,
        native,
        asked,
        faster_from(recipe, machine, soft, wire, sums),
        largest.numel * wire,
        *(
            str(dtype).removeprefix("torch.")
            for dtype in (largest.dtypes.wire, largest.dtypes.sums)
        ),
    )


def reduction_seconds(
    recipe: Recipe, machine: Machine, software: Software, nbytes: float, wire: int, sums: int
) -> float:
    """Of one reduction of `nbytes` of gradients to the ranks that own them, by the table of this
    module.

    Args:
        wire, sums: bytes of an element on the wire, and of a sum.
    """
    per_node = machine.local if machine.nodes > 1 else None
    topology, adds = topology_of(recipe, machine.ranks, per_node), adds_of(recipe, native=True)
    seconds, part = 0.0, nbytes / wire / machine.ranks
    for hop in hops_of(topology, 0, _PART):
        own = part * (hop.own / _PART)
        leg = Leg(
            "reduce-scatter",
            False,
            hop.level,
            round((hop.size - 1) * own * wire),
            1,
            "backward",
            adds == "backend",
        )
        seconds += sum(t.seconds(machine, software) for t in traffic_over([leg], machine, topology))
        seconds += added_bytes(own, 1 if adds == "backend" else hop.size, wire, sums) / (
            machine.gpu.memory_bandwidth * SUMMING_ON_A_GPU
        )
    return seconds


def faster_from(
    recipe: Recipe, machine: Machine, software: Software, wire: int, sums: int
) -> float:
    """Bytes of a unit's gradients on the wire from which on native sums are faster; infinity:
    never.

    Either way is a straight line in them, so that two points say where they cross.
    """
    sizes = [machine.ranks * _PART * wire * n for n in (1, 2)]
    ways = [replace(recipe, reduce=way) for way in ("ordered", "native")]
    (a, b), (c, d) = (
        [reduction_seconds(way, machine, software, size, wire, sums) for size in sizes]
        for way in ways
    )
    # Native gains an octet, and begins behind
    slope, ahead = ((b - a) - (d - c)) / (sizes[1] - sizes[0]), (2 * c - d) - (2 * a - b)
    if slope <= 0:
        return 0.0 if ahead < 0 else math.inf
    return max(0.0, ahead / slope)
