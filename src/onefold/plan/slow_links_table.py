"""Ways around slow links side by side, and who adds gradients up: as tables and sentences for
people.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.table import Table

from onefold.plan.figures import gib, in_seconds
from onefold.plan.sums import Sums
from onefold.plan.wires import WIRES

if TYPE_CHECKING:
    from onefold.plan.planner import Plan


def sums_said(sums: Sums) -> str:
    """Who adds gradients up, what the other would take, and which is faster when."""
    ordered, native = (c.account for c in (sums.ordered, sums.native))
    times = [in_seconds(a.seconds["step"]) for a in (ordered, native)]
    peaks = [gib(a.peak_bytes) for a in (ordered, native)]
    start = sums.faster_from
    when = (
        "at any size"
        if start <= 0
        else "at no size"
        if start == math.inf
        else f"from {gib(start)} of gradients in a unit on"
    )
    here = f" (the largest unit here has {gib(sums.largest)})" if 0 < start < math.inf else ""
    mine, others = ("rank order", "NCCL") if sums.asked == "ordered" else ("NCCL", "rank order")
    if sums.asked == "native":
        times, peaks = times[::-1], peaks[::-1]
    words = {
        "rank order": f"added in rank order, in {sums.sums_dtype}: the same bits at every stage",
        "NCCL": f"added by NCCL, in {sums.dtype} and an order of its own (reduce='native')",
    }
    return (
        f"gradients are {words[mine]}; {words[others]}, a step would take {times[1]} instead of"
        f" {times[0]}, with {peaks[1]} instead of {peaks[0]} at peak. NCCL's sums are the faster"
        f" {when}{here}"
    )


def slow_links_table(plan: Plan) -> Table | None:
    """Every way to send less between nodes; None where links are not slow."""
    slow = plan.slow_links
    if slow is None:
        return None
    title = "on slow links: what a rank holds, a node sends to others in a step, and a step takes"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2), pad_edge=False)
    for name in ("", "", "at rest", "peak", "between nodes", "step", "waits", "fits", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    stage = None
    for row in slow.rows:
        wires, account, seconds = WIRES[row.scheme.wires], row.account, row.account.seconds
        marks = [
            word
            for word, is_so in (
                ("◄", row is slow.taken),
                ("rounds", wires.lossy),
                ("to ask for", row is slow.named),
            )
            if is_so
        ]
        table.add_row(
            f"stage {row.scheme.stage}" if row.scheme.stage != stage else "",
            f"{row.scheme.wires}: {wires.words}" if row.scheme.wires else "plain",
            gib(account.rest_bytes),
            gib(account.peak_bytes),
            gib(account.node_links.get("between", 0)),
            in_seconds(seconds["step"]),
            in_seconds(seconds["exposed communication"]),
            "yes" if row.fits else "no",
            ", ".join(marks),
        )
        stage = row.scheme.stage
    return table
