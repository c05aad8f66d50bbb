"""Write a recording as Chrome trace events, for chrome://tracing and https://ui.perfetto.dev.

Each rank is one process. Its rows are compute, optimizer and waiting, and as many rows of gathers
and of reductions as ran at the same time. A counter shows memory by category. Times are
microseconds from the window's start.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold.observe.memory import DEVICE, MOVED

if TYPE_CHECKING:
    from onefold.observe.trace import Recording

#: The first process number of ranks in the file, far from real process ids.
FIRST_PROCESS = 10_000_000
OTHER, BETWEEN = "other moves", "to and from host and NVMe"
#: The rows on which moves are drawn.
ROWS = {
    "all-gather": "gathers",
    "reduce-scatter": "reductions",
    "all-reduce": "reductions",
    "state": OTHER,
}
ROWS |= dict.fromkeys(MOVED, BETWEEN)


class _Trace:
    """The events of one process of the file. `offset`: microseconds to add to a time."""

    def __init__(self, process: int, title: str, offset: float = 0.0) -> None:
        self.process, self.offset = process, offset
        self.events: list[dict[str, Any]] = []
        self._rows = 0
        self.event("M", 0, name="process_name", args={"name": title})

    def event(self, kind: str, row: int, at: float | None = None, **facts: Any) -> None:
        """Add an event of Chrome's type `kind`. `at`: seconds."""
        when = {} if at is None else {"ts": at * 1e6 + self.offset}
        self.events.append({"ph": kind, "pid": self.process, "tid": row, **when, **facts})

    def row(self, title: str) -> int:
        """Add a row below the others, and return its number."""
        self._rows += 1
        self.event("M", self._rows, name="thread_name", args={"name": title})
        self.event("M", self._rows, name="thread_sort_index", args={"sort_index": self._rows})
        return self._rows

    def span(
        self, row: int, name: str, category: str, start: float, end: float, **args: Any
    ) -> None:
        """Add a span of time. `start`, `end`: seconds."""
        long = max(0.0, end - start) * 1e6
        self.event("X", row, start, name=name, cat=category, dur=long, args=args)

    def lanes(self, title: str, spans: Iterable[tuple[float, float, Any]]) -> Iterator[Any]:
        """Yield (row, start, end, what) of `spans`, on as many rows as they need."""
        for number, lane in enumerate(lanes(spans)):
            row = self.row(title if not number else f"{title} {number + 1}")
            for start, end, what in lane:
                yield row, start, end, what


def write(recording: Recording, path: Path) -> Path:
    """See `Recording.write_chrome`."""
    return _write(path, events(recording))


def _write(path: Path, made: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"traceEvents": made, "displayTimeUnit": "ms"}
    path.write_text(json.dumps(whole), encoding="utf-8")
    return path


def events(recording: Recording) -> list[dict[str, Any]]:
    """Return the window's events."""
    title = f"Onefold rank {recording.rank} of {recording.world_size}"
    trace = _Trace(FIRST_PROCESS + recording.rank, title, -recording.start * 1e6)
    for kind in ("compute", "optimizer"):
        if found := [w for w in recording.work if w.kind == kind]:
            row = trace.row(kind)
            for w in found:
                name = f"{w.unit} {w.phase}" if w.unit else kind
                trace.span(row, name, kind, w.start, w.end, unit=w.unit, phase=w.phase)
    waits = [(m.landed - m.exposed, m.landed, m) for m in recording.moves if m.exposed > 0]
    for row, start, end, m in trace.lanes("waiting", waits):
        trace.span(row, f"waits for {m.move} {m.unit}", "exposed", start, end, unit=m.unit)
    for title in dict.fromkeys(ROWS.values()):
        chosen = [m for m in recording.moves if ROWS.get(m.move, OTHER) == title]
        for row, start, end, m in trace.lanes(title, ((m.launched, m.landed, m) for m in chosen)):
            facts: dict[str, Any] = {
                "unit": m.unit,
                "bytes": m.nbytes,
                "dtype": m.dtype,
                "ranks": m.group,
                "phase": m.phase,
            }
            facts |= {"between nodes": m.between} if m.between else {}
            facts |= {"encoded from": m.plain} if m.plain else {}
            facts["exposed_ms"] = 1000 * m.exposed
            trace.span(row, f"{m.move} {m.unit}", m.move, start, end, **facts)
    for tier in (DEVICE, *recording.tiers):
        times, levels = recording.levels(tier)
        name = "memory" if tier == DEVICE else f"memory, {tier}"
        for i, at in enumerate(times):
            values = {category: series[i] for category, series in levels.items()}
            trace.event("C", 0, at, name=name, args=values)
    return trace.events


def lanes(spans: Iterable[tuple[float, float, Any]]) -> list[list[tuple[float, float, Any]]]:
    """Distribute `spans` (start, end, what) over as few rows as possible, so that no two spans of a
    row overlap. Each row is in order of time.
    """
    rows: list[list[tuple[float, float, Any]]] = []
    for span in sorted(spans, key=lambda s: (s[0], s[1])):
        for row in rows:
            if row[-1][1] <= span[0]:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows
