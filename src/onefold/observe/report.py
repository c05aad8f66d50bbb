"""The report: one self-contained HTML page of a run, which opens offline.

    metrics.jsonl            ─► loss, throughput
    observed.json            ─► the plan, the recipe
    observed-rank*.json      ─► memory and timeline of a step, traffic, predicted against measured, the ranks' steps

What the run did not leave has no section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from onefold.comm import STEP_MOVES
from onefold.observe.memory import ordered
from onefold.observe.runfile import (
    METRICS,
    RUN_FILE,
    Observed,
    RunFileError,
    read_metrics,
    read_observed,
)
from onefold.observe.trace import Recording
from onefold.plan.schema import MOVED, Account
from onefold.wording import readable

MIB = 1 << 20
#: The rows on which moves are drawn.
ROWS = {"all-gather": "gathers", "reduce-scatter": "reductions", "all-reduce": "reductions"}
ROWS |= dict.fromkeys(MOVED, "to and from host and NVMe")
OTHER = "other moves"
#: The parts of a step that do not overlap.
PARTS = ("compute", "exposed communication", "optimizer")


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of the run in a folder and return its path.

    Args:
        run: the output folder of `onefold train`, or one that `write_observed` wrote to.
        out: the file to write; None is `report.html` in the folder.

    Raises:
        RunFileError: the folder has nothing to report, or has a file that cannot be read; plotly or
            jinja2 is not installed.
    """
    try:
        import jinja2
        import plotly  # type: ignore[import-untyped]  # noqa: F401
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        raise RunFileError(f"{error}: pip install 'onefold[report]'") from None

    found: dict[str, Any] = sections(Path(run))
    library = True  # only the first figure brings plotly's own code
    for title, section in found.items():
        if hasattr(section, "to_html"):
            # plotly escapes what it is given
            found[title] = Markup(section.to_html(full_html=False, include_plotlyjs=library))
            library = False
    source = files("onefold.observe").joinpath("report.html").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(source)
    path = Path(out or Path(run, "report.html"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(template.render(title=Path(run).resolve().name, sections=found), "utf-8")
    return path


def sections(folder: Path) -> dict[str, Any]:
    """Return the sections of the page, {title: a figure, the rows of a table, or text}. Raises as
    `write_report`.
    """
    rows = read_metrics(folder)
    run = read_observed(folder) if (folder / RUN_FILE).exists() else Observed(1)
    found, recipe = dict[str, Any](), run.facts.pop("recipe", "")
    if run.facts or run.ranks:
        facts = {**run.facts, "ranks in this report": f"{len(run.ranks)} of {run.world_size}"}
        found["Run"] = [{"what": name.replace("_", " "), "is": str(facts[name])} for name in facts]
    found["Loss"] = _curves(rows, "loss", "eval_loss")
    found["Tokens a second"] = _curves(rows, "tokens_per_s")
    recorded = [rank for rank in run.ranks if rank.step is not None] or run.ranks
    if recorded:
        fullest = max(recorded, key=lambda rank: rank.measured.peak_bytes)
        of = f"rank {fullest.rank}, which held most" if run.world_size > 1 else "the rank"
        if run.plan is not None:
            found["Predicted and measured"] = comparison(run.plan, fullest.measured)
        if (step := fullest.step) is not None:
            for tier in step.tiers:
                found[f"Memory of {of}: {tier}"] = _memory(step, tier, run.plan)
            found[f"Timeline of {of}"] = _timeline(step)
            found[f"MiB sent in a step by {of}"] = _bars(_traffic(step), "MiB")
    times = {
        f"rank {rank.rank}": {part: 1000 * rank.measured.seconds[part] for part in PARTS}
        for rank in run.ranks
        if rank.measured.seconds.get("step")
    }
    found["Parts of each rank's step"] = _bars(times, "ms")
    found["Recipe"] = recipe
    found = {title: section for title, section in found.items() if section}
    if not found:
        raise RunFileError(
            f"{folder} is not the output folder of a run: it has no {METRICS} or {RUN_FILE} with"
            f" figures. `onefold train --output {folder}` writes them."
        )
    return found


def comparison(plan: Account, measured: Account) -> list[dict[str, str]]:
    """Return both accounts line by line, first the lines of the plan. At peak, the plan counts logits
    with their fp32 copy and their gradient; the ledger counts only what is saved.
    """
    titles = "of one rank", "predicted", "measured", "measured ÷ predicted"
    told, seen = (
        {(title, part, unit): n for title, part, unit, n in account.lines()}
        for account in (plan, measured)
    )
    rows = []
    for title, part, unit in told | seen:
        a, b = (found.get((title, part, unit), 0) for found in (told, seen))
        name, ratio = f"{title}: {part}" if part else title, f"{b / a:.3f}" if a and b else "–"
        values = name, _said(a, unit), _said(b, unit), ratio
        if a or b:
            rows.append(dict(zip(titles, values, strict=True)))
    return rows


def _said(value: float, unit: str) -> str:
    """Format a figure of an account, of unit "bytes", "s", "1/s" or ""."""
    if not value:
        return "–"
    if unit == "bytes":
        return readable(value)
    if unit == "s":
        return f"{1000 * value:,.4g} ms"
    return f"{value:,.0f}" if unit == "1/s" else f"{value:.1%}"


def _figure(**layout: Any) -> Any:
    from plotly.graph_objects import Figure  # type: ignore[import-untyped]

    return Figure(layout={"template": "plotly_white", **layout})


def _curves(rows: list[dict[str, Any]], *names: str) -> Any:
    figure = _figure(xaxis_title="step", height=350)
    for name in names:
        found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if found:
            figure.add_scatter(
                x=[x for x, _ in found], y=[y for _, y in found], name=name, showlegend=True
            )
    return figure if figure.data else None


def _bars(values: Mapping[str, Mapping[str, float]], unit: str) -> Any:
    """Draw a bar for each name, stacked of its parts."""
    rows = {"autorange": "reversed", "type": "category", "automargin": True}
    height = min(800, 200 + 20 * len(values))
    figure = _figure(barmode="stack", xaxis_title=unit, yaxis=rows, height=height)
    for part in dict.fromkeys(part for parts in values.values() for part in parts):
        lengths = [parts.get(part, 0) for parts in values.values()]
        figure.add_bar(orientation="h", y=list(values), x=lengths, name=part)
    return figure if figure.data else None


def _traffic(step: Recording) -> dict[str, dict[str, float]]:
    """Return the MiB that a rank sends in one step by unit, in the order of the run, then by move."""
    sent: dict[str, dict[str, float]] = {}
    for m in step.moves:
        if m.move in STEP_MOVES:
            of_unit = sent.setdefault(m.unit, {})
            of_unit[m.move] = of_unit.get(m.move, 0.0) + m.nbytes / MIB / max(1, step.steps)
    return sent


def _memory(step: Recording, tier: str, plan: Account | None) -> Any:
    """Draw what a tier held by category, and a line of what the plan says."""
    figure = _figure(xaxis_title="ms", yaxis_title="MiB", hovermode="x unified")
    levels = [*step.tiers[tier].levels(step.start)]
    times = [1000 * (at - step.start) for at, _ in (*levels, (step.end, None))]
    for category in ordered({name: n for _, level in levels for name, n in level.items() if n}):
        held = [level.get(category, 0) / MIB for _, level in (*levels, levels[-1])]
        figure.add_scatter(x=times, y=held, name=category, stackgroup="held", line_shape="hv")
    planned = 0
    if plan is not None and tier != "device":
        planned = sum(plan.offloaded.get(tier, {}).values())
    elif plan is not None and step.activations_watched:
        planned = plan.peak_bytes
    if planned:
        figure.add_hline(planned / MIB, line_dash="dash", annotation_text="plan")
    return figure if figure.data else None


def _timeline(step: Recording) -> Any:
    """Draw the optimizer's steps, the moves, and, in red, the waits for moves."""
    rows = {"autorange": "reversed", "automargin": True}
    figure = _figure(barmode="overlay", xaxis_title="ms", yaxis=rows)
    kinds: dict[str, list[Span]] = {}
    for span in sorted(spans_of(step), key=lambda s: s.start - s.end):  # what lies inside is on top
        kinds.setdefault(span.kind, []).append(span)
    for kind, here in kinds.items():
        figure.add_bar(
            orientation="h", y=[s.row for s in here], base=[1000 * (s.start - step.start) for s in here],
            x=[1000 * (s.end - s.start) for s in here], name=kind, opacity=0.7, hoverinfo="text",
            marker_color="crimson" if kind == "exposed" else None,
            hovertext=[f"{s.name}: {_said(s.end - s.start, 's')}" for s in here],
        )  # fmt: skip
    return figure if kinds else None


@dataclass
class Span:
    """A bar on a row of the timeline. `start`, `end`: seconds."""

    row: str
    name: str
    kind: str
    start: float
    end: float


def spans_of(step: Recording) -> list[Span]:
    """Return the optimizer's steps, the waits and the moves of a window, in order. Those that overlap are
    on rows of their own.
    """
    spans = [Span("optimizer", "optimizer", "optimizer", *update) for update in step.updates]
    for m in step.moves:
        name, row = f"{m.move} {m.unit}", ROWS.get(m.move, OTHER)
        about = f"{name}, {readable(m.nbytes)} of {m.dtype}, {m.phase}"
        spans.append(Span(row, about, m.move, m.launched, m.landed))
        if m.exposed > 0:
            since = m.landed - m.exposed
            spans.append(Span("waiting", f"waits for {name}", "exposed", since, m.landed))
    spans.sort(key=lambda span: (span.start, span.end))
    ends: dict[str, list[float]] = {}  # of each row, when its lanes are free
    for span in spans:
        lanes = ends.setdefault(span.row, [])
        lane = next((i for i, end in enumerate(lanes) if end <= span.start), len(lanes))
        lanes[lane : lane + 1] = [span.end]
        span.row += f" {lane + 1}" if lane else ""
    return spans
