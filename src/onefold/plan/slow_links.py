"""Where nodes hang on slow links: every way to send less between them side by side, the one to
take, and the one to ask for.

    the recommendation waits for links for more than SLOW of its step?
        ├── ways that only order sums otherwise: the fastest that fits is taken if it is GAIN faster
        └── ways that round (codecs): the fastest that fits is named, with the line that asks for it, if it is MORE faster still

Rows are of the recommendation's stage and of stage 3, at its checkpointing, its micro-batch and
with its states where they are. Only those of its own stage are taken: the lowest stage that fits
stays. How much convergence a codec costs is nothing that a plan knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onefold.plan.choose import Question
from onefold.plan.evaluate import Candidate
from onefold.plan.hardware import Machine
from onefold.plan.job import COMMUNICATION, as_options, as_recipe

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
