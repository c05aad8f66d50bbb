"""The matrix as Markdown: how far off the predictions are, what was wrong, every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks import pages
from benchmarks.pages import DASH
from benchmarks.plan_matrix.pace import FASTEST, SLOWEST
from benchmarks.plan_matrix.settings import Cell


def _mib(key: str) -> pages.Cell:
    return lambda row: " / ".join(f"{n / 2**20:.2f}" for n in row[key])


NAMES = ("architecture", "ranks", "stage", "precision", "accumulation", "checkpointing")
COLUMNS: pages.Columns = {
    **{
        "model" if name == "architecture" else name: lambda row, name=name: str(row["cell"][name])  # type: ignore[misc]
        for name in NAMES
    },
    "at rest": _mib("rest"),
    "wire": _mib("wire"),
    "engine's peak": _mib("ledger"),
    "peak": _mib("peak"),
    "bound": pages.shown("bound", "{:.2f}", 2**20),
    "step": lambda row: " / ".join(f"{1000 * s:.0f}" if s else DASH for s in row["step_s"]),
}
FIGURES = {
    "rest": "bytes at rest",
    "wire": "bytes on the wire",
    "ledger": "engine's peak",
    "peak": "peak, activations included",
    "step_s": "seconds of a step",
}


def markdown(found: Mapping[str, Any]) -> str:
    """The page for what `__main__` writes as JSON."""
    rows: Sequence[Mapping[str, Any]] = found["rows"]
    wrong, orders = [r for r in rows if r["wrong"]], found["orders"]
    table = [["measured ÷ predicted", "least", "median", "most"]]
    for key, title in FIGURES.items():
        ratios = [r[key][1] / r[key][0] for r in rows if r[key][0] and r[key][1]]
        if ratios:
            spread = (min(ratios), median(ratios), max(ratios))
            table.append([title, *(f"{ratio:.4f}" for ratio in spread)])
    paces = [pace for r in rows for pace in r.get("paces", ())]
    off = sum(not FASTEST <= pace <= SLOWEST for pace in paces)
    timed = (
        f"{len(paces)} timed rounds, of which {off} at another pace of the machine than it was"
        " calibrated at."
    )
    said = [f"- {Cell(**r['cell'])}: {'; '.join(r['wrong'])}" for r in wrong]
    said += [f"- order of stages: {sentence}" for sentence in orders["turned"]]
    return pages.page(
        "# Planned and measured",
        pages.where(found),
        (
            f"{len(rows)} settings, {len(wrong)} wrong. Pairs of stages of one setting:"
            f" {orders['right']} in the predicted order, {orders['ties']} ties (`planning.orders`"
            f" says when), {len(orders['turned'])} turned."
        ),
        pages.markdown(table),
        timed if paces else "",
        *(["## Wrong", "\n".join(said)] if said else []),
        "## Every setting",
        (
            "MiB and ms, predicted / measured, of the first rank; the bound is what the plan says"
            " is never exceeded."
        ),
        pages.table(COLUMNS, rows),
    )
