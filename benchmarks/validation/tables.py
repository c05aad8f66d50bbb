"""Tables of predicted beside published figures: reading the data, and writing them as Markdown."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
Row = dict[str, str]


@dataclass(frozen=True)
class Line:
    """One figure. `fitted`: a constant was fitted to this very row, so that its ratio proves
    nothing.
    """

    what: str
    predicted: float
    published: float
    unit: str
    fitted: bool = False

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


@dataclass(frozen=True)
class Table:
    """One published table beside what the code says: `kind` is "formula" (arithmetic both sides
    share), "memory" or "time" (measured).
    """

    title: str
    kind: str
    source: str
    files: tuple[str, ...]
    says: str
    lines: list[Line] = field(default_factory=list)


def read(name: str) -> list[Row]:
    """The rows of data/NAME.csv."""
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def figures(rows: Iterable[Row], key: str) -> list[float]:
    return [float(row[key]) for row in rows]


def number(value: float) -> str:
    """Three or four significant digits without an exponent where it can be read."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.3e}"


def within(lines: Iterable[Line], share: float) -> int:
    return sum(abs(line.ratio - 1) <= share for line in lines)


def markdown(table: Table) -> str:
    """A section: what it compares, where it is from, the lines."""
    free = [line for line in table.lines if not line.fitted]
    worst = max(free, key=lambda line: abs(line.ratio - 1), default=None)
    summary = f"{len(free)} figures not fitted"
    if worst:
        summary += (
            f", {within(free, 0.05)} within 5 %, {within(free, 0.25)} within 25 %; farthest:"
            f" {worst.what}, ratio {worst.ratio:.2f}"
        )
    head = [
        f"### {table.title}",
        "",
        (
            f"{table.says} Source: {table.source}; data:"
            f" {', '.join(f'`{f}.csv`' for f in table.files)}. {summary}."
        ),
        "",
        "| what | predicted | published | unit | ratio |",
        "|---|---|---|---|---|",
    ]
    rows = [
        f"| {line.what} | {number(line.predicted)} | {number(line.published)} | {line.unit} "
        f"| {line.ratio:.3f}{' (fitted)' if line.fitted else ''} |"
        for line in table.lines
    ]
    return "\n".join([*head, *rows, ""])


Maker = Callable[[], Table]
