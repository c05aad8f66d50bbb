"""What a person looks at: the goals, and a table for each kind of turn, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import pages
from benchmarks.checkpoint.settings import NOTES
from benchmarks.harness import Row
from benchmarks.pages import Cell, essence, shown


def _s(name: str) -> Cell:
    return shown(name, "{:.2f}")


def _mib(name: str) -> Cell:
    return shown(name, "{:,.0f}")


SAVES: dict[str, Cell] = {
    "peer": shown("peer"),
    "ranks": shown("ranks"),
    "GB": _s("folder_gb"),
    "returns s": _s("seconds"),
    "on disk s": _s("on_disk_s"),
    "GB/s": _s("gb_s"),
    "disk GB/s": _s("disk_gb_s"),
    "rate / disk's": _s("rate"),
    "lowest": _s("rate_low"),
    "/ one writer's": _s("alone_rate"),
    "O_DIRECT GB/s": _s("direct_gb_s"),
    "host peak MiB": _mib("peak_mib"),
    "n": shown("count"),
}
BEHIND: dict[str, Cell] = {
    "peer": shown("peer"),
    "way": shown("way"),
    "first stall s": shown("first_stall_s", "{:.3f}"),
    "later stall s": shown("stall_s", "{:.3f}"),
    "whole s": _s("whole_s"),
    "first stall / whole": shown("first_share", "{:.1%}"),
    "later": shown("stall_share", "{:.1%}"),
    "step alone s": _s("alone_s"),
    "step beside s": _s("beside_s"),
    "lost s": _s("lost_s"),
    "copy MiB": _mib("copy_mib"),
    "n": shown("count"),
}
LOADS: dict[str, Cell] = {
    "peer": shown("peer"),
    "saved on -> loaded on": lambda row: f"{row['saved']} -> {row['ranks']}",
    "cold s": _s("cold_s"),
    "warm s": _s("warm_s"),
    "warm GB/s": _s("warm_gb_s"),
    "owned GB": _s("need_gb"),
    "read GB": _s("read_gb"),
    "disk GB, all ranks": _s("disk_gb"),
    "host peak MiB": _mib("peak_mib"),
    "stays MiB": _mib("stays_mib"),
    "loss diff": shown("loss_difference", "{:.1e}"),
    "n": shown("count"),
}
OPENED: dict[str, Cell] = {
    "way": shown("way"),
    "ranks": shown("ranks"),
    "s": _s("seconds"),
    "host peak MiB": _mib("peak_mib"),
    "of it own": _mib("own_peak_mib"),
    "peak of all ranks": _mib("all_peak_mib"),
    "stays MiB": _mib("stays_mib"),
    "shard MiB": _mib("shard_mib"),
    "read GB": _s("read_gb"),
    "loss": shown("loss", "{:.5f}"),
    "n": shown("count"),
}
LEGENDS = {
    "saves": (
        "returns: until the call returns on the slowest rank; on disk: until the disk also knows"
        " every file; GB/s: of that. disk GB/s: the same ranks writing and flushing as many bytes"
        " with write(2) alone, beside each save; rate / disk's: median and lowest of the pairs; /"
        " one writer's: the same against one process that writes all; O_DIRECT: the disk's rate"
        " past the page cache, the same ranks writing. host peak: resident memory beyond rest, the"
        " largest rank."
    ),
    "behind": (
        "first, later: the first save of a run, which makes its buffers, and the others. whole:"
        " from the call until the checkpoint is whole on disk. beside: a step while the save is"
        " under way, its threads sharing the cores with the ranks'. lost: what a save costs the"
        " training, its stall and the delay of the steps beside it. copy: memory beyond rest after"
        " the first call."
    ),
    "loads": (
        "cold: the files are not in this machine's page cache; warm: they are, and the model holds"
        " states already. owned: a rank's part of the checkpoint. read: what the rank that reads"
        " most asked of the kernel in the warm load; disk: what the disk gave in the cold one. host"
        " peak, stays: resident memory beyond rest, in the cold load and after it, the largest rank"
        " (the optimizer's states come to be in it). loss diff: the two steps after the load, on"
        " the same batches, to the two after the save."
    ),
    "pretrained": (
        "from the disk, weights in fp32, until every rank has its part. Memory beyond what the"
        " libraries take: host peak resident, the largest rank; of it own: without pages that are"
        " mapped from files; shard: the bytes that a rank owns."
    ),
}
TITLES = {
    "saves": "Save",
    "behind": "Save behind the training",
    "loads": "Load",
    "pretrained": "Hugging Face weights into a sharded model",
}
TABLES = {"saves": SAVES, "behind": BEHIND, "loads": LOADS, "pretrained": OPENED}


def goals_table(goals: Sequence[Row]) -> str:
    """A Markdown table of the goals, those that are missed named."""
    columns: dict[str, Cell] = {
        "what": shown("what"),
        "goal": shown("goal"),
        "measured": lambda row: row["form"].format(row["value"]),
        "": lambda row: "" if row["met"] else "missed",
    }
    return pages.table(columns, goals)


def to_markdown(document: dict[str, Any]) -> str:
    """The whole report: machine, date, goals, tables, footnotes."""
    model = document["model"]
    tables = []
    for kind, columns in TABLES.items():
        if document[kind]:
            table = pages.table(columns, document[kind])
            tables += [f"## {TITLES[kind]}", table, LEGENDS[kind]]
    lines = [
        f"- {r['turn']['kind']} {r['turn']['peer']}, round {r['round']}: {r['status']}:"
        f" {essence(r['error'])}"
        for r in document["runs"]
        if r["status"] != "ok"
    ]
    lines += [f"- {peer}: not installed" for peer in document["missing"]]
    return pages.page(
        pages.where(document, document["file_system"]),
        (
            f"{model['name']}, {model['parameters']:,} parameters in fp32 with AdamW"
            f" ({model['state_bytes'] / 1e9:.2f} GB of state), {document['ranks']} ranks,"
            f" {document['tokens']} tokens a rank and step."
        ),
        document["cached"],
        *(["## Goals", goals_table(document["goals"])] if document["goals"] else []),
        *tables,
        *(["## Not measured", "\n".join(lines)] if lines else []),
        "## How each is set up",
        "\n".join(f"- {line}" for line in pages.notes(NOTES)),
    )
