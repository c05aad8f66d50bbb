"""Write a recorded step as Chrome trace events, for chrome://tracing and https://ui.perfetto.dev.

Each rank is one process. Its rows are optimizer and waiting, and as many rows of gathers
and of reductions as ran at the same time. A counter shows memory by category. Times are
microseconds from the window's start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold.plan.schema import MOVED

if TYPE_CHECKING:
    from onefold.observe.trace import Recording

#: The first process number of ranks in the file, far from real process ids.
FIRST_PROCESS = 10_000_000
OTHER = "other moves"
#: The rows on which moves are drawn.
ROWS = {"all-gather": "gathers", "reduce-scatter": "reductions", "all-reduce": "reductions"}
ROWS |= dict.fromkeys(MOVED, "to and from host and NVMe")


@dataclass(frozen=True)
class Span:
    """A bar on a row. `start`, `end`: seconds."""

    row: str
    name: str
    kind: str
    start: float
    end: float
    facts: dict[str, Any] = field(default_factory=dict)


def write(recording: Recording, path: Path) -> Path:
    """See `Recording.write_chrome`."""
    events: list[dict[str, Any]] = []
    rows: dict[str, int] = {}

    def event(kind: str, row: int, at: float | None = None, **facts: Any) -> None:
        when = {} if at is None else {"ts": (at - recording.start) * 1e6}
        process = FIRST_PROCESS + recording.rank
        events.append({"ph": kind, "pid": process, "tid": row, **when, **facts})

    title = f"Onefold rank {recording.rank} of {recording.world_size}"
    event("M", 0, name="process_name", args={"name": title})
    for span in spans_of(recording):
        if span.row not in rows:
            row = rows[span.row] = len(rows) + 1
            event("M", row, name="thread_name", args={"name": span.row})
            event("M", row, name="thread_sort_index", args={"sort_index": row})
        long = max(0.0, span.end - span.start) * 1e6
        about = {"name": span.name, "cat": span.kind, "args": span.facts}
        event("X", rows[span.row], span.start, dur=long, **about)
    for tier in recording.tiers:
        times, levels = recording.levels(tier)
        name = "memory" if tier == "device" else f"memory, {tier}"
        for at, *values in zip(times, *levels.values(), strict=True):
            event("C", 0, at, name=name, args=dict(zip(levels, values, strict=True)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return path


def spans_of(recording: Recording) -> Iterator[Span]:
    """Yield the optimizer's steps, the waits and the moves of a window, row by row."""
    for start, end in recording.updates:
        yield Span("optimizer", "optimizer", "optimizer", start, end)
    waits, moves = [], []
    for m in recording.moves:
        name = f"{m.move} {m.unit}"
        facts: dict[str, Any] = {
            "unit": m.unit,
            "bytes": m.nbytes,
            "dtype": m.dtype,
            "ranks": m.group,
            "phase": m.phase,
            "exposed_ms": 1000 * m.exposed,
        }
        facts |= {"between nodes": m.between} if m.between else {}
        facts |= {"encoded from": m.plain} if m.plain else {}
        row = ROWS.get(m.move, OTHER)
        moves.append(Span(row, name, m.move, m.launched, m.landed, facts))
        if m.exposed > 0:
            since, of = m.landed - m.exposed, {"unit": m.unit}
            waits.append(Span("waiting", f"waits for {name}", "exposed", since, m.landed, of))
    for row in ("waiting", *dict.fromkeys(ROWS.values()), OTHER):
        yield from _beside([span for span in (*waits, *moves) if span.row == row])


def _beside(spans: list[Span]) -> Iterator[Span]:
    """Distribute the spans of a row over as few rows as possible, so that none overlap."""
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        lane = next((i for i, end in enumerate(ends) if end <= span.start), len(ends))
        ends[lane : lane + 1] = [span.end]
        yield replace(span, row=f"{span.row} {lane + 1}") if lane else span
