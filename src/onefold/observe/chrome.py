"""A recording as Chrome trace events, for chrome://tracing and https://ui.perfetto.dev.

One process a rank; rows: compute, optimizer, waiting, and as many rows of gathers and of reductions
as were under way at once; a counter of memory by category. Times are microseconds from the window's
start, or torch.profiler's clock where its events are in the file too.

A simulated step (plan/timeline.py) has a row of units and a row for each stream; arrows lead from a
collective to the wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold.observe.memory import DEVICE, MOVED

if TYPE_CHECKING:
    from onefold.observe.trace import Recording
    from onefold.plan.timeline import Timeline

#: Process numbers of ranks in the file; far from real process ids, which torch.profiler's events
#: carry.
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


def write(recording: Recording, path: Path) -> Path:
    """See `Recording.write_chrome`."""
    profiler = recording.profiler_trace or {}
    own = events(recording, _offset(recording, profiler))
    trace = {
        **profiler,
        "traceEvents": [*profiler.get("traceEvents", []), *own],
        "displayTimeUnit": "ms",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace), encoding="utf-8")
    return path


def write_simulated(timeline: Timeline, path: Path, title: str) -> Path:
    """A simulated step; `title` names its process. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"traceEvents": simulated_events(timeline, title), "displayTimeUnit": "ms"}),
        encoding="utf-8",
    )
    return path


def simulated_events(timeline: Timeline, title: str) -> list[dict[str, Any]]:
    """The events of a simulated step."""
    process, rows = (
        FIRST_PROCESS,
        {name: row for row, name in enumerate(("units", *timeline.streams), 1)},
    )
    out = [_name("process_name", process, 0, title)]
    for name, row in rows.items():
        out += _row_named(process, row, name)

    def add(row: int, name: str, category: str, begin: float, end: float, **args: Any) -> None:
        at = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
        out.append(
            {
                "ph": "X",
                "name": name,
                "cat": category,
                "pid": process,
                "tid": row,
                **at,
                "args": args,
            }
        )

    for unit, phase, begin, end in timeline.units():
        add(rows["units"], f"{unit} {phase}", phase, begin, end, unit=unit, phase=phase)
    for number, span in enumerate(timeline.spans):
        facts: dict[str, Any] = {"unit": span.unit, "phase": span.phase, "kind": span.kind}
        facts |= {"bytes": span.nbytes} if span.nbytes else {}
        name = (
            f"waits for {span.name} {span.unit}"
            if span.kind == "wait"
            else f"{span.name} {span.unit}"
            if span.nbytes
            else span.name
        )
        add(rows[span.stream], name.strip(), span.kind, span.begin, span.end, **facts)
        if span.kind == "wait" and span.after >= 0:
            cause = timeline.spans[span.after]
            flow = {"cat": "wait", "name": "waited for", "id": number, "pid": process}
            out.append({"ph": "s", "tid": rows[cause.stream], "ts": cause.begin * 1e6, **flow})
            out.append(
                {"ph": "f", "bp": "e", "tid": rows[span.stream], "ts": span.begin * 1e6, **flow}
            )
    return out


def _row_named(process: int, row: int, title: str) -> list[dict[str, Any]]:
    sort = {
        "ph": "M",
        "name": "thread_sort_index",
        "pid": process,
        "tid": row,
        "args": {"sort_index": row},
    }
    return [_name("thread_name", process, row, title), sort]


def _offset(recording: Recording, profiler: dict[str, Any]) -> float:
    """Microseconds to add to a recorded time: the window begins at 0, or on the profiler's
    clock.
    """
    if not profiler:
        return -recording.start * 1e6
    return recording.epoch * 1e6 - profiler.get("baseTimeNanoseconds", 0) / 1e3


def events(recording: Recording, offset: float) -> list[dict[str, Any]]:
    """The window's events; `offset` in microseconds."""
    process = FIRST_PROCESS + recording.rank
    out: list[dict[str, Any]] = [
        _name(
            "process_name", process, 0, f"Onefold rank {recording.rank} of {recording.world_size}"
        )
    ]
    rows = 0

    def row(title: str) -> int:
        nonlocal rows
        rows += 1
        out.extend(_row_named(process, rows, title))
        return rows

    def add(thread: int, name: str, category: str, start: float, end: float, **args: Any) -> None:
        at = {"ts": start * 1e6 + offset, "dur": max(0.0, end - start) * 1e6}
        out.append(
            {
                "ph": "X",
                "name": name,
                "cat": category,
                "pid": process,
                "tid": thread,
                **at,
                "args": args,
            }
        )

    for kind in ("compute", "optimizer"):
        if found := [w for w in recording.work if w.kind == kind]:
            thread = row(kind)
            for w in found:
                add(
                    thread,
                    f"{w.unit or kind} {w.phase}" if w.unit else kind,
                    kind,
                    w.start,
                    w.end,
                    unit=w.unit,
                    phase=w.phase,
                )
    waits = [m for m in recording.moves if m.exposed > 0]
    if waits:
        for number, lane in enumerate(lanes((m.landed - m.exposed, m.landed, m) for m in waits)):
            thread = row("waiting" if not number else f"waiting {number + 1}")
            for start, end, m in lane:
                add(thread, f"waits for {m.move} {m.unit}", "exposed", start, end, unit=m.unit)
    for title in dict.fromkeys(ROWS.values()):
        chosen = [m for m in recording.moves if ROWS.get(m.move, OTHER) == title]
        for number, lane in enumerate(lanes((m.launched, m.landed, m) for m in chosen)):
            thread = row(title if not number else f"{title} {number + 1}")
            for start, end, m in lane:
                facts: dict[str, Any] = {
                    "unit": m.unit,
                    "bytes": m.nbytes,
                    "dtype": m.dtype,
                    "ranks": m.group,
                    "phase": m.phase,
                }
                facts |= {
                    name: n
                    for name, n in (("between nodes", m.between), ("encoded from", m.plain))
                    if n
                }
                add(
                    thread,
                    f"{m.move} {m.unit}",
                    m.move,
                    start,
                    end,
                    **facts,
                    exposed_ms=1000 * m.exposed,
                )
    for tier in (DEVICE, *recording.tiers):
        times, levels = recording.levels(tier)
        name = "memory" if tier == DEVICE else f"memory, {tier}"
        for i, at in enumerate(times):
            values = {category: series[i] for category, series in levels.items()}
            out.append(
                {
                    "ph": "C",
                    "name": name,
                    "pid": process,
                    "tid": 0,
                    "ts": at * 1e6 + offset,
                    "args": values,
                }
            )
    return out


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def lanes(spans: Iterable[tuple[float, float, Any]]) -> list[list[tuple[float, float, Any]]]:
    """`spans` (start, end, what) on as few rows as are needed for no two of a row to overlap; each
    row in order of time.
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
