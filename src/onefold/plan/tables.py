"""A plan as tables for people."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from onefold.plan.account import Candidate, in_a_line
from onefold.plan.owned import Balance
from onefold.plan.schema import ENGINES_PEAK
from onefold.recipe.rows import Tier
from onefold.wording import readable

if TYPE_CHECKING:
    from onefold.plan.api import Plan


#: What tables say where there is nothing.
NONE = "–"


def gib(nbytes: float) -> str:
    """Return bytes with a unit."""
    return readable(nbytes) if nbytes > 0 else NONE


def in_seconds(seconds: float) -> str:
    """Return seconds, or milliseconds below one."""
    if not seconds:
        return NONE
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def balance_said(balance: Balance | None) -> str:
    """Return the work of the busiest owner over the mean, and the least that is possible where that
    is more than a hundredth above it.
    """
    if balance is None or balance.ranks == 1:
        return NONE
    least = f" (least {balance.least:.2f})" if balance.least >= 1.01 else ""
    return f"{balance.busiest:.2f}{least}"


def count(number: float) -> str:
    """Return a number with three digits and a unit."""
    if not number:
        return NONE
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


#: {unit of a figure of an account: how it is said}
_SAID: dict[str, Callable[[float], str]] = {
    "bytes": gib, "s": in_seconds, "1/s": count, "": lambda share: f"{share:.0%}" if share else NONE,
}  # fmt: skip


def show(plan: Plan, console: Console | None = None, explain: bool = False) -> None:
    """Print the question, the stages side by side or the best meshes, the recommendation, and what
    may change a decision; with `explain` also what the next steps would buy and what figures rest on.
    """
    out = console or Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    job, machine, model = plan.job, plan.machine, plan.model
    active = f", {count(model.active_numel)} active" if model.active_numel != model.numel else ""
    out.print(
        f"[bold]{model.name}[/bold]: {count(model.numel)} parameters{active},"
        f" {count(model.trainable)} trained"
    )
    batch = f"global batch {job.global_batch}" if job.global_batch else "one micro-batch a rank"
    named = "".join(f", {name}={value!r}" for name, value in job.communication.items())
    device = (
        f"{machine.ranks:,} × {machine.gpu.title or machine.gpu.name} ({gib(machine.capacity)}),"
        f" {machine.local} a node"
    )
    out.print(
        f"on {device}; {job.computes}, {job.seq:,} tokens a sample, {batch}, {job.optimizer}{named};"
        f" activations {plan.activations}"
    )
    if plan.stages:
        title = f"the best of {plan.searched:,} meshes, by seconds a step"
        _print(out, _one_a_row(title, plan.stages, plan) if plan.searched else _stages(plan))
    if plan.recommended is None:
        out.print(f"[bold]nothing fits.[/bold] {plan.why_not}")
    else:
        best = plan.recommended
        seconds = f", {in_seconds(best.step)} a step" if best.step else ""
        out.print(f"[bold]use[/bold] {in_a_line(best)}{seconds}.")
    others = {
        "what the next steps would buy": plan.next_steps,
        "ways to send between nodes": plan.slow_links,
    }
    for title, rows in others.items() if explain else ():
        if rows:
            _print(out, _one_a_row(title, rows, plan))
    for note in (*plan.notes, *(plan.assumptions if explain else ())):
        out.print(f"[dim]{note}[/dim]")


def _print(out: Console, table: Table) -> None:
    """Print a table at its full width, since figures that are cut are of no use."""
    Console(file=out.file, width=10_000, highlight=False).print(table)


def _stages(plan: Plan) -> Table:
    like, best = plan.stages[0].scheme, plan.recommended
    data_only = like.degrees.data_only
    title = f"a rank holds, sends and takes, at micro-batch {like.micro_batch}"
    title += f", checkpointing {like.checkpointing}" if data_only else f" on {like.degrees}"
    table = _table(title)
    # A recommendation that offloads or has groups gets a column of its own
    apart = best is not None and all(c.scheme != best.scheme for c in plan.stages)
    columns = (*plan.stages, best) if best is not None and apart else plan.stages
    for c in columns:
        scheme, mark = c.scheme, _mark(c, plan)
        off = ", offload" if scheme.offload != "none" else ""
        way = f", {scheme.communication}" if scheme.communication else ""
        table.add_column(f"stage {scheme.stage}{off}{way}{mark}", justify="right", no_wrap=True)
    for figures in zip(*(_figures(c, plan) for c in columns), strict=True):
        name, said = figures[0][0], [text for _, text in figures]
        if set(said) != {NONE}:
            table.add_row(name if name.startswith(" ") else f"[bold]{name}[/bold]", *said)
    return table


def _one_a_row(title: str, rows: Sequence[Candidate], plan: Plan) -> Table:
    """Return a table of candidates, one a row, with their figures of `_BRIEF`."""
    found = [dict(_figures(c, plan)) for c in rows]
    names = [name for name in _BRIEF if any(figures[name] != NONE for figures in found)]
    table = _table(title, "", *map(str.strip, names))
    for c, figures in zip(rows, found, strict=True):
        table.add_row(f"{c.scheme}{_mark(c, plan)}", *(figures[name] for name in names))
    return table


def _mark(c: Candidate, plan: Plan) -> str:
    is_best = plan.recommended is not None and c.scheme == plan.recommended.scheme
    return " ◄" if is_best else " (rounds)" if c.scheme.way.lossy else ""


#: What a table with a candidate in each row shows of `_figures`.
_BRIEF = (
    "micro-batches", "at rest", "at peak", "  of a node, to others", "  exposed communication", "  bubble",
    "a step takes", "tokens/s", "MFU", "fits",
)  # fmt: skip


def _figures(c: Candidate, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (name, figure in words) of a column, NONE for what it does not have."""
    scheme = c.scheme
    yield "recompute", NONE if scheme.degrees.data_only else scheme.checkpointing
    yield "micro-batches", f"{c.accumulation:,}"
    for title, part, unit, value in c.account.lines():
        if title != ENGINES_PEAK:
            yield f"  {part}" if part else title, _SAID[unit](value)
    yield "driver and NCCL beside the peak", gib(c.reserve.nbytes)
    yield "fits", _fit(c, plan)
    yield "busiest owner over the mean", balance_said(c.owners)
    # Searched for the stages alone
    fitting = plan.largest_micro_batch.get(scheme.stage) if c in plan.stages else None
    yield "largest micro-batch", NONE if fitting is None else str(fitting)


def _table(title: str, *columns: str) -> Table:
    """Return a table without a frame, with figures to the right."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    for name in columns or ("",):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    return table


def _fit(c: Candidate, plan: Plan) -> str:
    if c.fits:
        return "yes"
    if c.spare < 0:
        return f"no, by {gib(-c.spare)}"
    machine = plan.machine
    if not machine.shared and c.account.host * machine.local > machine.host.memory:
        return f"no, {Tier.HOST.title}"
    return f"no, {Tier.NVME.title}"
