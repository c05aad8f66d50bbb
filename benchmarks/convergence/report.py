"""What a person looks at: a table a case, and the curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.convergence.settings import REFERENCE, YARDSTICKS, Case
from benchmarks.convergence.summary import LAST, Row, Run
from benchmarks.harness import DASH, Cell, shown

COLUMNS: dict[str, Cell] = {
    "side": shown("side"),
    "first": shown("first", "{:.4f}"),
    "final": shown("final", "{:.4f}"),
    "difference": lambda row: (
        DASH if row.side == REFERENCE else shown("difference", "{:+.2%}")(row)
    ),
    "masters": shown("masters_difference", "{:+.2%}"),
    "on the way": lambda row: DASH if row.side == REFERENCE else shown("largest", "{:.2%}")(row),
    "training": shown("trained", "{:.4f}"),
    "bytes": shown("bytes_ratio", "{:.3f}"),
    "step s": shown("step_s", "{:.2f}"),
    "verdict": shown("verdict"),
}
LEGEND = (
    "first, final: mean loss a token of the held-out text before and after training, as the side"
    " computes it (encoded where it encodes). difference: the final one's to the reference's;"
    " masters: the same of the weights that a checkpoint holds, computed with nothing encoded. on"
    " the way: the largest difference of a held-out loss after a step. training: mean training"
    f" loss of the last {LAST} steps. bytes: what a rank sends to the other node in a step, over"
    " the reference's. step s: median of the steps, on a machine that had other work: compare"
    " nothing by it."
)


def setting(case: Case) -> str:
    """What all sides of a case share, in words."""
    nodes = case.ranks // case.ranks_a_node
    return (
        f"{case.steps} steps of {case.ranks} x {case.micro_batch} x {case.seq} tokens, {case.ranks}"
        f" ranks in {nodes} pretended nodes, AdamW to {case.lr:g} and down by a cosine,"
        f" {case.precision}, seed {case.seed}"
    )


def plain_table(rows: Sequence[Row]) -> str:
    """Aligned text; failures are explained under it."""
    return harness.text_table(COLUMNS, rows)


def to_text(document: dict[str, Any]) -> str:
    """The whole report for a terminal."""
    parts = []
    for found in document["cases"].values():
        case = Case.of(found["case"])
        parts.append(
            f"{case.title}: {setting(case)}\n\n{plain_table([Row(**row) for row in found['rows']])}"
        )
    return "\n".join(parts)


def to_markdown(document: dict[str, Any]) -> str:
    """The whole report: machine, date, a table a case, what the columns and sides are."""
    text = [f"{harness.where(document)}\n"]
    used: dict[str, None] = {}
    for found in document["cases"].values():
        case, rows = Case.of(found["case"]), [Row(**row) for row in found["rows"]]
        table = harness.markdown_table(COLUMNS, rows)
        text.append(f"**{case.title}**: {setting(case)}\n\n{table}")
        used |= dict.fromkeys(row.side for row in rows)
    text.append(LEGEND + "\n")
    text.append(
        "\n\n".join(
            f"{side}: {document['notes'][side]}." for side in document["notes"] if side in used
        )
        + "\n"
    )
    return "\n".join(text)


def plot(document: dict[str, Any], path: Path) -> bool:
    """A row of two panels a case, as a PNG: held-out losses, and their differences to the
    reference's in percent with the limit.

    False, and no file, where matplotlib is missing or nothing was measured.
    """
    cases = []
    for found in document["cases"].values():
        runs = {run["side"]: Run(**run) for run in found["runs"] if run["status"] == "ok"}
        if REFERENCE in runs:
            cases.append((Case.of(found["case"]), runs))
    figure = harness.figure(11, 3.4 * len(cases)) if cases else None
    if figure is None:
        return False
    panels = figure.subplots(len(cases), 2, squeeze=False)
    for (case, runs), (left, right) in zip(cases, panels, strict=True):
        theirs = [loss for _, loss in runs[REFERENCE].curve["held_out"]]
        for number, (side, run) in enumerate(runs.items()):
            steps, losses = zip(*run.curve["held_out"], strict=True)
            look = {
                "color": f"C{number}",
                "linestyle": ":" if side in YARDSTICKS else "-",
                "linewidth": 1.2,
                "marker": ".",
                "label": side,
            }
            left.plot(steps, losses, **look)
            if side != REFERENCE:
                right.plot(
                    steps, [100 * (a / b - 1) for a, b in zip(losses, theirs, strict=True)], **look
                )
        for sign in (-1, 1):
            right.axhline(sign * 100 * case.limit, color="black", linewidth=0.8, linestyle="--")
        left.set_title(case.title, fontsize=8, loc="left")
        right.set_title("difference to the reference, %, and the limit", fontsize=8, loc="left")
        left.set_ylabel("held-out loss", fontsize=8)
        left.legend(fontsize=7, frameon=False)
        for axes in (left, right):
            axes.set_xlabel("step", fontsize=8)
            harness.plain_axes(axes)
    figure.savefig(path, dpi=110)
    return True
