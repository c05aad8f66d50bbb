"""One scheme on one machine: what a rank holds, sends and spends. The engine's buffers and the model's activations, laid over each other.

    engine     ▁▁▃▃▁▁▃▃▁▁▅▅▇▇▅▅▁▁     replayed in integers        (plan/replay.py)
    activity   ▁▂▃▄▅▆▇███▇▆▅▄▃▂▁▁     traced or from dimensions   (plan/activity.py)
    moments    ▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃
    ───────────────────────────────
    sum        its largest slot is the peak
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from onefold.memory import GATHERED, IDLE, REDUCTION
from onefold.plan.activity import Activity, flops_per_token
from onefold.plan.formulas.states import model_states
from onefold.plan.hardware import Machine
from onefold.plan.job import Job, Scheme
from onefold.plan.offload import Moved, moved
from onefold.plan.replay import Moment, Replay, outer
from onefold.plan.schema import ACTIVATIONS, FRAGMENTATION, LOGITS, MOMENTS, TEMPORARY, Account
from onefold.plan.shapes import ModelShape
from onefold.plan.states import MOMENTS_OF, UnitPlan, at_rest, gathers_of, units_of, wire
from onefold.plan.times import Software, Traffic, Work, links_of, step_times, traffic_of
from onefold.recipe import Placement, Recipe

#: Of what comes and goes in a step on a GPU, the share that its allocator cannot use again (blocks of other sizes). An assumption, in
#: line with the largest models that were trained: 0.63 to 0.90 of what their states allowed.
FRAGMENTED = 0.10
#: Bytes that a process takes of a GPU before its first tensor: context, kernels, communicator buffers.
CONTEXT = 1 << 30
#: What comes and goes in a step.
_MOVING = (GATHERED, REDUCTION, IDLE, ACTIVATIONS, LOGITS, TEMPORARY)


@dataclass(frozen=True)
class Candidate:
    """A scheme with its account.

    Attributes:
        fits: the peak's sum is within what the device may use, the host's share within the host.
        states: bytes of a rank's share of all states at once, wherever they lie, as the papers count them (`formulas.states`): gradients
            beside the rest, a 16-bit copy of the parameters beside their masters. The engine never holds them all: see the account.
    """

    scheme: Scheme
    account: Account
    fits: bool
    usable: int
    accumulation: int
    states: int = 0
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def spare(self) -> int:
        """Bytes left on the device at peak; below 0 where it does not fit."""
        return self.usable - self.account.peak_bytes


def evaluate(
    model: ModelShape, activity: Activity, machine: Machine, job: Job, scheme: Scheme, software: Software | None = None
) -> Candidate:
    """Account for `scheme`. `activity` is of `scheme.micro_batch` samples under `scheme.checkpointing`.

    Raises:
        ValueError: the global batch does not divide.
    """
    recipe = scheme.recipe(job)
    accumulation = job.accumulation(machine.ranks, scheme.micro_batch)
    engine = _engine(model, recipe, machine.ranks, min(accumulation, 2), job.optimizer)
    units, moments, rest = engine.units, engine.moments, dict(engine.rest)
    states = rest.get(MOMENTS, 0)
    limit = engine.bound + states + max((s.peak for s in activity.slots), default=0)
    away = moved(scheme, units, job.optimizer) if scheme.offload != "none" else None
    if away is not None:
        rest = away.apply(rest) | {GATHERED: 0}
        limit += sum(away.added.values()) - sum(away.gone.values())
    peak = _peak(moments, activity, states, away, 0.0 if machine.gpu.name == "here" else FRAGMENTED)
    host, nvme = (away.host, away.nvme) if away is not None else (0, 0)
    sent = wire(list(units), recipe, accumulation)
    nccl = getattr(machine.measured, "backend", "nccl") != "gloo"
    kept, late = recipe.parameters.placement is Placement.REPLICATED, recipe.reduce_at == "boundary"
    traffic = traffic_of(sent, calls_of(units, recipe, accumulation), machine, kept=kept, at_boundary=late, nccl=nccl)
    times = step_times(_work(model, engine, activity, machine, job, scheme, traffic, accumulation), machine, software)
    account = Account(
        rest={k: v for k, v in rest.items() if v},
        peak={k: v for k, v in peak.items() if v},
        ledger=dict(engine.ledger),
        bound=limit + peak.get(FRAGMENTATION, 0),
        host=host,
        nvme=nvme,
        wire=sent,
        links={k: v for k, v in links_of(traffic).items() if v},
        seconds=times.seconds,
        tokens_per_s=times.tokens_per_s,
        mfu=times.mfu,
    )
    usable = usable_bytes(machine)
    fits = account.peak_bytes <= usable and host * machine.local <= machine.host.memory and nvme * machine.local <= machine.host.nvme
    papers = states_of(model, job, scheme.stage, machine.ranks)
    return Candidate(scheme, account, fits, usable, accumulation, papers, (*activity.notes, *times.notes))


def states_of(model: ModelShape, job: Job, stage: int, ranks: int) -> int:
    """Bytes of model states on a rank by the formula of Rajbhandari et al. 2020, section 5, at the job's bytes per parameter."""
    convention = job.convention
    frozen = (model.numel - model.trainable) * convention.parameters / (ranks if stage == 3 else 1)
    return round(model_states(model.trainable, convention, stage, ranks) + frozen)


