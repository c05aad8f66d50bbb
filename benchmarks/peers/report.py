"""What a person looks at: the table (terminal or Markdown) and the plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Cell, range_of, shown
from benchmarks.peers.model import count_parameters
from benchmarks.peers.settings import NOTES, Setting
from benchmarks.peers.summary import Row

LEGEND = (
    "step s: median of the timed steps. × DDP: median of the rounds' ratios, with their range. cpu"
    " s: processor time of a rank in a step, all threads. Memory: a rank's resident set beyond what"
    " the imported libraries take; peak: in timed steps; set-up: while building and warming up;"
    " rest: between steps. sent: payload a rank gave its sockets in an optimizer step, as the"
    " kernel counts it; X: 4 bytes a parameter times (N-1)/N, so an fp32 all-reduce is 2. ledger:"
    " what Onefold says it sent. loss diff: largest relative difference to DDP's losses."
)


def columns(setting: Setting) -> dict[str, Cell]:
    """What the table shows of a row of this setting."""
    unit = 4 * count_parameters(setting.model) * (setting.ranks - 1) / setting.ranks
    return {
        "peer": shown("peer"),
        "step s": shown("step_s", "{:.3f}"),
        "× DDP": shown("ratio", "{:.2f}"),
        "range": range_of("ratio_low", "ratio_high"),
        "tokens/s": shown("tokens_a_second", "{:,.0f}"),
        "cpu s": shown("cpu_s", "{:.3f}"),
        "peak MiB": shown("peak_mib", "{:,.0f}"),
        "set-up MiB": shown("set_up_peak_mib", "{:,.0f}"),
        "rest MiB": shown("rest_mib", "{:,.0f}"),
        "sent MiB": shown("sent_bytes", "{:,.1f}", 2**20),
        "sent / X": shown("sent_bytes", "{:.3f}", unit) if unit else lambda row: harness.DASH,
        "ledger MiB": shown("ledger_bytes", "{:,.1f}", 2**20),
        "loss diff": shown("loss_difference", "{:.1e}"),
    }


def plain_table(setting: Setting, rows: Sequence[Row]) -> str:
    """A table of aligned text, with a heading; failures are explained under it."""
    return f"{setting.title}\n\n{harness.text_table(columns(setting), rows)}"


def footnotes() -> str:
    """What the columns and the peers' names mean."""
    return LEGEND + "\n" + "\n".join(f"{peer}: {note}." for peer, note in NOTES.items())


def to_markdown(document: dict[str, Any]) -> str:
    """The whole report: machine, date, a table a setting, footnotes."""
    tables = []
    for c in document["comparisons"]:
        setting, rows = Setting(**c["setting"]), [Row(**r) for r in c["rows"]]
        tables.append(f"**{setting.title}**\n\n{harness.markdown_table(columns(setting), rows)}")
    parts = [harness.where(document), "\n".join(tables), footnotes().replace("\n", "\n\n")]
    return "\n\n".join(parts) + "\n"


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
    figure = harness.figure(13, 3.3 * len(compared)) if compared else None
    if figure is None:
        return False
    for number, (setting, rows) in enumerate(compared):
        for side, (label, value, line) in enumerate(_CHARTS):
            axes = figure.add_subplot(len(compared), 2, 2 * number + side + 1)
            heights = [value(row) or 0.0 for row in rows]
            colors = [_COLORS.get(row.peer.partition("-")[0], "#bcbd22") for row in rows]
            bars = axes.bar([row.peer for row in rows], heights, color=colors)
            axes.bar_label(bars, fmt="%.2f" if side == 0 else "%.0f", fontsize=7)
            axes.set_ylabel(label, fontsize=8)
            harness.plain_axes(axes)
            axes.tick_params(axis="x", labelrotation=30)
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
