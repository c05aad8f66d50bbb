"""Two alternatives beside a recommendation: other ways to send between nodes on slow links, and
NCCL instead of Onefold to add gradients up.

Slow links. Every way to send less between nodes is accounted for, side by side:

    the recommendation waits for links for more than SLOW of its step?
        ├── ways that only change the order of sums: the fastest that fits is taken if it is GAIN faster
        └── ways that round (codecs): the fastest that fits is named, with the line that asks for it, if it is MORE faster still

Rows have the recommendation's stage or stage 3, its checkpointing, its micro-batch and its tiers.
Only rows of its own stage are taken: the lowest stage that fits remains. A plan does not know how
much convergence a codec costs.

Sums. Of one unit with P bytes of gradients on the wire, over N ranks, with α seconds a message, B
bytes/s of the link and M of memory:

| reduce=     | on the wire                        | in memory                       | receive buffer | bits                               |
|-------------|------------------------------------|---------------------------------|----------------|------------------------------------|
| "ordered"   | P(N−1)/N ÷ B + α: an all-to-all    | (P + sums) ÷ M: N parts, 1 pass | P              | fp32 sums, the same at every stage |
| "native"    | P(N−1)/N ÷ B + (N−1)α: a ring      | (P/N + sums) ÷ M                | P/N            | sums in the wire's dtype, NCCL's   |

The ring pays (N−2)α more, and saves a pass over P(N−1)/N bytes: native sums are faster from
P = (N−2)α·M·N/(N−1) on. Over two levels each way is two moves by these formulas. Over one level and
several nodes the all-to-all also sends as many times the bytes out of a node as the node has ranks:
there, and only there, native sums are the default (`Recipe.with_sums`).
Sources: Thakur, Rabenseifner and Gropp 2005 (Optimization of Collective Communication Operations in
MPICH), section 3.1 for α and B, and 4.3 for the ring's reduce-scatter; Patarasuk and Yuan 2009
(Bandwidth optimal all-reduce algorithms), section 4; `onefold.plan.wire.added_bytes` for the pass.
NCCL's other algorithms (trees, sums in the switch) are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from onefold.layout import adds_of, hops_of
from onefold.plan.choose import Question
from onefold.plan.evaluate import Candidate, on_nccl
from onefold.plan.hardware import Machine
from onefold.plan.job import COMMUNICATION, as_options, as_recipe
from onefold.plan.states import decided, topology_of, units_of
from onefold.plan.times import SUMMING_ON_A_GPU
from onefold.plan.traffic import Software, traffic_over
from onefold.plan.wire import Leg, added_bytes
from onefold.recipe import Recipe

# -- slow links ------------------------------------------------------------------------------------

#: Links are slow from this share of a step that waits for them on. A way has to be faster by this
#: much to be taken, or named.
SLOW, GAIN, MORE = 0.05, 0.05, 0.1
#: Ways that are this near to each other count as equally fast.
ALIKE = 0.02


@dataclass(frozen=True)
class SlowLinks:
    """The ways to send between nodes, side by side.

    Attributes:
        rows: every way; the plain one is the first of each stage.
        taken: the recommendation, which may be the plain one.
        named: a faster lossy way; None if there is none.
        why: sentences on both.
    """

    rows: tuple[Candidate, ...]
    taken: Candidate
    named: Candidate | None
    why: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with a dictionary for each row."""
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
    """Return the share of a step in which a rank waits for others."""
    seconds = candidate.account.seconds
    return (
        seconds.get("exposed communication", 0.0) / seconds["step"] if seconds.get("step") else 0.0
    )


def slow_links(
    question: Question, best: Candidate, stages: tuple[int, ...] = ()
) -> SlowLinks | None:
    """Compare the ways to send between nodes. None if the links between nodes are not slow (one
    node, little waiting, slower links inside nodes), if their speed is unknown, or if the job
    itself chooses a way.
    """
    machine, own, account = question.machine, best.scheme.stage, best.account
    if not machine.is_timed or waiting(best) < SLOW or question.job.communication:
        return None
    if machine.between is None or machine.nodes < 2:
        return None
    inside = account.links.get("inside", 0) / machine.gpu.link
    if account.sent_between / machine.between.bandwidth <= inside:
        return None
    asked = [own] if own == 3 or (stages and 3 not in stages) else [own, 3]
    rows = [c for stage in asked for c in _rows(question, best, stage)]
    taken = _taken(best, rows)
    named = _named(taken, rows)
    return SlowLinks(tuple(rows), taken, named, tuple(_why(best, taken, named)))


def _rows(question: Question, best: Candidate, stage: int) -> list[Candidate]:
    found = []
    for name, way in COMMUNICATION.items():
        with suppress(ValueError):  # the tiers exclude this stage or this way
            if stage >= way.from_stage:
                found.append(question.answer(best.scheme.with_(stage=stage, communication=name)))
    return found


def _taken(best: Candidate, rows: Sequence[Candidate]) -> Candidate:
    """Return the fastest way that rounds nothing; of equally fast ones the one that holds least."""
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
    """Return the fastest way that rounds; of equally fast ones the one with the fewest options."""
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
    nbytes = c.account.sent_between
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"


