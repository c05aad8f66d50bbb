"""`onefold plan --simulate`: run the recommended scheme with the real engine as one rank of N, and
compare it with the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from onefold.cli.show import show
from onefold.plan.account import unlike
from onefold.plan.api import Plan
from onefold.plan.job import Scheme
from onefold.plan.rank import stages_of
from onefold.simulation.simulate import Simulation, simulate

#: The most micro-batches to simulate. In a longer step the others are like the middle one.
MICRO_BATCHES = 3
#: The most tokens of a sample. What the engine holds and sends does not depend on them.
TOKENS = 128


def simulated(plan: Plan, model: Any, rank: int | None) -> list[Simulation]:
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
    own_code = degrees.data_only and not (job.lora_rank or isinstance(model, float))
    each = degrees.ranks // degrees.pp
    firsts = [stage.index * each for stage in unlike(stages_of(plan.model, degrees))]
    return [
        simulate(
            model if own_code else plan.model,
            scheme.recipe(job),
            degrees,
            rank=at,
            # Torch's 1F1B takes at least a micro-batch a stage; more of them are like the others
            micro_batches=min(candidate.accumulation, max(degrees.pp, MICRO_BATCHES)),
            checkpointing=scheme.checkpointing,  # type: ignore[arg-type]
            optimizer=job.optimizer,
            samples=1 if own_code else scheme.micro_batch,
            seq=min(job.seq, TOKENS) if own_code else job.seq,
            per_node=machine.node_ranks,
        )
        for at in (firsts if rank is None else [rank])
    ]


def show_simulation(ran: Sequence[Simulation], scheme: Scheme) -> None:
    """Print the engine's ledgers beside the plan's, line by line."""
    batches = f"{ran[0].micro_batches} micro-batch{'es' if ran[0].micro_batches > 1 else ''}"
    seconds = sum(one.seconds for one in ran)
    rows = [row for one in ran for row in _rows(one)]
    told = {
        "simulated": f"{scheme}, {batches}, in {seconds:.1f} s",
        "bytes of a rank in one step": rows,
    }
    if scheme.degrees.data_only:
        told["ran"] = "; ".join((ran[0].source, *ran[0].notes))
    else:
        told["not run"] = "what layers send along tp, cp and ep: the plan alone counts it"
    show(False, "simulation", told)


def _rows(one: Simulation) -> Iterator[dict[str, Any]]:
    told, seen = one.predicted, one.account
    sent = (told.sent, seen.sent) if told.sent or seen.sent else (told.wire, seen.wire)
    parts = {"at rest": (told.rest, seen.rest), "sent": sent, "copied": (told.moved, seen.moved)}
    for title, (plan, engine) in parts.items():
        for name in {**plan, **engine}:
            a, b = plan.get(name, 0), engine.get(name, 0)
            if a or b:
                off = "exact" if a == b else f"{b / a - 1:+.2%}" if a else "not planned"
                both = {"plan": f"{a:,}", "engine": f"{b:,}", "is": off}
                yield {"rank": one.rank, "what": f"{title}: {name}", **both}
