"""When a step's kernels, collectives and waits ran. simulation/clock.py computes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: Kinds of spans.
Kind = Literal["model", "engine", "optimizer", "collective", "copy", "disk", "wait"]
#: The streams of the model's passes, and of the host's own work and waits.
COMPUTE, HOST = "compute", "host"
#: Names of copies between device and host, by direction: the keys of `Parts.exposed`.
COPIES = {"up": "copy up", "down": "copy down"}
#: The stream of reads and writes on NVMe, and their names: keys of `Parts.exposed` too.
DISK = "disk"
READ, WRITTEN = "read", "written"
#: The key of `Parts.exposed` for waits for steps in the backward pass, in a thread of the host.
BACKWARD_STEPS = "steps in the backward pass"


@dataclass(slots=True)
class Span:
    """A kernel, collective, copy, read, write or wait on a stream. On `HOST`, work or a wait of the
    host.

    Attributes:
        kind: "model", "engine" or "optimizer" for a kernel of theirs; "collective"; "copy" between
            device and host; "disk" for a read or write on NVMe; "wait".
        name: the operation, the move, one of `COPIES`, or `READ` or `WRITTEN`. unit: the unit it belongs to, "" for none. phase:
            "forward", "backward" or "optimizer".
        begin, end: seconds.
        nbytes: bytes that a collective sends, or that a copy, a read or a write moves.
        after: the index of the span that a wait waited for, or that a collective came after, or
            of the collective whose parts a kernel on another stream adds up; -1 for none.
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
    """Seconds of the compute stream. They add up to the step's seconds. Where the stream is idle,
    they tell what the host does meanwhile.

    Attributes:
        model: kernels of forward and backward. engine: casts, copies and sums. optimizer: the
            update, on the device or on the host.
        exposed: {what was waited for: seconds}. The key is a move ("all-gather", "reduce-scatter",
            "all-reduce", "state"), one of `COPIES`, `READ` or `WRITTEN`, `BACKWARD_STEPS`, or a kernel on
            another stream.
        host: idle time, because the host had not launched anything yet.
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

    @property
    def copies(self) -> float:
        """Seconds of `waits` for copies between device and host."""
        return sum(self.exposed.get(name, 0.0) for name in COPIES.values())

    @property
    def disk(self) -> float:
        """Seconds of `waits` for reads and writes on NVMe."""
        return self.exposed.get(READ, 0.0) + self.exposed.get(WRITTEN, 0.0)

    @property
    def steps(self) -> float:
        """Seconds of `waits` for steps in the backward pass."""
        return self.exposed.get(BACKWARD_STEPS, 0.0)

    @property
    def communication(self) -> float:
        """Seconds of `waits` for other ranks."""
        return self.waits - self.copies - self.disk - self.steps

    def plus(self, other: Parts, times: int) -> Parts:
        """Return these parts plus `times` times those of `other`."""
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
        spans: of all streams, in the order of their launch. streams: the names of the streams, the
            compute stream first.
        parts: the parts of the step.
        exposed: {unit: {what was waited for: seconds of waiting on the compute stream}}.
        busy: seconds in which the kernels, each link and the host had work.
        middle: the parts of one micro-batch between the first and the last; None if fewer than
            three were run.
        micro_batches: the number that was run.
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
        """Seconds of the step."""
        return self.parts.step

    @property
    def bound(self) -> str:
        """The resource that is busy longest: "compute", a link, or "host"."""
        return max(self.busy, key=lambda name: self.busy[name])

    def of(self, micro_batches: int) -> Parts:
        """Return the parts of a step of more micro-batches than were run, all of which are like the
        middle one.

        Raises:
            ValueError: fewer than three were run, so there was none in the middle.
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
        """Yield (unit, phase, begin, end) of each stretch of time in which the compute stream ran
        one unit's kernels and waits, in order.
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
        """Return plain data, without the spans."""
        return {
            "step": self.step,
            "parts": asdict(self.parts),
            "exposed_by_unit": {unit: dict(kinds) for unit, kinds in self.exposed.items()},
            "busy": dict(self.busy),
            "bound": self.bound,
            "micro_batches": self.micro_batches,
            "spans": len(self.spans),
        }


def parts_of(
    spans: list[Span], begin: float, end: float, host: Iterable[Span] = ()
) -> tuple[Parts, list[tuple[Span, float]]]:
    """Return the parts of the compute stream's `spans` that end in (begin, end], and the waits of
    the host that leave this stream idle, with the seconds in which they do.

    Args:
        host: what the host does.
    """
    seconds, exposed = defaultdict[str, float](float), defaultdict[str, float](float)
    mine = [span for span in spans if begin < span.end <= end + 1e-12]
    for span in mine:
        if span.kind == "wait":
            exposed[span.name] += span.seconds
        else:
            seconds[span.kind] += span.seconds
    idle = end - begin - sum(seconds.values()) - sum(exposed.values())
    waited = []
    for span, part in _while_idle(mine, begin, end, host):
        idle -= part
        if span.kind == "wait":
            exposed[span.name] += part
            waited.append((span, part))
        else:
            seconds[span.kind] += part
    model, engine, optimizer = (seconds[kind] for kind in ("model", "engine", "optimizer"))
    return Parts(model, engine, optimizer, dict(exposed), max(idle, 0.0)), waited


def _while_idle(
    spans: list[Span], begin: float, end: float, host: Iterable[Span]
) -> Iterator[tuple[Span, float]]:
    """Yield each of the host's spans that runs while none of `spans` does, and the seconds."""
    ends = [begin, *(span.end for span in spans)]
    gaps = [(a, b) for a, b in zip(ends, (*(s.begin for s in spans), end), strict=True) if a < b]
    at = 0
    for span in host:
        while at < len(gaps) and gaps[at][1] <= span.begin:
            at += 1
        part, i = 0.0, at
        while i < len(gaps) and gaps[i][0] < span.end:
            part += min(gaps[i][1], span.end) - max(gaps[i][0], span.begin)
            i += 1
        if part > 0:
            yield span, part