# -- sums ------------------------------------------------------------------------------------------

#: Elements of a rank's part at which the two straight lines of times are evaluated (and at twice as
#: many).
_PART = 1 << 16


@dataclass(frozen=True)
class Sums:
    """The recommendation with gradients added up by Onefold and by NCCL.

    Attributes:
        ordered, native: the two candidates.
        asked: which of the two the recommendation has.
        by_default: the job does not say; see `Recipe.with_sums`.
        faster_from: bytes of a unit's gradients on the wire from which on native sums are faster;
            0: always, infinity: never.
        largest: bytes of the largest unit's gradients.
        dtype, sums_dtype: the dtypes in which NCCL and Onefold add.
    """

    ordered: Candidate
    native: Candidate
    asked: str
    faster_from: float
    largest: int
    dtype: str
    sums_dtype: str
    by_default: bool

    @property
    def saved(self) -> int:
        """Bytes at peak that native sums save; negative if they take more."""
        return self.ordered.account.peak_bytes - self.native.account.peak_bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain data; `faster_from` is null if native sums are never faster."""
        ways = {"ordered": self.ordered.account, "native": self.native.account}
        return {
            "asked": self.asked,
            "by_default": self.by_default,
            "dtype": self.dtype,
            "sums_dtype": self.sums_dtype,
            **{
                way: {
                    "seconds": dict(account.seconds),
                    "peak_bytes": account.peak_bytes,
                    "sent_between": account.sent_between,
                }
                for way, account in ways.items()
            },
            "faster_from": self.faster_from if math.isfinite(self.faster_from) else None,
            "largest_unit": self.largest,
        }


def sums_of(question: Question, best: Candidate) -> Sums | None:
    """Compare the two ways to add gradients up. None if there is no choice (one rank, gloo, encoded
    gradients), or if the machine's speeds are unknown.
    """
    machine, job = question.machine, question.job
    recipe = best.scheme.recipe(job)
    # Calibrations measure ordered sums only
    unknown = machine.is_here or machine.measured is not None
    if machine.ranks == 1 or unknown or not on_nccl(machine) or recipe.gradients.codec is not None:
        return None
    by_default = recipe.reduce is None
    recipe = decided(recipe, machine.ranks, machine.node_ranks, nccl=True)
    asked = recipe.reduce or "ordered"
    other = "native" if asked == "ordered" else "ordered"
    options = tuple((k, v) for k, v in job.options if k != "reduce")
    otherwise = replace(job, options=(*options, ("reduce", other)))
    found = replace(question, job=otherwise).answer(best.scheme)
    ordered, native = (best, found) if asked == "ordered" else (found, best)
    flats = [
        f for u in units_of(question.model, recipe, machine.ranks) for f in u.flats if f.trainable
    ]
    largest = max(flats, key=lambda f: f.numel * f.dtypes.wire.itemsize, default=None)
    if largest is None:
        return None
    dtypes = largest.dtypes.wire, largest.dtypes.sums
    wire, sums = (dtype.itemsize for dtype in dtypes)
    start = faster_from(recipe, machine, Software(), wire, sums)
    narrow, wide = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return Sums(ordered, native, asked, start, largest.numel * wire, narrow, wide, by_default)


def reduction_seconds(
    recipe: Recipe, machine: Machine, software: Software, nbytes: float, wire: int, sums: int
) -> float:
    """Return the seconds of one reduction of `nbytes` of gradients, by the table above.

    Args:
        wire, sums: bytes of an element on the wire, and of a sum.
    """
    topology = topology_of(recipe, machine.ranks, machine.node_ranks)
    natively = adds_of(recipe, native=True) == "backend"
    seconds, part = 0.0, nbytes / wire / machine.ranks
    for hop in hops_of(topology, 0, _PART):
        own = part * (hop.own / _PART)
        sent = round((hop.size - 1) * own * wire)
        leg = Leg("reduce-scatter", False, hop.level, sent, 1, "backward", natively)
        seconds += sum(t.seconds(machine, software) for t in traffic_over([leg], machine, topology))
        touched = added_bytes(own, 1 if natively else hop.size, wire, sums)
        seconds += touched / (machine.gpu.memory_bandwidth * SUMMING_ON_A_GPU)
    return seconds


def faster_from(
    recipe: Recipe, machine: Machine, software: Software, wire: int, sums: int
) -> float:
    """Return the bytes of a unit's gradients on the wire from which on native sums are faster;
    infinity: never. Both times are straight lines in the bytes: two points say where they cross.
    """
    sizes = [machine.ranks * _PART * wire * n for n in (1, 2)]
    ways = [replace(recipe, reduce=way) for way in ("ordered", "native")]
    (a, b), (c, d) = (
        [reduction_seconds(way, machine, software, size, wire, sums) for size in sizes]
        for way in ways
    )
    # What native sums gain with each byte, and how far they are behind at none
    slope, ahead = ((b - a) - (d - c)) / (sizes[1] - sizes[0]), (2 * c - d) - (2 * a - b)
    if slope <= 0:
        return 0.0 if ahead < 0 else math.inf
    return max(0.0, ahead / slope)
