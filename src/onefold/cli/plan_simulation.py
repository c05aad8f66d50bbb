"""`onefold plan --simulate`: the recommended scheme run by the real engine as one rank of N, beside what was planned."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from onefold.plan.planner import Plan
from onefold.plan.schema import CATEGORIES, MOVES
from onefold.plan.simulate import Event, Simulation, simulate
from onefold.recipe import Tier
from onefold.recipe.groups import NODE

#: Micro-batches that are simulated of a longer step: the others do what these do.
MICRO_BATCHES = 2
_ENDS = 8


def simulated(plan: Plan, model: Any, rank: int) -> Simulation:
    """The recommended scheme of `plan`, or the first shown where nothing fits, as rank `rank`.

    Args:
        model: what the plan was asked for: its code runs, if it has any.

    Raises:
        ValueError: the scheme cannot run, or no code runs without values.
    """
    candidate = plan.recommended or plan.stages[-1]
    scheme = candidate.scheme
    recipe = scheme.recipe(plan.job)
    if recipe.group in (None, NODE) and plan.machine.nodes > 1:  # nobody launches a simulation on nodes
        recipe = recipe.replace(group=plan.machine.local)
    elif recipe.group == NODE:
        recipe = recipe.replace(group=plan.machine.ranks)
    if any(t is not Tier.DEVICE for t in (recipe.parameters.tier, recipe.optimizer.tier)) or recipe.tile is not None:
        raise ValueError(f"--simulate runs the engine with everything on the device, in one piece, not {scheme}: add --offload none.")
    return simulate(
        plan.model if plan.job.lora_rank or isinstance(model, float) else model,
        recipe,
        plan.machine.ranks,
        rank=rank,
        micro_batches=min(candidate.accumulation, MICRO_BATCHES),
        checkpointing=scheme.checkpointing,  # type: ignore[arg-type]
        optimizer=plan.job.optimizer,
        seq=min(plan.job.seq, 128),
    )


def show_simulation(found: Simulation, console: Console | None = None) -> None:
    """Print what was planned and what the engine's ledgers said, line by line, and both ends of the step."""
    out = console or Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    batches = f"{found.micro_batches} micro-batch{'es' if found.micro_batches > 1 else ''}"
    out.print(
        f"[bold]simulated[/bold]: the engine as rank {found.rank} of {found.ranks}, {batches}, {found.source}; "
        f"{len(found.events):,} events in {found.seconds:.1f} s"
    )
    table = Table(title="bytes of a rank in one step", title_justify="left", box=None, padding=(0, 2))
    for name in ("", "closed form", "engine", ""):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for title, names, part in (("at rest", CATEGORIES, "rest"), ("sent", MOVES, "wire"), ("engine's peak", CATEGORIES, "ledger")):
        told, seen = getattr(found.predicted, part), getattr(found.account, part)
        for name in names if part != "ledger" else ():
            if told.get(name) or seen.get(name):
                _row(table, f"  {title}: {name}", told.get(name, 0), seen.get(name, 0))
        _row(table, f"[bold]{title}[/bold]", sum(told.values()), sum(seen.values()))
    out.print(table, crop=False)
    head, tail = found.events[:_ENDS], found.events[-_ENDS:] if len(found.events) > 2 * _ENDS else found.events[_ENDS:]
    for event in head:
        out.print(_line(event))
    if len(found.events) > 2 * _ENDS:
        out.print(f"  ... {len(found.events) - 2 * _ENDS:,} more (--json has them all)")
    for event in tail:
        out.print(_line(event))
    for note in found.notes:
        out.print(f"[dim]{note}[/dim]")


def _row(table: Table, name: str, told: int, seen: int) -> None:
    table.add_row(name, f"{told:,}", f"{seen:,}", "exact" if told == seen else f"{seen / told - 1:+.2%}" if told else "not planned")


def _line(event: Event) -> str:
    does = "sends" if event.moved else "takes" if event.nbytes > 0 else "gives"
    return f"  {does} {abs(event.nbytes):>18,}  {event.what:18} {event.unit}"
