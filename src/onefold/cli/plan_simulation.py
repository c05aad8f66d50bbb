"""`onefold plan --simulate`: run the recommended scheme with the real engine as one rank of N, and
compare it with the plan.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from onefold.cli.tables import plain_table
from onefold.comm import STEP_MOVES
from onefold.plan.account import unlike
from onefold.plan.job import Scheme
from onefold.plan.planner import Plan
from onefold.plan.rank import stages_of
from onefold.plan.schema import CATEGORIES, MOVED
from onefold.plan.tables import _print
from onefold.recipe.rows import NODE
from onefold.simulation.mesh import MeshSimulation, simulate_mesh
from onefold.simulation.result import Event, Simulation
from onefold.simulation.simulate import simulate

#: The most micro-batches to simulate. In a longer step the others are like the middle one.
MICRO_BATCHES = 3
#: The most tokens of a sample. What the engine holds and sends does not depend on them.
TOKENS = 128
_ENDS = 8


def simulated(plan: Plan, model: Any, rank: int | None) -> list[Any]:
    """Simulate as rank `rank` the scheme that `plan` shows in detail: the recommended one, if any fits.
    None: as the first rank of each stage of the pipeline that differs from the others.

    Args:
        model: the model that the plan was asked for. Its code runs, if it has any.

    Raises:
        ValueError: the scheme cannot run, or the model's code needs values.
    """
    if not plan.stages:
        raise ValueError(plan.why_not)
    candidate, machine, job = plan.shown, plan.machine, plan.job
    scheme, degrees = candidate.scheme, candidate.scheme.degrees
    recipe = scheme.recipe(job)
    if degrees is not None:
        each = degrees.ranks // degrees.pp
        firsts = [stage.index * each for stage in unlike(stages_of(plan.model, degrees))]
        # Torch's 1F1B takes at least a micro-batch a stage; more of them are like the others
        batches = min(candidate.accumulation, max(degrees.pp, MICRO_BATCHES))
        return [
            simulate_mesh(
                plan.model, recipe, degrees, rank=at, micro_batches=batches, micro_batch=scheme.micro_batch,
                seq=job.seq, optimizer=job.optimizer, per_node=machine.node_ranks,
            )
            for at in (firsts if rank is None else [rank])
        ]  # fmt: skip
    # A simulation has no launcher that tells the nodes, so give their size in ranks
    if recipe.inner in (None, NODE) and machine.nodes > 1:
        recipe = recipe.in_groups_of(machine.local)
    elif recipe.inner == NODE:
        recipe = recipe.in_groups_of(machine.ranks)
    found = simulate(
        plan.model if job.lora_rank or isinstance(model, float) else model,
        recipe,
        machine.ranks,
        rank=rank or 0,
        micro_batches=min(candidate.accumulation, MICRO_BATCHES),
        checkpointing=scheme.checkpointing,  # type: ignore[arg-type]
        optimizer=job.optimizer,
        seq=min(job.seq, TOKENS),
    )
    return [found]


def show_simulation(ran: Sequence[Any], scheme: Scheme) -> None:
    """Print the plan and the engine's ledgers line by line, and the first and last events of the
    step.
    """
    if scheme.degrees is not None:
        _show_mesh(ran, scheme.stage)
        return
    found: Simulation = ran[0]
    out = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    batches = f"{found.micro_batches} micro-batch{'es' if found.micro_batches > 1 else ''}"
    out.print(
        f"[bold]simulated[/bold]: {scheme}, the engine as rank {found.rank} of {found.ranks},"
        f" {batches}, {found.source}; {len(found.events):,} events in {found.seconds:.1f} s"
    )
    table = plain_table("bytes of a rank in one step", "", " closed form", " engine", "")
    for title, names, part in (
        ("at rest", CATEGORIES, "rest"),
        ("sent", STEP_MOVES, "wire"),
        ("copied", MOVED, "moved"),
        ("engine's peak", CATEGORIES, "ledger"),
    ):
        told, seen = getattr(found.predicted, part), getattr(found.account, part)
        for name in names if part != "ledger" else ():
            if told.get(name) or seen.get(name):
                _row(table, f"  {title}: {name}", told.get(name, 0), seen.get(name, 0))
        if part != "moved" or told or seen:
            _row(table, f"[bold]{title}[/bold]", sum(told.values()), sum(seen.values()))
    out.print(table, crop=False)
    head, tail = (
        found.events[:_ENDS],
        (found.events[-_ENDS:] if len(found.events) > 2 * _ENDS else found.events[_ENDS:]),
    )
    for event in head:
        out.print(_line(event))
    if len(found.events) > 2 * _ENDS:
        out.print(f"  ... {len(found.events) - 2 * _ENDS:,} more (--json has them all)")
    for event in tail:
        out.print(_line(event))
    for note in found.notes:
        out.print(f"[dim]{note}[/dim]")


def _row(table: Table, name: str, told: int, seen: int) -> None:
    table.add_row(name, f"{told:,}", f"{seen:,}", _apart(told, seen))


def _apart(told: int, seen: int) -> str:
    """Return how far the engine is from its closed form, in words."""
    return "exact" if told == seen else f"{seen / told - 1:+.2%}" if told else "not planned"


# -- a mesh of several axes ------------------------------------------------------------------------


def _show_mesh(found: Sequence[MeshSimulation], zero: int) -> None:
    """Print the bytes of the engine in each simulated stage, and whether the closed forms agree."""
    out = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    first = found[0]
    batches = f"{first.micro_batches} micro-batch{'es' if first.micro_batches > 1 else ''}"
    seconds = sum(one.seconds for one in found)
    out.print(
        f"[bold]simulated[/bold]: {first.degrees}, ZeRO stage {zero}, {batches}; the engine as"
        f" {len(found)} of {first.degrees.ranks:,} ranks, a stand-in of the same parameters;"
        f" {seconds:.1f} s"
    )
    columns = [f" stage {one.stage}" if len(found) > 1 else f" rank {one.rank:,}" for one in found]
    table = plain_table("bytes of a rank in one step", "", *columns, " closed forms")

    def line(name: str, seen: list[int], told: list[int]) -> None:
        if any(seen) or any(told):
            words = list(dict.fromkeys(map(_apart, told, seen)))
            table.add_row(name, *(f"{n:,}" for n in seen), ", ".join(words))

    for name in CATEGORIES:
        line(
            f"  at rest: {name}",
            [one.account.rest.get(name, 0) for one in found],
            [one.predicted.rest.get(name, 0) for one in found],
        )
    line(
        "[bold]at rest[/bold]",
        [one.account.rest_bytes for one in found],
        [one.predicted.rest_bytes for one in found],
    )
    for axes in dict.fromkeys(axes for one in found for axes in (*one.sent, *one.closed)):
        line(
            f"  sent along {axes}",
            [one.sent.get(axes, 0) for one in found],
            [one.closed.get(axes, 0) for one in found],
        )
    line(
        "[bold]sent[/bold]",
        [sum(one.sent.values()) for one in found],
        [sum(one.closed.values()) for one in found],
    )
    _print(out, table)
    out.print(
        "[dim]what layers send along tp, cp and ep is not run: the plan alone counts it[/dim]"
    )


def _line(event: Event) -> str:
    does = "sends" if event.moved else "takes" if event.nbytes > 0 else "gives"
    return f"  {does} {abs(event.nbytes):>18,}  {event.what:18} {event.unit}"
