"""A plan over axes as tables for people."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from onefold.plan.collectives import SENT
from onefold.plan.mesh_account import RECOMPUTE_SAID, SECONDS, MeshAccount
from onefold.plan.schema import CATEGORIES
from onefold.plan.tables import _print, _table, count, gib, in_seconds

if TYPE_CHECKING:
    from onefold.plan.mesh_search import MeshPlan

_AXIS = {
    "data": "among holders (ZeRO)",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "pp": "pipeline",
}


def show_mesh(plan: MeshPlan, console: Console | None = None) -> None:
    """Print the question, one mesh at each ZeRO stage or the best meshes, and the notes."""
    out = console or Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    question = plan.question
    model, machine, job = question.model, question.machine, question.job
    active = f", {count(model.active_numel)} active" if model.active_numel != model.numel else ""
    out.print(f"[bold]{model.name}[/bold]: {count(model.numel)} parameters{active}")
    out.print(
        f"on {machine.ranks:,} × {machine.gpu.title or machine.gpu.name} ({gib(machine.capacity)}),"
        f" {machine.local} a node; {job.computes}, {job.seq:,} tokens a sample, global batch"
        f" {question.samples():,}, micro-batch {job.micro_batch}, {job.optimizer}"
    )
    if plan.searched:
        _print(out, best_meshes(plan))
    elif plan.rows:
        first = plan.rows[0]
        out.print(
            f"[italic]{first.degrees}: what the fullest rank holds, the busiest sends, and a step"
            " takes[/italic]"
        )
        _print(out, one_mesh(plan))
        held = ", ".join(f"{kind} {n:,}" for kind, n in first.holders.items())
        out.print(f"ranks that hold the same part, by kind: {held}")
    if plan.best is None:
        out.print(f"[bold]nothing fits.[/bold] {plan.why_not}")
    else:
        best = plan.best
        out.print(
            f"[bold]use {best.degrees}, ZeRO stage {best.zero}[/bold],"
            f" {RECOMPUTE_SAID[best.checkpointing]}, {best.micro_batches:,} micro-batches a rank: {gib(best.peak_bytes)} of the"
            f" {gib(best.usable)} that a rank may use, {in_seconds(best.seconds['step'])} a step."
        )
    for note in plan.notes:
        out.print(f"[dim]{note}[/dim]")


def best_meshes(plan: MeshPlan) -> Table:
    """Return the best meshes, one a row, the fastest first."""
    names = (
        "ZeRO",
        "recompute",
        "micro",
        "at rest",
        "peak",
        "bubble",
        "step",
        "tokens/s",
        "MFU",
    )
    table = _table(f"the best of {plan.searched:,} meshes, by seconds per token", "", *names)
    for row in plan.rows:
        table.add_row(
            str(row.degrees) + (" ◄" if row is plan.best else ""),
            str(row.zero),
            row.checkpointing,
            f"{row.micro_batches:,}",
            gib(row.rest_bytes),
            gib(row.peak_bytes),
            f"{row.bubble:.1%}",
            in_seconds(row.seconds["step"]),
            count(row.tokens / row.seconds["step"]),
            f"{row.mfu:.0%}",
        )
    return table


def one_mesh(plan: MeshPlan) -> Table:
    """Return a mesh's accounts, one ZeRO stage a column."""
    rows = plan.rows
    columns = [f"stage {r.zero}" + (" ◄" if r is plan.best else "") for r in rows]
    table = _table("", "", *columns)

    def line(
        name: str,
        of: Callable[[MeshAccount], float],
        shown: Callable[[float], str] = gib,
        always: bool = False,
    ) -> None:
        values = [of(row) for row in rows]
        if always or any(values):
            table.add_row(name, *map(shown, values))

    def categories(of: Callable[[MeshAccount], Mapping[str, int]]) -> None:
        for category in CATEGORIES:
            line(f"  {category}", lambda row, c=category: of(row).get(c, 0))  # type: ignore[misc]

    table.add_row("recompute", *(row.checkpointing for row in rows))
    line("[bold]at rest[/bold]", lambda row: row.rest_bytes, always=True)
    categories(lambda row: row.rest)
    table.add_row(
        "[dim]all states, papers' way[/dim]", *(f"[dim]{gib(row.states)}[/dim]" for row in rows)
    )
    line("[bold]at peak[/bold]", lambda row: row.peak_bytes, always=True)
    categories(lambda row: row.peak)
    table.add_row(
        "[dim]driver and NCCL beside it[/dim]",
        *(f"[dim]{gib(row.reserve.nbytes)}[/dim]" for row in rows),
    )
    table.add_row(
        "fits",
        *("yes" if r.fits else f"no, by {gib(r.peak_bytes - r.usable)}" for r in rows),
    )
    line("[bold]sent in a step[/bold]", lambda row: sum(_sums(row).values()), always=True)
    for axis in SENT:
        line(f"  {_AXIS[axis]}", lambda row, a=axis: _sums(row)[a])  # type: ignore[misc]
        kinds = dict.fromkeys(kind for row in rows for kind in row.sent.get(axis, ()))
        for kind in kinds if len(kinds) > 1 else ():
            line(f"    {kind}", lambda row, a=axis, k=kind: row.sent[a].get(k, 0))  # type: ignore[misc]
    line("[bold]a step takes[/bold]", lambda row: row.seconds["step"], in_seconds, always=True)
    for part in SECONDS[:-1]:
        line(f"  {part}", lambda row, p=part: row.seconds[p], in_seconds)  # type: ignore[misc]
    line("bubble", lambda row: row.bubble, lambda share: f"{share:.1%}")
    line("tokens/s", lambda row: row.tokens / row.seconds["step"], count, always=True)
    line("MFU", lambda row: row.mfu, lambda mfu: f"{mfu:.0%}")
    return table


def _sums(row: MeshAccount) -> dict[str, float]:
    return {axis: sum(row.sent.get(axis, {}).values()) for axis in SENT}
