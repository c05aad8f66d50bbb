"""When a step's kernels, collectives and waits ran (simulation/clock.py says how that is found)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: What spans on the compute stream are, beside waits.
Kind = Literal["model", "engine", "optimizer", "collective", "wait"]
COMPUTE = "compute"


@dataclass(slots=True)
class Span:
    """Something that a stream did.

    Attributes:
        kind: "model", "engine" or "optimizer": a kernel of theirs; "collective"; "wait": the stream
            stood still.
        name: of the operation, or the move. unit: whose it is, "" if nobody's. phase: "forward",
            "backward" or "optimizer".
        begin, end: seconds.
        nbytes: sent by a collective.
        after: the number of the span that a wait waited for, or that a collective came after; -1
            for none.
    """

    stream: str
    kind: Kind
    name: str
    unit: str
    phase: str
    begin: float
    end: float
    nbytes: int = 0
    after: int = -1

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Parts:
    """Seconds of the compute stream, which together are a step's.

    Attributes:
        model: kernels of forward and backward. engine: casts, copies and sums. optimizer: the
            update.
        exposed: waits by what was waited for: a move ("all-gather", "reduce-scatter", "all-reduce",
            "state"), or a kernel beside.
        host: idle, since the host had not launched anything yet.
    """

    model: float = 0.0
    engine: float = 0.0
    optimizer: float = 0.0
    exposed: Mapping[str, float] = field(default_factory=dict)
    host: float = 0.0

    @property
    def step(self) -> float:
        return self.model + self.engine + self.optimizer + self.waits + self.host

    @property
    def waits(self) -> float:
        return sum(self.exposed.values())

    def plus(self, other: Parts, times: int) -> Parts:
        """These, and `times` times those."""
        names = {**self.exposed, **other.exposed}
        exposed = {k: self.exposed.get(k, 0.0) + times * other.exposed.get(k, 0.0) for k in names}
        model, engine, optimizer, host = (
            getattr(self, name) + times * getattr(other, name)
            for name in ("model", "engine", "optimizer", "host")
        )
        return Parts(model, engine, optimizer, exposed, host)


@dataclass(frozen=True)
class Timeline:
    """A step in the steady state; time 0 is the end of the step before it.

    Attributes:
        spans: of all streams, in the order of their launch. streams: their names, the compute
            stream's first.
        parts: of the step.
        exposed: seconds of waiting on the compute stream, by unit and by what was waited for.
        busy: seconds in which the kernels, each link and the host had work.
        middle: parts of one micro-batch between the first and the last; None where fewer than three
            were run.
        micro_batches: that were run.
    """

    spans: tuple[Span, ...]
    streams: tuple[str, ...]
    parts: Parts
    exposed: Mapping[str, Mapping[str, float]]
    busy: Mapping[str, float]
    middle: Parts | None = None
    micro_batches: int = 1

    @property
    def step(self) -> float:
        """Seconds."""
        return self.parts.step

    @property
    def bound(self) -> str:
        """What is busy longest: "compute", a link, or "host"."""
        return max(self.busy, key=lambda name: self.busy[name])

    def of(self, micro_batches: int) -> Parts:
        """Parts of a step of more micro-batches than were run: those in the middle are alike.

        Raises:
            ValueError: fewer than three were run, so that nothing is known of one in the middle.
        """
        if micro_batches == self.micro_batches:
            return self.parts
        if self.middle is None or micro_batches < self.micro_batches:
            raise ValueError(
                f"a timeline of {self.micro_batches} micro-batches says nothing of {micro_batches}:"
                " run 3."
            )
        return self.parts.plus(self.middle, micro_batches - self.micro_batches)

    def units(self) -> Iterator[tuple[str, str, float, float]]:
        """(unit, phase, begin, end) of each stretch in which the compute stream ran one unit's
        kernels and waits, in order.
        """
        now: tuple[str, str] | None = None
        begin = end = 0.0
        for span in self.spans:
            if span.stream != COMPUTE or span.kind == "engine":
                continue
            its = (span.unit or span.phase, span.phase)
            if its != now:
                if now is not None:
                    yield *now, begin, end
                now, begin = its, span.begin
            end = span.end
        if now is not None:
            yield *now, begin, end

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the spans."""
        return {
            "step": self.step,
            "parts": asdict(self.parts),
            "exposed_by_unit": {unit: dict(kinds) for unit, kinds in self.exposed.items()},
            "busy": dict(self.busy),
            "bound": self.bound,
            "micro_batches": self.micro_batches,
            "spans": len(self.spans),
        }


def parts_of(spans: list[Span], begin: float, end: float) -> Parts:
    """Of the compute stream's `spans`, those that end in (begin, end]."""
    seconds, exposed = defaultdict[str, float](float), defaultdict[str, float](float)
    for span in spans:
        if begin < span.end <= end + 1e-12:
            if span.kind == "wait":
                exposed[span.name] += span.seconds
            else:
                seconds[span.kind] += span.seconds
    model, engine, optimizer = (seconds[kind] for kind in ("model", "engine", "optimizer"))
    idle = end - begin - (model + engine + optimizer) - sum(exposed.values())
    return Parts(model, engine, optimizer, dict(exposed), max(idle, 0.0))