def usable_bytes(machine: Machine) -> int:
    """Bytes of the device that training may take: its capacity less what the process itself holds of a GPU."""
    return machine.capacity - (0 if machine.gpu.name == "here" else CONTEXT)


@dataclass(frozen=True)
class _Engine:
    """What depends on the recipe and not on what is recomputed or leaves the device. `stepped`: elements that this rank's update steps."""

    units: tuple[UnitPlan, ...]
    moments: tuple[Moment, ...]
    ledger: Mapping[str, int]
    rest: Mapping[str, int]
    bound: int
    stepped: int


@lru_cache(maxsize=256)
def _engine(model: ModelShape, recipe: Recipe, ranks: int, micro_batches: int, optimizer: str) -> _Engine:
    units = units_of(model, recipe, ranks)
    replay = Replay(units, recipe).run(micro_batches)
    stepped = sum(f.local(slot) for u in units for f in u.flats if f.trainable for slot in f.layout.slots)
    bound = bound_of(units, recipe, micro_batches)
    return _Engine(tuple(units), tuple(replay.moments), replay.peak, at_rest(units, optimizer), bound, stepped)


def bound_of(units: list[UnitPlan], recipe: Recipe, micro_batches: int = 1) -> int:
    """Bytes that the engine's ledger never exceeds, in closed form.

    S + G·(prefetch + 2) + C + R·(in_flight + 2) + T, where S is what rests, G the largest gathered unit, C the gathered units around
    others, R the largest reduction of a unit (its buffer, what is received, a copy in the wire's dtype if that differs), T all gradients
    once they are reduced (and copied where the masters have another dtype), and as long as they are kept whole.
    """
    rest = {k: v for k, v in at_rest(units).items() if k != MOMENTS}
    prefetch, in_flight = (recipe.prefetch, recipe.in_flight) if recipe.overlap else (0, 0)
    gathered = [sum(f.numel * f.dtypes.compute.itemsize for f in u.flats if not f.kept) for u in units]
    names = outer(list(units))
    around = [g for g, u in zip(gathered, units, strict=True) if u.name in names]
    reductions, total = [], 0
    for unit in units:
        one = 0
        for f in (f for f in unit.flats if f.trainable):
            wire_bytes, sums = f.dtypes.wire.itemsize, f.dtypes.sums.itemsize
            late = recipe.reduce_at == "boundary" and micro_batches > 1
            one += f.numel * (2 * wire_bytes + (wire_bytes if late and wire_bytes != sums else 0))
            one += f.layout.shard_numel * (sums if wire_bytes != sums else 0)
            kept = f.numel * sums if late else 0
            landed = f.dtypes.wire if f.whole_master else f.dtypes.sums
            copied = f.dtypes.master.itemsize if landed != f.dtypes.master else 0
            twice = landed.itemsize if f.whole_master else 0  # all-reduced sums wait for the end of backward
            total += (f.numel if f.whole_master else f.layout.shard_numel) * (landed.itemsize + copied + twice) + kept
        reductions.append(one)
    every = sum(gathered) if not recipe.reshard_after_forward else 0
    ahead = max(every, max(gathered, default=0) * (prefetch + 2)) + sum(around)
    return sum(rest.values()) + ahead + max(reductions, default=0) * (in_flight + 2) + total


