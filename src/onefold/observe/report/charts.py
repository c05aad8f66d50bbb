"""The charts of the page.

loss, throughput        over the whole run
memory, timeline        of one recorded step of one rank: memory held; work, moves and waits
traffic, step_times     across units and ranks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onefold.comm import STEP_MOVES
from onefold.observe.chrome import lanes
from onefold.observe.memory import DEVICE, MOVED
from onefold.observe.report.figures import (
    COLOURS,
    Figure,
    byte_unit,
    figure,
    in_bytes,
    in_seconds,
    plotly,
    thinned,
)
from onefold.observe.report.tables import Metrics
from onefold.observe.runfile import RankObserved
from onefold.observe.trace import Move, Recording, merged
from onefold.plan.schema import ENGINE, MOMENTS, Account

#: The most levels of memory that are drawn; a screen cannot show more.
LEVELS = 1500
#: The most waits that are shaded over all rows.
SHADED = 60
#: From this many steps on, a running mean is drawn over the loss.
SMOOTHED_FROM = 40


def loss(metrics: Metrics) -> Figure | None:
    """Draw the loss by step, with its running mean on long runs and the held-out loss as points."""
    steps, values = metrics.series("loss")
    if not steps:
        return None
    says, blue = "%{y:.4f}", "#4269d0"
    many = len(steps) >= SMOOTHED_FROM
    traces = [_line(steps, values, "loss", says, 0.35 if many else None, color=blue, width=1.5)]
    if many:
        mean = _running_mean(values, max(5, len(values) // 25))
        traces.append(_line(steps, mean, "running mean", says, color=blue, width=2.5))
    at, held_out = metrics.series("eval_loss")
    if at:
        held = _line(at, held_out, "held out", says, color="#efb118", dash="dot")
        held.mode = "lines+markers"
        held.marker = {"color": "#efb118", "size": 8, "line": {"color": "#8a6400", "width": 1}}
        traces.append(held)
    return figure(
        traces, height=320, x="step", y="loss", hovermode="x unified", showlegend=len(traces) > 1
    )


def throughput(metrics: Metrics) -> Figure | None:
    """Draw the tokens per second by step, and their median."""
    steps, values = metrics.series("tokens_per_s")
    if not steps:
        return None
    style: dict[str, Any] = {"color": "#3ca951", "width": 1.5}
    traces = [_line(steps, values, "tokens/s", "%{y:,.0f} tokens/s", **style)]
    typical = metrics.typical("tokens_per_s")
    if typical is not None and len(steps) > 1:
        ends = [steps[0], steps[-1]]
        name = f"median {typical:,.0f}"
        traces.append(_line(ends, [typical, typical], name, "", dash="dash", **style))
    return figure(
        traces,
        height=320,
        x="step",
        y="tokens/s",
        yaxis={"rangemode": "tozero"},
        hovermode="x unified",
        showlegend=True,
    )


def _line(
    x: Sequence[float],
    y: Sequence[float],
    name: str,
    says: str,
    opacity: float | None = None,
    **line: Any,
) -> Any:
    """Return a line, or a marker for a single point. `says`: the hover text, "" for none."""
    mode = "lines" if len(x) > 1 else "markers"
    hover = {"hovertemplate": says} if says else {"hoverinfo": "skip"}
    return plotly().Scatter(x=x, y=y, name=name, mode=mode, line=line, opacity=opacity, **hover)


def _running_mean(values: list[float], window: int) -> list[float]:
    out, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        out.append(total / min(i + 1, window))
    return out


#: Above this many bars, not every bar has a label.
CROWDED = 40


def traffic(by_unit: Mapping[str, Mapping[str, int]]) -> Figure | None:
    """Draw the payload bytes that a rank sends in a step, by unit in the order of the run, stacked
    by move.
    """
    go = plotly()
    if not by_unit:
        return None
    units = list(by_unit)
    unit, size = byte_unit([sum(moves.values()) for moves in by_unit.values()])
    present = [m for m in STEP_MOVES if any(by_unit[u].get(m) for u in units)]
    traces = [
        go.Bar(
            orientation="h", y=units, x=[by_unit[u].get(m, 0) / size for u in units], name=m, marker={"color": COLOURS[m]},
            customdata=[in_bytes(by_unit[u].get(m, 0)) for u in units], hovertemplate=f"%{{y}}<br>{m}: %{{customdata}}<extra></extra>",
        )
        for m in present
    ]  # fmt: skip
    return _stacked(traces, len(units), 26, f"{unit} a step")


def step_times(ranks: Sequence[RankObserved]) -> Figure | None:
    """Draw the parts of each rank's step."""
    go = plotly()
    timed = [
        r for r in ranks if r.measured.seconds.get("step") and r.measured.seconds.get("compute")
    ]
    if not timed:
        return None
    names = [f"rank {r.rank}" for r in timed]
    parts = {
        "compute": "compute",
        "waiting (exposed)": "exposed communication",
        "optimizer": "optimizer",
    }
    values = {
        label: [r.measured.seconds.get(key, 0.0) for r in timed] for label, key in parts.items()
    }
    values["other"] = [
        max(0.0, r.measured.seconds["step"] - sum(v[i] for v in values.values()))
        for i, r in enumerate(timed)
    ]
    traces = [
        go.Bar(
            orientation="h", y=names, x=[1000 * s for s in seconds], name=label, marker={"color": COLOURS[label.partition(" ")[0]]},
            customdata=[in_seconds(s) for s in seconds], hovertemplate=f"%{{y}}<br>{label}: %{{customdata}}<extra></extra>",
        )
        for label, seconds in values.items()
    ]  # fmt: skip
    return _stacked(traces, len(names), 30, "ms of a step")


