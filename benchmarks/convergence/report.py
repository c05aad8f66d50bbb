"""What a person looks at: a table a case, and the curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.convergence.settings import REFERENCE, YARDSTICKS, Case
from benchmarks.convergence.summary import LAST, Row, Run
from benchmarks.peers.report import DASH, essence

Cell = Callable[[Row], str]


def _shown(name: str, form: str) -> Cell:
    def cell(row: Row) -> str:
        value = getattr(row, name)
        return DASH if value is None else form.format(value)

    return cell


COLUMNS: dict[str, Cell] = {
    "side": lambda row: row.side,
    "first": _shown("first", "{:.4f}"),
    "final": _shown("final", "{:.4f}"),
    "difference": lambda row: (
        DASH if row.side == REFERENCE else _shown("difference", "{:+.2%}")(row)
    ),
    "masters": _shown("masters_difference", "{:+.2%}"),
    "on the way": lambda row: DASH if row.side == REFERENCE else _shown("largest", "{:.2%}")(row),
    "training": _shown("trained", "{:.4f}"),
    "bytes": _shown("bytes_ratio", "{:.3f}"),
    "step s": _shown("step_s", "{:.2f}"),
    "verdict": lambda row: row.verdict,
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
    lines = [list(COLUMNS), *[[cell(row) for cell in COLUMNS.values()] for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    text = [
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
    return (
        "\n".join(
            [
                *text,
                *[f"{row.side}: {row.status}: {essence(row.error)}" for row in rows if row.error],
            ]
        )
        + "\n"
    )


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
    place, named = (
        document["machine"],
        ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version),
    )
    where = f"{place['cpu']}, {place['cores']} cores, {place['memory_gib']} GiB, {place['system']}"
    text = [f"`{document['command']}`\n\nMeasured {document['date']} on {where}; {named}.\n"]
    used: dict[str, None] = {}
    for found in document["cases"].values():
        case, rows = Case.of(found["case"]), [Row(**row) for row in found["rows"]]
        head = f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 2)}---|\n"
        body = "".join(
            f"| {' | '.join(cell(row) for cell in COLUMNS.values())} |\n" for row in rows
        )
        text.append(f"**{case.title}**: {setting(case)}\n\n{head}{body}")
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
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    cases = []
    for found in document["cases"].values():
        runs = {run["side"]: Run(**run) for run in found["runs"] if run["status"] == "ok"}
        if REFERENCE in runs:
            cases.append((Case.of(found["case"]), runs))
    if not cases:
        return False
    figure = Figure(figsize=(11, 3.4 * len(cases)), layout="constrained")
    FigureCanvasAgg(figure)
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
            axes.tick_params(labelsize=7)
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    return True