def _peak(moments: tuple[Moment, ...], activity: Activity, states: int, away: Moved | None, fragmented: float) -> dict[str, int]:
    """The categories of the largest slot, once what is kept elsewhere is gone and fragmentation is added."""
    engine: dict[tuple[str, str], Moment] = {}
    for m in moments:
        best = engine.get((m.phase, m.unit))
        if best is None or m.total > best.total:
            engine[m.phase, m.unit] = m
    last = {phase: max((m for m in moments if m.phase == phase), key=lambda m: m.total, default=None) for phase in ("forward", "backward")}
    rows: list[dict[str, int]] = []
    slots = activity.slots
    for i, slot in enumerate(slots):
        beside = [slots[j] for j in (i - 1, i, i + 1) if 0 <= j < len(slots) and slots[j].phase == slot.phase]
        near = [engine[s.phase, s.unit] for s in (beside if slot.unit == "(root)" else [slot]) if (s.phase, s.unit) in engine]
        held = max(near, key=lambda m: m.total) if near else last[slot.phase]
        mine = dict(held.held) if held is not None else {}
        mine[ACTIVATIONS] = slot.peak - slot.logits - slot.gradients
        mine[LOGITS], mine[TEMPORARY], mine[MOMENTS] = slot.logits, slot.gradients, states
        rows.append(mine)
    rows += [{**m.held, MOMENTS: states} for m in moments if m.phase in ("step", "backward")]
    rows = [away.apply(row) for row in rows] if away is not None else rows
    for row in rows:
        row[FRAGMENTATION] = int(fragmented * sum(v for k, v in row.items() if k in _MOVING))
    return max(rows, key=lambda row: sum(row.values()))


def calls_of(units: Sequence[UnitPlan], recipe: Recipe, micro_batches: int) -> dict[str, int]:
    """Collectives of a step by move: one for each flat buffer that travels."""
    out = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}
    reductions = micro_batches if recipe.reduce_at == "micro-batch" else 1
    for unit in units:
        for flat in unit.flats:
            out["all-gather"] += gathers_of(unit, flat, recipe, micro_batches)
            if flat.trainable:
                out["all-reduce" if flat.whole_master else "reduce-scatter"] += reductions
    return out


def _work(
    model: ModelShape,
    engine: _Engine,
    activity: Activity,
    machine: Machine,
    job: Job,
    scheme: Scheme,
    traffic: list[Traffic],
    accumulation: int,
) -> Work:
    tokens = scheme.micro_batch * job.seq * accumulation
    per_token = flops_per_token(model, model.transformer, job.seq)
    flops = activity.flops * accumulation or per_token * tokens
    stepped = engine.stepped
    touched = 4 * (3 + 2 * MOMENTS_OF[job.optimizer]) * stepped  # gradient and parameter read, parameter written; moments both
    host = scheme.offload != "none"
    element = 2 if job.precision != "fp32" else 4
    shard = model.trainable / machine.ranks
    moved = 2 * element * shard if host else 0.0
    traced = activity.kernels if activity.kernels is not None and activity.kernels.flops == activity.flops else None
    if scheme.offload in ("parameters", "nvme"):
        moved += 2 * element * (model.numel / machine.ranks) * accumulation
    return Work(
        flops=flops,
        traffic=tuple(traffic),
        model_flops=per_token * tokens,
        precision=job.precision,
        tokens=float(tokens * machine.ranks),
        micro_batches=accumulation,
        forward_share=activity.forward_flops / activity.flops if activity.flops else 1 / 3,
        optimizer_numel=0 if host else stepped,
        optimizer_bytes=0 if host else touched,
        host_optimizer_bytes=touched if host else 0,
        host_bytes=moved,
        nvme_bytes=24 * shard if scheme.offload == "nvme" else 0.0,
        hidden=model.transformer.hidden if model.transformer else 0,
        micro_tokens=scheme.micro_batch * job.seq,
        kernels=traced * accumulation if traced is not None else None,
        handed=float(model.trainable * accumulation),
    )
