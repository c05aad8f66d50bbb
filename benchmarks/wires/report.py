"""What a person looks at: a table a link, and the plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.report import DASH, essence
from benchmarks.peers.settings import Setting
from benchmarks.wires.settings import REFERENCE, Link
from benchmarks.wires.summary import Row

Cell = Callable[[Row], str]


def _shown(name: str, form: str, scale: float = 1.0) -> Cell:
    def cell(row: Row) -> str:
        value = getattr(row, name)
        return DASH if value is None else form.format(value / scale)

    return cell


def _range(row: Row) -> str:
    return DASH if row.faster_low is None else f"{row.faster_low:.2f}-{row.faster_high:.2f}"


def _agree(row: Row) -> str:
    return {None: DASH, True: "yes", False: "NO"}[row.agree]


COLUMNS: dict[str, Cell] = {
    "side": lambda row: row.side,
    "step s": _shown("step_s", "{:.2f}"),
    "faster": _shown("faster", "{:.2f}"),
    "range": _range,
    "between MiB": _shown("between_bytes", "{:,.1f}", 2**20),
    "in 2Ψ": _shown("equivalents", "{:.3f}"),
    "formula": _shown("expected", "{:.3f}"),
    "inside MiB": _shown("inside_bytes", "{:,.1f}", 2**20),
    "interface MiB": _shown("interface_bytes", "{:,.1f}", 2**20),
    "frames MiB": _shown("queue_bytes", "{:,.1f}", 2**20),
    "headers": _shown("headers", "{:+.1%}"),
    "ledger between MiB": _shown("ledger_between", "{:,.1f}", 2**20),
    "ledger inside MiB": _shown("ledger_inside", "{:,.1f}", 2**20),
    "link busy": _shown("busy", "{:.0%}"),
    "ranks agree": _agree,
    "loss diff": _shown("loss_difference", "{:.1e}"),
}
LEGEND = (
    "Bytes are those that one host sends in an optimizer step, the mean of both. between, inside:"
    " payload of the ranks' sockets to the other host, and to their own. in 2Ψ: between, over 2"
    " bytes a parameter; formula: the closed form of it, for our recipes on two hosts of two"
    " ranks. interface: what the interface counted, one header a packet of up to 64 KiB; frames:"
    " the same with the headers of each frame of 1,500 bytes, which is what the rate is charged"
    " for; headers: frames beyond the payload, acknowledgements and the launchers' words included."
    " ledger: what Onefold says that it sent. step s: median of the timed steps; faster:"
    f" {REFERENCE}'s step over this one's, median of the rounds, with their range. link busy: share"
    " of the step in which the link sends at its rate. ranks agree: the last step's loss, of one"
    f" batch on all ranks, was one number. loss diff: largest relative difference to {REFERENCE}'s"
    " losses."
)


def title(link: dict[str, Any]) -> str:
    """The link in words, with what a plain stream got from it."""
    found, measured = Link(**link["link"]), link["measured"]
    if measured is None:
        return found.title
    return (
        f"{found.title} (one plain stream: {measured['bit_s'] / 1e6:,.1f} Mbit/s of payload, "
        f"{measured['round_trip_ms']:.2f} ms for a round trip)"
    )


def cells(row: Row) -> list[str]:
    """The row as text, one string a column."""
    return (
        [cell(row) for cell in COLUMNS.values()]
        if row.status == "ok"
        else [row.side, row.status, *[DASH] * (len(COLUMNS) - 2)]
    )


def plain_table(rows: Sequence[Row]) -> str:
    """A table of aligned text; failures are explained under it."""
    lines = [list(COLUMNS), *[cells(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    text = []
    for number, line in enumerate(lines):
        text.append(
            "  ".join(
                c.rjust(w) if i else c.ljust(w)
                for i, (c, w) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
        )
        if number == 0:
            text.append("  ".join("-" * w for w in widths))
    return "\n".join([*text, *_failures(rows)]) + "\n"


def markdown_table(rows: Sequence[Row]) -> str:
    """The same as a Markdown table."""
    head = f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}\n"
    return (
        head
        + "".join(f"| {' | '.join(cells(row))} |\n" for row in rows)
        + "".join(f"\n{line}\n" for line in _failures(rows))
    )


def _failures(rows: Sequence[Row]) -> list[str]:
    return [f"{row.side}: {row.status}: {essence(row.error)}" for row in rows if row.error]


def _where(document: dict[str, Any]) -> str:
    place, found = document["machine"], document["versions"]
    named = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    return (
        f"Measured {document['date']} on {place['cpu']}, {place['cores']} cores,"
        f" {place['memory_gib']} GiB, {place['system']} {place['kernel']}; {named}."
        f" `{document['command']}`"
    )


def _whole(document: dict[str, Any], table: Callable[[Sequence[Row]], str], heading: str) -> str:
    if document["skipped"]:
        return f"skipped: {document['skipped']}\n"
    setting = Setting(**document["setting"])
    parts = [
        _where(document),
        f"{document['hosts']} hosts of {document['ranks_a_host']} ranks. {setting.title}.",
    ]
    for link in document["links"]:
        parts.append(
            f"{heading.format(title(link))}\n\n{table([Row(**row) for row in link['rows']])}"
        )
    used = {row["side"] for link in document["links"] for row in link["rows"]}
    parts += [
        LEGEND,
        *[f"{side}: {note}." for side, note in document["notes"].items() if side in used],
    ]
    return "\n\n".join(parts) + "\n"


def to_text(document: dict[str, Any]) -> str:
    """The whole report for a terminal."""
    return _whole(document, plain_table, "{}")


def to_markdown(document: dict[str, Any]) -> str:
    """The whole report for a page."""
    return _whole(document, markdown_table, "**{}**")


_COLORS = {"ddp": "#7f7f7f", "fsdp2": "#d62728", "deepspeed": "#1f77b4"}
_OURS = "#2ca02c"


def plot(document: dict[str, Any], path: Path) -> bool:
    """Step time a link, and bytes between hosts beside their closed form, as a PNG.

    False, and no file, where matplotlib is missing or nothing was measured.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    compared = [
        (Link(**link["link"]), [Row(**row) for row in link["rows"] if row["status"] == "ok"])
        for link in document["links"]
    ]
    compared = [(link, rows) for link, rows in compared if rows]
    if not compared:
        return False
    figure = Figure(figsize=(13, 3.3 * len(compared)), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (link, rows) in enumerate(compared):
        names, colors = (
            [row.side for row in rows],
            [_COLORS.get(row.side.partition("-")[0], _OURS) for row in rows],
        )
        for place, (label, values) in enumerate(
            (
                ("step time, s", [row.step_s or 0.0 for row in rows]),
                ("bytes between hosts, 16-bit Ψ", [row.equivalents or 0.0 for row in rows]),
            ),
            start=1,
        ):
            axes = figure.add_subplot(len(compared), 2, 2 * number + place)
            axes.bar_label(axes.bar(names, values, color=colors), fmt="%.2f", fontsize=7)
            axes.set_ylabel(label, fontsize=8)
            axes.set_xticks(
                range(len(names)),
                names,
                rotation=30,
                ha="right",
                rotation_mode="anchor",
                fontsize=7,
            )
            axes.tick_params(axis="y", labelsize=7)
            axes.spines[["top", "right"]].set_visible(False)
            if place == 1:
                axes.set_title(link.title, fontsize=8, loc="left")
            else:
                known = [
                    (name, row.expected)
                    for name, row in zip(names, rows, strict=True)
                    if row.expected is not None
                ]
                axes.scatter(
                    [name for name, _ in known],
                    [value for _, value in known],
                    marker="_",
                    s=300,
                    color="black",
                    label="formula",
                )
                axes.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=110)
    return True
