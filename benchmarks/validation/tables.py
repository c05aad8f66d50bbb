"""Tables of predicted beside published figures: reading the data, and writing them as Markdown."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import pages

DATA = Path(__file__).parents[1] / "data"
GB, GIB, BILLION, TERA = 1e9, 2**30, 1e9, 1e12
Row = dict[str, str]
Rows = list[Row]


@dataclass(frozen=True)
class Line:
    """One figure. `fitted`: a constant was fitted to this row, so its ratio proves nothing."""

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
    """A published table beside the code's: "formula", or measured "memory" or "time"."""

    title: str
    kind: str
    source: str
    files: tuple[str, ...]
    says: str
    lines: list[Line]

    @property
    def free(self) -> list[Line]:
        """Lines that no constant was fitted to."""
        return [line for line in self.lines if not line.fitted]


MAKERS: list[Callable[[], Table]] = []
"""What makes the tables, in order."""


def table(title: str, kind: str, source: str, *files: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a table of a function that takes the rows of `files` and yields the fields of `Line`s.
    Its docstring is what the page says of the table.
    """

    def made(lines: Callable[..., Iterable[tuple[Any, ...]]]) -> Callable[[], Table]:
        def make() -> Table:
            found = [
                Line(what, predicted, float(published), *more)
                for what, predicted, published, *more in lines(*map(read, files))
            ]
            return Table(title, kind, source, files, " ".join((lines.__doc__ or "").split()), found)

        MAKERS.append(make)
        return make

    return made


def read(name: str) -> Rows:
    """The rows of data/NAME.csv."""
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def ints(row: Row, *names: str) -> list[int]:
    """Cells as whole numbers."""
    return [int(row[name]) for name in names]


def number(value: float) -> str:
    """Three or four significant digits without an exponent where it can be read."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.3e}"


def within(lines: Iterable[Line], share: float) -> int:
    return sum(abs(line.ratio - 1) <= share for line in lines)


def markdown(table: Table) -> str:
    """A section: what it compares, where it is from, the lines."""
    free = table.free
    summary = f"{len(free)} figures not fitted"
    if free:
        worst = max(free, key=lambda line: abs(line.ratio - 1))
        summary += (
            f", {within(free, 0.05)} within 5 %, {within(free, 0.25)} within 25 %; farthest:"
            f" {worst.what}, ratio {worst.ratio:.2f}"
        )
    data = ", ".join(f"`{file}.csv`" for file in table.files)
    columns: pages.Columns = {
        "what": lambda line: line.what,
        "predicted": lambda line: number(line.predicted),
        "published": lambda line: number(line.published),
        "unit": lambda line: line.unit,
        "ratio": lambda line: f"{line.ratio:.3f}{' (fitted)' if line.fitted else ''}",
    }
    about = f"{table.says} Source: {table.source}; data: {data}. {summary}."
    lines = pages.table(columns, table.lines, left=5)
    return f"### {table.title}\n\n{about}\n\n{lines}"
