"""The matrix as Markdown: how far off the predictions are, what was wrong, every row."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import harness
from benchmarks.plan_matrix.pace import FASTEST, SLOWEST
from benchmarks.plan_matrix.settings import Cell

_FIGURES = (
    ("rest", "bytes at rest"),
    ("wire", "bytes on the wire"),
    ("ledger", "engine's peak"),
    ("peak", "peak, activations included"),
)


def markdown(found: Mapping[str, Any]) -> str:
    """The page for what `__main__` writes as JSON."""
    rows: Sequence[Mapping[str, Any]] = found["rows"]
    wrong, orders = [r for r in rows if r["wrong"]], found["orders"]
    lines = [
        "# Planned and measured",
        "",
        harness.where(found),
        (
            f"{len(rows)} settings, {len(wrong)} wrong. Pairs of stages of one setting:"
            f" {orders['right']} in the predicted order, {orders['ties']} ties (`planning.orders`"
            f" says when), {len(orders['turned'])} turned."
        ),
        "",
    ]
    table = [["measured ÷ predicted", "least", "median", "most"]]
    for key, title in (*_FIGURES, ("step_s", "seconds of a step")):
        ratios = [r[key][1] / r[key][0] for r in rows if r[key][0] and r[key][1]]
        if ratios:
            spread = (min(ratios), statistics.median(ratios), max(ratios))
            table.append([title, *(f"{ratio:.4f}" for ratio in spread)])
    lines.append(harness.markdown(table))
    paces = [pace for r in rows for pace in r.get("paces", ())]
    if paces:
        off = sum(not FASTEST <= pace <= SLOWEST for pace in paces)
        lines += [
            (
                f"{len(paces)} timed rounds, of which {off} at another pace of the machine than it"
                " was calibrated at."
            ),
        ]
    if wrong or orders["turned"]:
        lines += ["", "## Wrong", ""]
        lines += [f"- {Cell(**r['cell'])}: {'; '.join(r['wrong'])}" for r in wrong]
        lines += [f"- order of stages: {sentence}" for sentence in orders["turned"]]
    lines += [
        "",
        "## Every setting",
        "",
        (
            "MiB and ms, predicted / measured, of the first rank; the bound is what the plan says"
            " is never exceeded."
        ),
        "",
    ]
    head = (
        "model", "ranks", "stage", "precision", "accumulation", "checkpointing", "at rest", "wire",
        "engine's peak", "peak", "bound", "step",
    )  # fmt: skip
    lines.append(harness.markdown([head, *map(_row, rows)]))
    return "\n".join(lines) + "\n"


def _row(row: Mapping[str, Any]) -> list[str]:
    c = row["cell"]
    figures = [" / ".join(f"{n / 2**20:.2f}" for n in row[key]) for key, _ in _FIGURES]
    step = " / ".join(f"{1000 * s:.0f}" if s else "–" for s in row["step_s"])
    keys = ("architecture", "ranks", "stage", "precision", "accumulation", "checkpointing")
    return [*(str(c[key]) for key in keys), *figures, f"{row['bound'] / 2**20:.2f}", step]
