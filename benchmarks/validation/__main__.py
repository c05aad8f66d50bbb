"""Writes benchmarks/results/validation.md: `python -m benchmarks.validation [--check]`. Every figure comes from the
package and from benchmarks/data.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import harness, pages
from benchmarks.validation import compute, fits, memory, printed, runs, tables
from benchmarks.validation.claims import claims
from benchmarks.validation.systems import SYSTEMS
from benchmarks.validation.tables import Line, Table, markdown, within
from onefold.plan.traffic import Software

_HEAD = """\
# The plan beside published figures

Written by `python -m benchmarks.validation` from the tables in `benchmarks/data`; do not edit. Ratios are predicted ÷ published, misses
included. The questions of `tests/plan/data/planner_cases.csv` are a test of their own
(`tests/plan/test_cases.py`); most of them ask for one figure of a paper, which `benchmarks.validation.formulas` or,
for a published system, `benchmarks.validation.systems` answers: no whole plan.

Three kinds of table: **formula** (both sides compute; they must agree but for rounding and what the sources misprint), **memory** and
**time** (the published side was measured).
"""


def not_compared() -> str:
    at = {
        tokens: " / ".join(
            f"{runs.by_bandwidth(tokens, link):.0f}" for link in (100, 200, 400, 800)
        )
        for tokens in (1024, 2048)
    }
    rates = " and ".join(f"{rate} at {tokens:,} tokens" for tokens, rate in at.items())
    rows = tables.read("not_compared", Path(__file__).parent)
    lines = [(r["data"], r["why"].format(rates=rates)) for r in rows]
    return f"## Not compared\n\n{pages.markdown([('data', 'why'), *lines], left=2)}"


#: Constants along the valley of the fit.
FLAT = ((0.78, 0.08), (0.77, 0.1), (0.76, 0.11))


def constants() -> str:
    """The fitted constants: in the code, and fitted again now."""
    lines = [("system", "constant", "in the code", "fitted again", "rows")]
    for name, system in SYSTEMS.items():
        value, again = getattr(system.software, system.fitted), fits.refit(name)
        lines.append((system.name, system.fitted, f"{value:g}", f"{again:g}", system.fitted_on))
    found, used = fits.shared(), fits.in_use()
    azure, all_runs = SYSTEMS["azure"], runs.azure()
    best, here = (
        fits.misfit(fits.with_constant(azure, **values), all_runs) ** 0.5
        for values in (found, used)
    )
    answers = [fits.answer_to_e46(kernel_share=k, overlap=o) for k, o in FLAT]
    names, soft = ("kernel_share", "overlap", "hop_seconds"), Software()
    shared = ", ".join(f"{n} = {used[n]:g} (best on a grid: {found[n]:g})" for n in names)
    return f"""## What was fitted

One constant a system, on the rows named; those rows are marked in the tables below.

{pages.markdown(lines, left=5)}
Shared by all: {shared}, fitted together with the Azure report's link_share to its rows. \
Root mean square of the ratio's logarithm: {here:.4f} in the code, {best:.4f} at the grid's best. \
The valley is flat: kernel_share and overlap of {", ".join(f"{k:g} and {o:g}" for k, o in FLAT)} \
fit alike, and answer E46 (0.99 ± 0.07) with {", ".join(f"{answer:.3f}" for answer in answers)}: \
that case is passed narrowly. The overlap is DeepSpeed's schedule of those years only.

Assumed, not fitted: for an unknown cluster a link_share of {soft.link_share:g}, for a schedule that \
prefetches an overlap of {soft.overlap:g}, a spread between ranks of {soft.straggler:g}; for the \
largest model 0.8 of what the states allow.
"""


def claimed() -> str:
    lines = [("claim", "what the code says", "line", "where it shows it")]
    lines += [(c.claim, c.checked, f"`{c.line}`", ", ".join(map(str, c.shows))) for c in claims()]
    return f"""## Claims often repeated, checked

The last column names the keys of the line's answer that show the figures (a table's values summed; GB are 10⁹ bytes). `states`
are all model states at once, as the papers count them; what the engine holds at rest and at peak stands beside them.

{pages.markdown(lines, left=4)}"""


def overview(made: list[Table]) -> str:
    lines: list[tuple[str, ...]] = [("table", "kind", "figures", "within 5 %", "within 25 %")]

    def add(title: str, kind: str, free: list[Line]) -> None:
        lines.append((title, kind, str(len(free)), *(str(within(free, s)) for s in (0.05, 0.25))))

    for table in made:
        add(table.title, table.kind, table.free)
    for kind in ("formula", "memory", "time"):
        add("**all**", kind, [line for t in made if t.kind == kind for line in t.free])
    said = "Without the rows that a constant was fitted to."
    return f"## Overview\n\n{said}\n\n{pages.markdown(lines, left=5)}"


def all_tables() -> list[Table]:
    modules = (memory, compute, printed)
    made = [make() for module in modules for make in tables.MAKERS[module.__name__]]
    return [*made, *runs.tables()]


def page() -> str:
    made = all_tables()
    sections = [overview(made), claimed(), constants(), "## Tables\n", *map(markdown, made)]
    return "\n".join([_HEAD, *sections, not_compared()])


if __name__ == "__main__":
    sys.exit(
        harness.write_page(
            "validation", __doc__, harness.ROOT / "benchmarks" / "results" / "validation.md", page
        )
    )
