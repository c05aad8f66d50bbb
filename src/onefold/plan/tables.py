"""A plan as tables for people."""

from __future__ import annotations

import io
import math
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from onefold.plan.evaluate import Candidate
from onefold.plan.schema import CATEGORIES, MOVED, TIER_SECONDS
from onefold.plan.sums import Sums

if TYPE_CHECKING:
    from onefold.plan.planner import Plan


def gib(nbytes: float) -> str:
    """Bytes in KiB, MiB or GiB; a dash for none."""
    if nbytes <= 0:
        return "–"
    if nbytes < 2**20:
        return f"{nbytes / 2**10:.1f} KiB"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:,.2f} GiB"


def in_seconds(seconds: float) -> str:
    """Seconds, or milliseconds below one; a dash for none."""
    if not seconds:
        return "–"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def count(number: float) -> str:
    """A number of things with three digits and a unit."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


_TIERS = {"device": "device", "host": "host", "nvme": "NVMe"}


def show(plan: Plan, console: Console | None = None) -> None:
    """Print the plan: the question, the stages side by side, the recommendation and what the next
    steps would buy.
    """
    out = console or Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    job, machine = plan.job, plan.machine
    active = (
        f", {count(plan.model.active_numel)} active"
        if plan.model.active_numel != plan.model.numel
        else ""
    )
    out.print(
        f"[bold]{plan.model.name}[/bold]: {count(plan.model.numel)} parameters{active},"
        f" {count(plan.model.trainable)} trained"
    )
    batch = f"global batch {job.global_batch}" if job.global_batch else "one micro-batch a rank"
    named = "".join(f", {name}={value!r}" for name, value in job.communication.items())
    device = (
        f"{machine.ranks} × {machine.gpu.title or machine.gpu.name} ({gib(machine.capacity)}),"
        f" {machine.local} a node"
    )
    out.print(
        f"on {device}; {job.computes}, {job.seq} tokens a sample, {batch}, {job.optimizer}{named};"
        f" activations {plan.source}"
    )
    _print(out, _stages(plan))
    if plan.recommended is None:
        out.print(f"[bold]nothing fits.[/bold] {plan.why_not}")
    else:
        out.print(_recommendation(plan.recommended))
        if plan.next_steps:
            _print(out, _steps(plan, plan.recommended))
    slow = slow_links_table(plan)
    if slow is not None and plan.slow_links is not None:
        _print(out, slow)
        for sentence in plan.slow_links.why:
            out.print(sentence)
    if plan.sums is not None:
        out.print(sums_said(plan.sums))
    shown = plan.shown
    placed = tiers_table(shown)
    if placed is not None:
        _print(out, placed)
        out.print(moves_said(shown))
    for note in plan.notes:
        out.print(f"[dim]{note}[/dim]")
    out.print(
        "[dim]MFU counts model FLOPs (6N + 12Lhs a token, no recompute) over the nominal rate of"
        " the device.[/dim]"
    )


def _print(out: Console, table: Table) -> None:
    """As wide as it is: figures are of no use when they are cut."""
    wide = Console(width=10_000, file=io.StringIO())
    needed = Measurement.get(wide, wide.options, table).maximum
    Console(file=out.file, width=max(out.width, needed), highlight=False).print(table)


def _stages(plan: Plan) -> Table:
    like, best = plan.stages[0].scheme, plan.recommended
    title = (
        f"a rank holds, sends and takes, at micro-batch {like.micro_batch}, checkpointing"
        f" {like.checkpointing}"
    )
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    table.add_column("", no_wrap=True)
    # One that offloads or has groups: a column of its own
    apart = best is not None and all(c.scheme != best.scheme for c in plan.stages)
    columns = (*plan.stages, best) if best is not None and apart else plan.stages
    for candidate in columns:
        mark = " ◄" if best is not None and candidate.scheme == best.scheme else ""
        off = ", offload" if candidate.scheme.offload != "none" else ""
        way = f", {candidate.scheme.communication}" if candidate.scheme.communication else ""
        table.add_column(
            f"stage {candidate.scheme.stage}{off}{way}{mark}", justify="right", no_wrap=True
        )
    accounts = [c.account for c in columns]
    # The largest are looked for as the stages are shown
    unasked = ["–"] * (len(columns) - len(plan.stages))
    table.add_row("[bold]at rest[/bold]", *(gib(a.rest_bytes) for a in accounts))
    for category in CATEGORIES:
        if any(a.rest.get(category) for a in accounts):
            table.add_row(f"  {category}", *(gib(a.rest.get(category, 0)) for a in accounts))
    table.add_row(
        "[dim]all states, papers' way[/dim]", *(f"[dim]{gib(c.states)}[/dim]" for c in columns)
    )
    table.add_row("[bold]at peak[/bold]", *(gib(a.peak_bytes) for a in accounts))
    for category in CATEGORIES:
        if any(a.peak.get(category) for a in accounts):
            table.add_row(f"  {category}", *(gib(a.peak.get(category, 0)) for a in accounts))
    table.add_row("  never above", *(gib(a.bound) for a in accounts))
    for row, values in (("host", [a.host for a in accounts]), ("NVMe", [a.nvme for a in accounts])):
        if any(values):
            table.add_row(row, *(gib(v) for v in values))
    table.add_row("fits", *(_fit(c, plan) for c in columns))
    table.add_row("[bold]sent in a step[/bold]", *(gib(a.wire_bytes) for a in accounts))
    for link in ("inside", "between"):
        if any(a.links.get(link) for a in accounts):
            table.add_row(
                f"  {'inside a node' if link == 'inside' else 'between nodes'}",
                *(gib(a.links.get(link, 0)) for a in accounts),
            )
    if any(a.node_links.get("between") for a in accounts):
        table.add_row(
            "  of a node, to others", *(gib(a.node_links.get("between", 0)) for a in accounts)
        )
    table.add_row(
        "[bold]a step takes[/bold]", *(in_seconds(a.seconds.get("step", 0)) for a in accounts)
    )
    for part in ("compute", "exposed communication", "optimizer", "io"):
        if any(a.seconds.get(part) for a in accounts):
            table.add_row(f"  {part}", *(in_seconds(a.seconds[part]) for a in accounts))
    table.add_row("tokens/s", *(count(a.tokens_per_s) for a in accounts))
    if any(a.mfu is not None for a in accounts):
        table.add_row("MFU", *(f"{a.mfu:.0%}" if a.mfu is not None else "–" for a in accounts))
    if plan.largest_micro_batch:
        table.add_row(
            "largest micro-batch",
            *(str(plan.largest_micro_batch[c.scheme.stage]) for c in plan.stages),
            *unasked,
        )
    if any(plan.largest_model.values()):
        table.add_row(
            "largest model of this width",
            *(count(plan.largest_model[c.scheme.stage]) for c in plan.stages),
            *unasked,
        )
    return table


def _fit(c: Candidate, plan: Plan) -> str:
    if c.fits:
        return "yes"
    if c.spare < 0:
        return f"no, by {gib(-c.spare)}"
    host = (
        not plan.machine.shared and c.account.host * plan.machine.local > plan.machine.host.memory
    )
    return "no, host" if host else "no, NVMe"


def _recommendation(best: Candidate) -> str:
    accumulated = f" × {best.accumulation} accumulated" if best.accumulation > 1 else ""
    text = (
        f"[bold]use {best.scheme}[/bold], micro-batch {best.scheme.micro_batch}{accumulated}:"
        f" {gib(best.needed)} of the {gib(best.usable)} that a rank may use,"
        f" {in_seconds(best.account.seconds.get('step', 0))} a step."
    )
    if best.account.host:
        text += f" Host: {gib(best.account.host)} a rank."
    if best.account.nvme:
        text += f" NVMe: {gib(best.account.nvme)} a rank."
    return text


def _steps(plan: Plan, best: Candidate) -> Table:
    table = Table(
        title="what the next steps would buy", title_justify="left", box=None, padding=(0, 2)
    )
    for name in ("", "peak", "saves", "step", "slower by"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    own = best.account.seconds.get("step", 0)
    for step in plan.next_steps:
        peak, seconds = step.account.peak_bytes, step.account.seconds.get("step", 0)
        saved = best.account.peak_bytes - peak
        slower = f"{seconds / own - 1:+.0%}" if own else "–"
        table.add_row(str(step.scheme), gib(peak), gib(saved), in_seconds(seconds), slower)
    return table


def tiers_table(found: Candidate) -> Table | None:
    """Where one rank's bytes are at peak, by category and tier, and what a step moves; None where
    all of it is on the device.
    """
    account = found.account
    if not account.offloaded:
        return None
    table = Table(
        title=f"where it is at peak: {found.scheme}", title_justify="left", box=None, padding=(0, 2)
    )
    table.add_column("", no_wrap=True)
    held = {"device": account.peak, **account.offloaded}
    for title in _TIERS.values():
        table.add_column(title, justify="right", no_wrap=True)
    others = sorted({c for by in held.values() for c in by} - set(CATEGORIES))
    for category in (*CATEGORIES, *others):
        if any(by.get(category) for by in held.values()):
            table.add_row(
                f"  {category}", *(gib(held.get(tier, {}).get(category, 0)) for tier in _TIERS)
            )
    table.add_row("[bold]all[/bold]", *(gib(sum(held.get(tier, {}).values())) for tier in _TIERS))
    return table


def moves_said(found: Candidate) -> str:
    """A sentence on what a step moves between tiers, how long that takes, and what hides how much
    of it; "" where nothing moves.
    """
    account = found.account
    if not account.moved:
        return ""
    moved = ", ".join(
        f"{gib(account.moved[move])} {move}" for move in MOVED if account.moved.get(move)
    )
    text = f"between tiers in a step: {moved}"
    if account.tiers:
        seconds = ", ".join(
            f"{name} {in_seconds(account.tiers[name])}"
            for name in TIER_SECONDS
            if account.tiers.get(name)
        )
        text += f"; {seconds}; {in_seconds(account.seconds.get('io', 0))} exposed"
    return text


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
        way, account, seconds = row.scheme.way, row.account, row.account.seconds
        marks = [
            word
            for word, is_so in (
                ("◄", row is slow.taken),
                ("rounds", way.lossy),
                ("to ask for", row is slow.named),
            )
            if is_so
        ]
        table.add_row(
            f"stage {row.scheme.stage}" if row.scheme.stage != stage else "",
            f"{row.scheme.communication}: {way.words}" if row.scheme.communication else "plain",
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
