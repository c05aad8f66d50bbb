"""What a person looks at: a table a link, and the plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import DASH, Cell, range_of, shown
from benchmarks.peers.settings import Setting
from benchmarks.wires.settings import REFERENCE, Link
from benchmarks.wires.summary import Row


def _agree(row: Row) -> str:
    return {None: DASH, True: "yes", False: "NO"}[row.agree]


COLUMNS: dict[str, Cell] = {
    "side": shown("side"),
    "step s": shown("step_s", "{:.2f}"),
    "faster": shown("faster", "{:.2f}"),
    "range": range_of("faster_low", "faster_high"),
    "between MiB": shown("between_bytes", "{:,.1f}", 2**20),
    "in 2Ψ": shown("equivalents", "{:.3f}"),
    "formula": shown("expected", "{:.3f}"),
    "inside MiB": shown("inside_bytes", "{:,.1f}", 2**20),
    "interface MiB": shown("interface_bytes", "{:,.1f}", 2**20),
    "frames MiB": shown("queue_bytes", "{:,.1f}", 2**20),
    "headers": shown("headers", "{:+.1%}"),
    "ledger between MiB": shown("ledger_between", "{:,.1f}", 2**20),
    "ledger inside MiB": shown("ledger_inside", "{:,.1f}", 2**20),
    "link busy": shown("busy", "{:.0%}"),
    "ranks agree": _agree,
    "loss diff": shown("loss_difference", "{:.1e}"),
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


def plain_table(rows: Sequence[Row]) -> str:
    """A table of aligned text; failures are explained under it."""
    return harness.text_table(COLUMNS, rows)


def markdown_table(rows: Sequence[Row]) -> str:
    """The same as a Markdown table."""
    failed = "".join(f"\n{line}\n" for line in harness.failures(rows))
    return harness.markdown_table(COLUMNS, rows) + failed


def _whole(document: dict[str, Any], table: Callable[[Sequence[Row]], str], heading: str) -> str:
    if document["skipped"]:
        return f"skipped: {document['skipped']}\n"
    setting = Setting(**document["setting"])
    parts = [
        harness.where(document),
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
    compared = [
        (Link(**link["link"]), [Row(**row) for row in link["rows"] if row["status"] == "ok"])
        for link in document["links"]
    ]
    compared = [(link, rows) for link, rows in compared if rows]
    figure = harness.figure(13, 3.3 * len(compared)) if compared else None
    if figure is None:
        return False
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
            harness.plain_axes(axes)
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
