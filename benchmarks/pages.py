"""What people read of a result: cells and tables, pages of Markdown, plots.

tables    table(columns, rows), markdown(lines), Table     the same text for a page and, through `show`, for a terminal
pages     page(*parts), where(document), notes(...)         when and on what it was measured, how each side is set up
plot      Panel, plot                                       bars and curves, as a PNG
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DASH = "–"

# -- tables ----------------------------------------------------------------------------------------

Cell = Callable[[Any], str]
Columns = Mapping[str, Cell]


def shown(name: str, form: str = "{}", scale: float = 1.0) -> Cell:
    """A cell: a field of a row, a dash where there is none."""

    def cell(row: Any) -> str:
        value = row.get(name)
        return DASH if value is None else form.format(value if scale == 1.0 else value / scale)

    return cell


def range_of(low: str, high: str) -> Cell:
    """A cell: "low-high" of two fields."""

    def cell(row: Any) -> str:
        ends = (row.get(low), row.get(high))
        return DASH if None in ends else "{:.2f}-{:.2f}".format(*ends)

    return cell


def cells(columns: Columns, row: Any) -> list[str]:
    """The row as text, one string a column; of one that failed its name and status."""
    if isinstance(row, Mapping) and row.get("status", "ok") != "ok":
        return [next(iter(columns.values()))(row), row["status"], *[DASH] * (len(columns) - 2)]
    return [cell(row) for cell in columns.values()]


def table(columns: Columns, rows: Sequence[Any], left: int = 1) -> str:
    """A Markdown table, `left` columns aligned to the left, with failures explained under it."""
    text = markdown([list(columns), *[cells(columns, row) for row in rows]], left)
    return "\n".join([text, *(f"{sentence}\n" for sentence in failures(rows))])


def markdown(lines: Sequence[Sequence[Any]], left: int = 1) -> str:
    """Lines of cells as a Markdown table; the first line has the names of the columns."""
    rows = [
        "| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in lines
    ]
    marks = ["---" if number < left else "---:" for number in range(len(lines[0]))]
    return "\n".join([rows[0], f"|{'|'.join(marks)}|", *rows[1:]]) + "\n"


def show(page: str) -> None:
    """Print a page, the columns of its tables under each other."""
    found: list[list[str]] = []
    for line in [*page.splitlines(), ""]:
        if line.startswith("|"):
            if line.strip("|-:"):
                found.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        widths = [max(map(len, column)) for column in zip(*found, strict=True)]
        found[1:1] = [["-" * width for width in widths]] if found else []
        for first, *others in found:
            told = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            print("  ".join([first.ljust(widths[0]), *told]).rstrip())
        found = []
        print(line)


@dataclass
class Table:
    """A heading, column names and rows of text."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """A row; dashes where cells are left out."""
        self.rows.append([*cells, *[DASH] * (len(self.columns) - len(cells))])

    def __str__(self) -> str:
        return f"## {self.title}\n\n{markdown([self.columns, *self.rows])}"


# -- pages -----------------------------------------------------------------------------------------


def page(*parts: str) -> str:
    """Parts of a page with an empty line between them."""
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def notes(told: Mapping[str, str], left_out: Iterable[str] = ()) -> list[str]:
    """A sentence for each side, how it is set up, but for those that are named."""
    return [f"{name}: {note}." for name, note in told.items() if name not in left_out]


def goals(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of `harness.goal`s; empty where there are none."""
    met = {True: "yes", False: "**no**", None: DASH}
    columns: Columns = {
        "goal": shown("goal"),
        "measured": shown("figure"),
        "met": lambda row: met[row["met"]],
    }
    return table(columns, rows, left=3) if rows else ""


def failures(rows: Iterable[Any]) -> list[str]:
    """A sentence for each row that failed."""
    return [
        f"{next(iter(row.values()))}: {row['status']}: {essence(row['error'])}"
        for row in rows
        if isinstance(row, Mapping) and row.get("error") and "status" in row
    ]


def essence(error: str) -> str:
    """The line of a worker's output that says most: the last that names an error, else the last."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or [""]
    return next(
        (line for line in reversed(lines) if "Error" in line or "error:" in line), lines[-1]
    )[:300]


def where(document: Mapping[str, Any], *more: str) -> str:
    """When and on what a result was measured, and by which command: one line of a page."""
    place = document["machine"]
    named = ", ".join(f"{name} {found}" for name, found in document["versions"].items() if found)
    on = [
        place["cpu"],
        f"{place['cores']} cores",
        f"{place['memory_gib']} GiB",
        f"{place['system']} {place['kernel']}",
        *more,
    ]
    return f"Measured {document['date']} on {', '.join(on)}; {named}. `{document['command']}`"


# -- plot ------------------------------------------------------------------------------------------

COLORS = {"ddp": "#7f7f7f", "zero": "#9467bd", "fsdp2": "#d62728", "deepspeed": "#1f77b4"}
OURS = "#2ca02c"


@dataclass
class Panel:
    """One chart of bars by side. `form`: of the figures on them; `levels`: heights of lines through all."""

    label: str
    title: str = ""
    bars: Mapping[str, float] = field(default_factory=dict)
    form: str = "%.2f"
    levels: Sequence[float] = ()


def plot(path: Path, rows: Sequence[Sequence[Panel]], width: float = 13) -> bool:
    """Panels as a PNG, a row each. False where there is no matplotlib or nothing to draw."""
    if not rows:
        return False
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(width, 3.3 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for panels, line in zip(rows, every, strict=True):
        for panel, axes in zip(panels, line, strict=True):
            _draw(panel, axes)
    figure.savefig(path, dpi=110)
    return True


def _draw(panel: Panel, axes: Any) -> None:
    names = list(panel.bars)
    colors = [COLORS.get(name.partition("-")[0], OURS) for name in names]
    bars = axes.bar(names, list(panel.bars.values()), color=colors)
    axes.bar_label(bars, fmt=panel.form, fontsize=7)
    turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor", "fontsize": 7}
    axes.set_xticks(range(len(names)), names, **turned)
    for level in panel.levels:
        axes.axhline(level, color="black", linewidth=0.8, linestyle=":")
    axes.set_ylabel(panel.label, fontsize=8)
    axes.set_title(panel.title, fontsize=8, loc="left")
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
