"""Who adds gradients up, Onefold in rank order or NCCL in an order of its own, and which is
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
from dataclasses import dataclass, replace
from typing import Any

from onefold.layout import adds_of, hops_of
from onefold.plan.choose import Question
from onefold.plan.copies import added_bytes
from onefold.plan.evaluate import Candidate, on_nccl
from onefold.plan.hardware import Machine
from onefold.plan.states import topology_of, units_of
from onefold.plan.times import SUMMING_ON_A_GPU
from onefold.plan.traffic import Software, traffic_over
from onefold.plan.wire import Leg
from onefold.recipe import Recipe

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
    wire, sums = largest.dtypes.wire.itemsize, largest.dtypes.sums.itemsize
    return Sums(
        ordered,
        native,
        asked,
        faster_from(recipe, machine, Software(), wire, sums),
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
