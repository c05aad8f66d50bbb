"""The plan beside published figures: writes benchmarks/results/validation.md.

    python -m benchmarks validation [--check]

Every figure comes from the package and from benchmarks/data.
"""

from __future__ import annotations

from benchmarks import harness, pages
from benchmarks.validation import published, tables
from benchmarks.validation.systems import SYSTEMS
from benchmarks.validation.tables import Line, Table, markdown, within

PAGE = harness.RESULTS / "validation.md"
HEAD = """\
# The plan beside published figures

Written by `python -m benchmarks validation` from the tables in `benchmarks/data`; do not edit. Ratios are predicted ÷ published, misses
included. Kinds of table: **formula** (both sides compute), **memory** and **time** (the published side was measured). The time model has
one fitted constant a system; rows that it was fitted to are marked, and not counted.
"""


def overview(made: list[Table]) -> str:
    lines: list[tuple[str, ...]] = [("table", "kind", "figures", "within 5 %", "within 25 %")]

    def add(title: str, kind: str, free: list[Line]) -> None:
        lines.append((title, kind, str(len(free)), *(str(within(free, s)) for s in (0.05, 0.25))))

    for table in made:
        add(table.title, table.kind, table.free)
    for kind in ("formula", "memory", "time"):
        add("**all**", kind, [line for t in made if t.kind == kind for line in t.free])
    return f"## Overview\n\n{pages.markdown(lines, left=5)}"


def constants() -> str:
    lines = [("system", "constant", "value", "fitted to")]
    for system in SYSTEMS.values():
        value = getattr(system.software, system.fitted)
        lines.append((system.name, system.fitted, f"{value:g}", system.fitted_on))
    return f"## What was fitted\n\n{pages.markdown(lines, left=4)}"


def claims() -> str:
    """Claims often repeated, of docs/validation.md, and the command that shows what the plan says."""
    lines = [("claim", "command")]
    lines += [(row["claim"], f"`{row['command']}`") for row in tables.read("claims")]
    return f"## Claims often repeated\n\n{pages.markdown(lines, left=2)}"


def page() -> str:
    assert published  # its tables are in MAKERS
    made = [make() for make in tables.MAKERS]
    return "\n".join(
        [HEAD, overview(made), constants(), claims(), "## Tables\n", *map(markdown, made)]
    )


@harness.command(
    "validation",
    __doc__,
    results=False,
    check=(False, "write nothing; fail if the page is not what the code says"),
)
def main(options: harness.Options) -> int:
    return harness.write_page(PAGE, page(), options.check)
