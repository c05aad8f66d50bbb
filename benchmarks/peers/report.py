"""What a person looks at: the table (terminal or Markdown) and the plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.model import count_parameters
from benchmarks.peers.settings import NOTES, Setting
from benchmarks.peers.summary import Row

DASH = "–"
COLUMNS = (
    "peer",
    "step s",
    "× DDP",
    "range",
    "tokens/s",
    "cpu s",
    "peak MiB",
    "set-up MiB",
    "rest MiB",
    "sent MiB",
    "sent / X",
    "ledger MiB",
    "loss diff",
)
LEGEND = (
    "step s: median of the timed steps. × DDP: median of the rounds' ratios, with their range. cpu"
    " s: processor time of a rank in a step, all threads. Memory: a rank's resident set beyond what"
    " the imported libraries take; peak: in timed steps; set-up: while building and warming up;"
    " rest: between steps. sent: payload a rank gave its sockets in an optimizer step, as the"
    " kernel counts it; X: 4 bytes a parameter times (N-1)/N, so an fp32 all-reduce is 2. ledger:"
    " what Onefold says it sent. loss diff: largest relative difference to DDP's losses."
)


def cells(row: Row, setting: Setting) -> list[str]:
    """The row as text, one string a column."""
    if row.status != "ok":
        return [row.peer, row.status, *[DASH] * (len(COLUMNS) - 2)]
    unit = 4 * count_parameters(setting.model) * (setting.ranks - 1) / setting.ranks

    def shown(value: float | None, form: str = "{:,.0f}", scale: float = 1.0) -> str:
        return DASH if value is None else form.format(value / scale)

    spread = DASH if row.ratio_low is None else f"{row.ratio_low:.2f}-{row.ratio_high:.2f}"
    return [
        row.peer,
        shown(row.step_s, "{:.3f}"),
        shown(row.ratio, "{:.2f}"),
        spread,
        shown(row.tokens_a_second),
        shown(row.cpu_s, "{:.3f}"),
        shown(row.peak_mib),
        shown(row.set_up_peak_mib),
        shown(row.rest_mib),
        shown(row.sent_bytes, "{:,.1f}", 2**20),
        shown(row.sent_bytes, "{:.3f}", unit) if unit else DASH,
        shown(row.ledger_bytes, "{:,.1f}", 2**20),
        shown(row.loss_difference, "{:.1e}"),
    ]


def essence(error: str) -> str:
    """The line of a failed worker's output that says most: the last that names an error, else the
    last.
    """
    lines = [line.strip() for line in error.splitlines() if line.strip()] or [""]
    return next(
        (line for line in reversed(lines) if "Error" in line or "error:" in line), lines[-1]
    )[:300]


def plain_table(setting: Setting, rows: Sequence[Row]) -> str:
    """A table of aligned text, with a heading; failures are explained under it."""
    lines = [list(COLUMNS), *[cells(row, setting) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    text = [setting.title, ""]
    for number, line in enumerate(lines):
        padded = [
            c.rjust(w) if i else c.ljust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(padded).rstrip())
        if number == 0:
            text.append("  ".join("-" * w for w in widths))
    text += ["", *[f"{row.peer}: {row.status}: {essence(row.error)}" for row in rows if row.error]]
    return "\n".join(text).rstrip() + "\n"


def markdown_table(setting: Setting, rows: Sequence[Row]) -> str:
    """The same as a Markdown table, for a README."""
    head = f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}\n"
    body = "".join(f"| {' | '.join(cells(row, setting))} |\n" for row in rows)
    return f"**{setting.title}**\n\n{head}{body}"


def footnotes() -> str:
    """What the columns and the peers' names mean."""
    return LEGEND + "\n" + "\n".join(f"{peer}: {note}." for peer, note in NOTES.items())


def to_markdown(document: dict[str, Any]) -> str:
    """The whole report: machine, date, a table a setting, footnotes."""
    place, found = document["machine"], document["versions"]
    named = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    where = f"{place['cpu']}, {place['cores']} cores, {place['memory_gib']} GiB, {place['system']}"
    head = f"Measured {document['date']} on {where}; {named}.\n\n"
    tables = [
        markdown_table(Setting(**c["setting"]), [Row(**r) for r in c["rows"]])
        for c in document["comparisons"]
    ]
    return head + "\n".join(tables) + "\n" + footnotes().replace("\n", "\n\n") + "\n"


_COLORS = {
    "ddp": "#7f7f7f",
    "zero": "#9467bd",
    "fsdp2": "#d62728",
    "deepspeed": "#1f77b4",
    "onefold": "#2ca02c",
}


def plot(document: dict[str, Any], path: Path) -> bool:
    """Two bar charts a setting, step time as a multiple of DDP's and peak memory, as a PNG.

    False, and no file, where matplotlib is missing or nothing was measured.
    """
    compared = [
        (Setting(**c["setting"]), [Row(**r) for r in c["rows"] if r["status"] == "ok"])
        for c in document["comparisons"]
    ]
    compared = [(setting, rows) for setting, rows in compared if rows]
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not compared:
        return False
    figure = Figure(figsize=(13, 3.3 * len(compared)), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (setting, rows) in enumerate(compared):
        for side, (label, value, line) in enumerate(_CHARTS):
            axes = figure.add_subplot(len(compared), 2, 2 * number + side + 1)
            heights = [value(row) or 0.0 for row in rows]
            colors = [_COLORS.get(row.peer.partition("-")[0], "#bcbd22") for row in rows]
            bars = axes.bar([row.peer for row in rows], heights, color=colors)
            axes.bar_label(bars, fmt="%.2f" if side == 0 else "%.0f", fontsize=7)
            axes.set_ylabel(label, fontsize=8)
            axes.tick_params(axis="x", labelrotation=30, labelsize=7)
            axes.tick_params(axis="y", labelsize=7)
            axes.spines[["top", "right"]].set_visible(False)
            if line is not None:
                axes.axhline(line, color="black", linewidth=0.8, linestyle=":")
            if side == 0:
                axes.set_title(setting.title, fontsize=8, loc="left")
    figure.savefig(path, dpi=110)
    return True


_CHARTS: tuple[tuple[str, Callable[[Row], float | None], float | None], ...] = (
    ("step time, × DDP", lambda row: row.ratio, 1.0),
    ("peak memory of a rank, MiB", lambda row: row.peak_mib, None),
)
