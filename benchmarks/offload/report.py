"""What a person looks at: the goals, a table a setting, ours beside theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import pages
from benchmarks.harness import Row
from benchmarks.offload.sides import NOTES
from benchmarks.pages import DASH, Cell, essence, range_of, shown, table
from benchmarks.peers.settings import Setting

TIMES: dict[str, Cell] = {
    "side": shown("side"),
    "step s": shown("step_s", "{:.3f}"),
    "× device": shown("ratio", "{:.2f}"),
    "range": range_of("ratio_low", "ratio_high"),
    "optimizer s": shown("optimizer_s", "{:.3f}"),
    "tokens/s": shown("tokens_a_second", "{:,.0f}"),
    "cpu s": shown("cpu_s", "{:.2f}"),
    "peak MiB": shown("peak_mib", "{:,.0f}"),
    "rest MiB": shown("rest_mib", "{:,.0f}"),
    "device MiB": shown("device_mib", "{:,.0f}"),
    "host MiB": shown("host_mib", "{:,.0f}"),
    "/ planned": shown("host_planned", "{:.3f}"),
    "disk MiB": shown("disk_mib", "{:,.0f}"),
    "loss diff": shown("loss_difference", "{:.1e}"),
}
DISKS: dict[str, Cell] = {
    "side": shown("side"),
    "read MiB": shown("read_mib", "{:,.0f}"),
    "written MiB": shown("written_mib", "{:,.0f}"),
    "waited s": shown("waited_s", "{:.3f}"),
    "optimizer GB/s": shown("optimizer_gb_s", "{:.2f}"),
    "plain copy GB/s": shown("copy_gb_s", "{:.2f}"),
    "/ copy": shown("disk_share", "{:.2f}"),
    "/ copy by two": shown("disk_share_two", "{:.2f}"),
    "page cache MiB": shown("cache_mib", "{:+,.0f}"),
    "own files in it MiB": shown("file_cache_mib", "{:,.1f}"),
}
LEGEND = (
    "step s: median of the timed steps; optimizer s: what `optimizer.step()` takes of it. × device:"
    " median of the rounds' ratios to the same stage of Onefold (of FSDP2: stage 3) with everything"
    " on the device, with their range. cpu s: processor time of a rank in a step. peak, rest: a"
    " rank's resident memory beyond what the imported libraries take, in timed steps and after the"
    " last. device, host, disk: what Onefold's ledgers and the optimizer's states account for at"
    " their peak; / planned: the host's over what the recipe should take (`planned.py`). On CPU"
    " ranks the device is host memory too, so that `peak` has both. loss diff: largest relative"
    " difference to the losses of onefold-3."
)
DISK_LEGEND = (
    "read, written: by all ranks in a step. waited s: of a step, in which a rank did nothing but"
    " wait for the disk. optimizer GB/s: bytes read and written by all ranks in `optimizer.step()`"
    " over its seconds; plain copy: one thread that reads and writes sequentially with O_DIRECT"
    " just before and behind each step; / copy: median of the steps' ratios; / copy by two: to a"
    " copy that reads and writes at a time. page cache: growth of the machine's in the timed steps;"
    " own files in it: of the run's files at the end."
)
PAIRS: dict[str, Cell] = {
    "ours": shown("ours"),
    "theirs": shown("theirs"),
    "their step / ours": shown("faster", "{:.2f}"),
    "range": range_of("low", "high"),
    "rounds": shown("rounds"),
}
LARGE: dict[str, Cell] = {
    "parameters": shown("parameters", "{:.2f}B", 1e9),
    "state GB": shown("parameters", "{:.1f}", 1e9 / 16),
    "ranks": shown("ranks"),
    "steps": lambda large: str(len(large["losses"])),
    "step s": shown("step_s", "{:.1f}"),
    "resident GiB, all ranks": shown("resident_bytes", "{:.2f}", 2**30),
    "before the model": shown("before_bytes", "{:.2f}", 2**30),
    "on disk GB": shown("disk_bytes", "{:.1f}", 1e9),
    "moved a step GB": shown("moved_bytes", "{:.1f}", 1e9),
    "page cache MiB": shown("page_cache_growth", "{:+,.0f}", 2**20),
}
SMOLLM2: dict[str, Cell] = {
    "state rests": shown("place"),
    "parameters": shown("numel", "{:.1f}M", 1e6),
    "state GB": shown("numel", "{:.2f}", 1e9 / 16),
    "tokens": shown("told_tokens"),
    "steps": lambda run: str(len(run["losses"])) if "losses" in run else "failed",
    "step s": shown("step_s", "{:.1f}"),
    "above the interpreter MiB": shown("above_bytes", "{:,.0f}", 2**20),
    "on disk GB": shown("disk_bytes", "{:.2f}", 1e9),
    "moved a step GB": shown("moved_bytes", "{:.2f}", 1e9),
}
GOALS: dict[str, Cell] = {
    "goal": shown("goal"),
    "measured": shown("figure"),
    "met": lambda goal: {True: "yes", False: "no", None: DASH}[goal["met"]],
}


def comparison(setting: Setting, rows: Sequence[Row], pairs: Sequence[Row]) -> str:
    """One setting: times and memory, the disk, ours beside theirs, what failed."""
    on_disk = [row for row in rows if row.get("read_mib") is not None]
    return pages.page(
        f"**{setting.title}**",
        table(TIMES, rows),
        table(DISKS, on_disk) if on_disk else "",
        table(PAIRS, pairs, left=2) if pairs else "",
    )


def large_table(large: dict[str, Any]) -> str:
    """The model too large, in words."""
    title = "**A model too large for the memory it is given** (`examples/larger_than_memory.py`)"
    if large["status"] != "ok":
        return f"{title}\n\n{large['status']}: {essence(large['error'])}\n"
    said = (
        f"Losses: {_losses(large)}. Resident: the largest"
        " sum over the ranks at one time, seen from outside every 50 ms; libraries and"
        " interpreters are in it, shared pages once for each rank."
    )
    return pages.page(title, table(LARGE, [large], left=0), said)


def _losses(found: dict[str, Any]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in found["losses"])


def smollm2_table(found: dict[str, Any]) -> str:
    """SmolLM2 on one process."""
    title = "**SmolLM2 on one process** (`examples/larger_than_memory.py --weights smollm2`)"
    if found["status"] != "ok":
        return f"{title}\n\n{found['status']}: {essence(found['error'])}\n"
    beside = found["in_memory"]
    both = {"numel": found["parameters"], "told_tokens": found["tokens"]}
    runs = [
        {**found, **both, "place": "on the disk"},
        {**(beside or {}), **both, "place": "in memory"},
    ]
    same = ""
    if beside is not None:
        alike = beside["losses"] == found["losses"]
        same = f" In memory they {'are the same, bit for bit' if alike else 'differ'}."
    said = (
        f"Losses: {_losses(found)}.{same} Above the interpreter: the most that the process had"
        " resident, as the kernel counts it, beyond what it had behind its imports."
    )
    return pages.page(title, table(SMOLLM2, runs), said)


def to_markdown(document: dict[str, Any]) -> str:
    """The whole report: machine, date, goals, the tables, footnotes."""
    large, smollm2 = document["large"], document["smollm2"]
    return pages.page(
        pages.where(document, f"disk {document['disk']['file_system']}"),
        table(GOALS, document["goals"], left=3),
        *(
            comparison(Setting(**c["setting"]), c["rows"], c["pairs"])
            for c in document["comparisons"]
        ),
        large_table(large) if large is not None else "",
        smollm2_table(smollm2) if smollm2 is not None else "",
        LEGEND,
        DISK_LEGEND,
        *pages.notes(NOTES),
    )