def _stacked(traces: list[Any], bars: int, height: int, x: str) -> Figure:
    """Return stacked horizontal bars, each `height` pixels."""
    crowded = bars > CROWDED
    ticks = {"nticks": 20} if crowded else {"dtick": 1}
    axis = {"autorange": "reversed", "type": "category", "title": {"text": ""}, **ticks}
    return figure(
        traces,
        height=700 if crowded else 110 + height * bars,
        x=x,
        y="",
        yaxis=axis,
        barmode="stack",
        bargap=0.05 if crowded else 0.3,
    )


def planned_peak(plan: Account, step: Recording) -> tuple[str, int]:
    """Return (name, bytes) of the plan's line, without activations if they were not recorded."""
    if step.activations_watched:
        return "plan's peak", plan.peak_bytes
    engine = plan.ledger or {c: plan.peak.get(c, 0) for c in ENGINE}
    return "plan's peak without activations", sum(engine.values()) + plan.peak.get(MOMENTS, 0)


def _lines(step: Recording, plan: Account | None, tier: str) -> list[tuple[str, int, str]]:
    """Return the plan's lines for the memory of a tier: (name, bytes, dash style)."""
    if plan is None:
        return []
    if tier != DEVICE:
        planned = {there.value: nbytes for there, nbytes in plan.by_tier.items()}[tier]
        return [("plan", planned, "dash")] if planned else []
    out = [(*planned_peak(plan, step), "dash")] if plan.peak else []
    return (
        [*out, ("plan's bound", plan.bound, "dot")]
        if out and plan.bound and step.activations_watched
        else out
    )


def memory(step: Recording, plan: Account | None, tier: str = DEVICE) -> Figure:
    """Draw the bytes held on a tier over the step, stacked by category, with the plan's lines."""
    go = plotly()
    times, series = thinned(*step.levels(tier), LEVELS)
    x = [1000 * (t - step.start) for t in times]
    totals = [sum(level) for level in zip(*series.values(), strict=True)] or [0]
    lines = _lines(step, plan, tier)
    unit, size = byte_unit([*totals, *(n for _, n, _ in lines)])
    traces = [
        go.Scatter(
            x=x, y=[n / size for n in values], name=category, stackgroup="held", mode="lines", hovertemplate=f"%{{y:.3~f}} {unit}",
            line={"width": 0.5, "shape": "hv", "color": COLOURS.get(category, "#888888")},
            fillcolor=_pale(COLOURS.get(category, "#888888"), 0.8),
        )
        for category, values in series.items()
    ]  # fmt: skip
    for name, nbytes, dash in lines:
        style: dict[str, Any] = {"color": COLOURS["waiting"], "width": 2, "dash": dash}
        ends = [x[0], x[-1]]
        traces.append(_line(ends, [nbytes / size] * 2, name, f"%{{y:.3~f}} {unit}", **style))
    return figure(
        traces,
        height=420 if tier == DEVICE else 300,
        x="ms",
        y=unit,
        yaxis={"rangemode": "tozero"},
        hovermode="x unified",
    )


def timeline(step: Recording) -> Figure:
    """Draw the work, the moves, and, in red, the waits for moves."""
    go = plotly()
    rows: list[str] = []
    traces: list[Any] = []
    shown: set[str] = set()

    def bars(row: str, label: str, colour: str, spans: list[tuple[float, float, str]]) -> None:
        if not spans:
            return
        if row not in rows:
            rows.append(row)
        traces.append(
            go.Bar(
                orientation="h", y=[row] * len(spans), base=[1000 * (a - step.start) for a, _, _ in spans],
                x=[1000 * (b - a) for a, b, _ in spans], customdata=[text for _, _, text in spans], name=label,
                hovertemplate="%{customdata}<extra></extra>", legendgroup=label, showlegend=label not in shown, width=0.72,
                marker={"color": colour, "line": {"width": 0}},
            )
        )  # fmt: skip
        shown.add(label)

    blocks = any(w.unit != "(root)" for w in step.work if w.kind == "compute")
    for phase in ("forward", "backward"):
        # Longest first, so that a unit inside another is drawn on top of it
        found = sorted(
            (w for w in step.work if w.kind == "compute" and w.phase == phase),
            key=lambda w: w.start - w.end,
        )
        texts = [
            (w.start, w.end, f"{w.unit}<br>{phase}, {in_seconds(w.end - w.start)}") for w in found
        ]
        if blocks:  # the root around the units is paler, and drawn under them
            around = [t for t, w in zip(texts, found, strict=True) if w.unit == "(root)"]
            texts = [t for t, w in zip(texts, found, strict=True) if w.unit != "(root)"]
            bars("compute", f"{phase}, root", _pale(COLOURS[phase]), around)
        bars("compute", phase, COLOURS[phase], texts)
    optimizer = [w for w in step.work if w.kind == "optimizer"]
    bars(
        "compute",
        "optimizer",
        COLOURS["optimizer"],
        [(w.start, w.end, f"optimizer<br>{in_seconds(w.end - w.start)}") for w in optimizer],
    )
    _moves(step, bars)
    waits = [m for m in step.moves if m.exposed > 0]
    texts = [
        (
            m.landed - m.exposed,
            m.landed,
            f"waits for {m.move} of {m.unit}<br>{in_seconds(m.exposed)}",
        )
        for m in waits
    ]
    bars("waiting", "waiting (exposed)", COLOURS["waiting"], texts)
    shapes = [
        {"type": "rect", "xref": "x", "yref": "paper", "x0": 1000 * (a - step.start), "x1": 1000 * (b - step.start), "y0": 0, "y1": 1,
         "fillcolor": COLOURS["waiting"], "opacity": 0.13, "line": {"width": 0}, "layer": "below"}
        for a, b in sorted(merged(step.waits()), key=lambda span: span[0] - span[1])[:SHADED]
    ]  # fmt: skip
    order = sorted(
        rows,
        key=lambda row: (
            ["compute", "gather", "reduce", "other", "waiting"].index(row.split()[0]),
            row,
        ),
    )
    axis = {
        "categoryorder": "array",
        "categoryarray": order[::-1],
        "type": "category",
        "title": {"text": ""},
    }
    ends = {"range": [0, 1000 * step.seconds]}
    height = 150 + 46 * len(order)
    return figure(
        traces,
        height=height,
        x="ms",
        y="",
        xaxis=ends,
        yaxis=axis,
        barmode="overlay",
        shapes=shapes,
        hovermode="closest",
    )


def _moves(step: Recording, bars: Any) -> None:
    for row, moves in (
        ("gather", ("all-gather",)),
        ("reduce", ("reduce-scatter", "all-reduce")),
        ("other", None),
    ):
        # Moves between tiers are not drawn: when they end is not known
        known = ("all-gather", "reduce-scatter", "all-reduce", *MOVED)
        chosen = [m for m in step.moves if (m.move in moves if moves else m.move not in known)]
        for number, lane in enumerate(lanes((m.launched, m.landed, m) for m in chosen)):
            here = row if not number else f"{row} {number + 1}"
            for move in dict.fromkeys(m.move for _, _, m in lane):
                bars(
                    here,
                    move,
                    COLOURS.get(move, "#888888"),
                    [(a, b, _said(m)) for a, b, m in lane if m.move == move],
                )


def _said(m: Move) -> str:
    hidden = (
        f", of which {in_seconds(m.exposed)} exposed"
        if m.exposed > 0
        else ", all behind other work"
    )
    among = f" among ranks {m.group}" if m.group else ""
    what = (
        f"{in_bytes(m.nbytes)} encoded from {in_bytes(m.plain)}"
        if m.plain
        else f"{in_bytes(m.nbytes)} as {m.dtype}"
    )
    return f"{m.move} of {m.unit}{among}<br>{what}, {in_seconds(m.landed - m.launched)}{hidden}"


def _pale(colour: str, strength: float = 0.35) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{strength})"
