"""One scheme on one machine: what a rank holds, sends and spends. The engine's buffers and the
model's activations, laid over each other.

    engine     ▁▁▃▃▁▁▃▃▁▁▅▅▇▇▅▅▁▁     replayed in integers        (plan/replay.py)
    activity   ▁▂▃▄▅▆▇███▇▆▅▄▃▂▁▁     traced or from dimensions   (plan/activity.py)
    moments    ▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃
    ───────────────────────────────
    sum        its largest slot is the peak

What rests and moves off the device is counted beside it, by the same layouts (plan/offloaded.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from onefold.device.copies import WINDOW
from onefold.layout import ShardSpec
from onefold.memory import GATHERED, IDLE, LEAVING, REDUCTION
from onefold.plan.activity import Activity, flops_per_token
from onefold.plan.engine_kernels import coded_bytes, handled_bytes, summed_bytes
from onefold.plan.formulas import states_by_kind
from onefold.plan.hardware import Machine
from onefold.plan.job import Job, Scheme
from onefold.plan.offloaded import HOST, OffloadedBytes, OnHost, moved_by, offloaded_bytes, on_host
from onefold.plan.replay import Moment, Replay, outer
from onefold.plan.schema import ACTIVATIONS, FRAGMENTATION, LOGITS, MOMENTS, TEMPORARY, Account
from onefold.plan.shapes import ModelShape
from onefold.plan.states import (
    MOMENTS_OF,
    Leg,
    UnitPlan,
    at_rest,
    gathers_of,
    legs_of,
    topology_of,
    units_ahead,
    units_of,
    wire,
)
from onefold.plan.times import Software, Traffic, Work, node_links, step_times, traffic_over
from onefold.recipe import Recipe
from onefold.recipe.core import SMALL_TRAFFIC
from onefold.recipe.rows import GROUP

#: Of what comes and goes in a step on a GPU, the share that its allocator cannot use again (blocks
#: of other sizes). An assumption, in line with the largest models that were trained: 0.63 to 0.90
#: of what their states allowed.
FRAGMENTED = 0.10
#: Bytes that a process takes of a GPU before its first tensor: context, kernels, communicator
#: buffers.
CONTEXT = 1 << 30
#: What comes and goes in a step.
_MOVING = (GATHERED, REDUCTION, IDLE, LEAVING, ACTIVATIONS, LOGITS, TEMPORARY)


@dataclass(frozen=True)
class Candidate:
    """A scheme with its account.

    Attributes:
        fits: the peak's sum is within what the device may use, the host's and NVMe's within what a
            node has. Where the device is a CPU both sums together are within what it may use.
        states: bytes of a rank's share of all states at once, wherever they lie, as the papers
            count them (`formulas.states`): gradients beside the rest, a 16-bit copy of the
            parameters beside their masters. The engine never holds them all: see the account.
    """

    scheme: Scheme
    account: Account
    fits: bool
    usable: int
    accumulation: int
    states: int = 0
    notes: tuple[str, ...] = field(default=(), compare=False)

    shared: bool = False

    @property
    def needed(self) -> int:
        """Bytes at peak of what `usable` is of: on a CPU the host's are among them."""
        return self.account.peak_bytes + (self.account.host if self.shared else 0)

    @property
    def spare(self) -> int:
        """Bytes left on the device at peak; below 0 where it does not fit."""
        return self.usable - self.needed


def evaluate(
    model: ModelShape,
    activity: Activity,
    machine: Machine,
    job: Job,
    scheme: Scheme,
    software: Software | None = None,
) -> Candidate:
    """Account for `scheme`. `activity` is of `scheme.micro_batch` samples under
    `scheme.checkpointing`.

    Raises:
        ValueError: the global batch does not divide.
    """
    recipe = scheme.recipe(job)
    accumulation = job.accumulation(machine.ranks, scheme.micro_batch)
    per_node = machine.local if machine.nodes > 1 else None
    nccl = on_nccl(machine)
    engine = _engine(
        model,
        recipe,
        machine.ranks,
        per_node,
        accumulation,
        job.optimizer,
        nccl,
        0 if machine.shared else WINDOW,
    )
    moments, rest = engine.moments, dict(engine.rest)
    states = rest.get(MOMENTS, 0)
    away = (
        on_host(activity, recipe.offload_activations, machine.shared)
        if recipe.offload_activations is not None
        else OnHost(activity)
    )
    limit = engine.bound + states + max((s.peak for s in away.activity.slots), default=0)
    peak = _peak(moments, away.activity, states, 0.0 if machine.gpu.name == "here" else FRAGMENTED)
    offloaded = engine.offloaded
    carried = (*offloaded.carried, *away.carried(accumulation))
    held = {tier: dict(by) for tier, by in offloaded.peak.items()}
    if away.nbytes:
        held[HOST][ACTIVATIONS] = away.nbytes
    host = sum(held[HOST].values())
    topology = topology_of(recipe, machine.ranks, per_node)
    traffic = traffic_over(engine.legs, machine, topology, nccl=nccl)
    links = node_links(engine.legs, machine, topology, nccl=nccl)
    work = replace(
        _work(model, engine, activity, machine, job, scheme, traffic, accumulation),
        carried=carried,
        behind=recipe.step_in_backward,
        coded_bytes=engine.coded,
        handled_bytes=engine.handled,
        summed_bytes=engine.summed,
    )
    times = step_times(_with_host_update(work, offloaded, job), machine, software)
    account = Account(
        rest={k: v for k, v in rest.items() if v},
        peak={k: v for k, v in peak.items() if v},
        ledger=dict(engine.ledger),
        bound=limit + peak.get(FRAGMENTATION, 0),
        host=host,
        nvme=offloaded.nvme,
        offloaded={tier: by for tier, by in held.items() if by},
        moved=moved_by(carried),
        wire=engine.wire,
        links={k: round(v / machine.local) for k, v in links.items() if v},
        node_links={k: v for k, v in links.items() if v} if machine.nodes > 1 else {},
        seconds=times.seconds,
        tiers=times.tiers if carried else {},
        tokens_per_s=times.tokens_per_s,
        mfu=times.mfu,
    )
    usable = usable_bytes(machine)
    found = Candidate(
        scheme,
        account,
        False,
        usable,
        accumulation,
        states_of(model, job, scheme.stage, machine.ranks, recipe, topology.inner),
        (*activity.notes, *times.notes),
        machine.shared,
    )
    local, there = machine.local, machine.host
    return replace(
        found,
        fits=found.spare >= 0
        and (machine.shared or host * local <= there.memory)
        and offloaded.nvme * local <= there.nvme,
    )


def on_nccl(machine: Machine) -> bool:
    """Whether moves are operations of NCCL's, on the device."""
    return bool(
        getattr(machine.measured, "backend", "gloo" if machine.shared else "nccl") != "gloo"
    )


def states_of(
    model: ModelShape,
    job: Job,
    stage: int,
    ranks: int,
    recipe: Recipe | None = None,
    group: int = 0,
) -> int:
    """Bytes of model states on a rank by the formula of Rajbhandari et al. 2020, section 5, at the
    job's bytes per parameter.

    Args:
        recipe: says which kinds are divided among the `group` ranks of a group only, and whether
            parameters are in it besides.
    """
    convention = job.convention
    rows = (
        {
            "parameters": recipe.parameters,
            "gradients": recipe.gradients,
            "optimizer": recipe.optimizer,
        }
        if recipe is not None
        else {}
    )
    inside = {kind for kind, row in rows.items() if row.over == GROUP}
    frozen = (
        (model.numel - model.trainable)
        * convention.parameters
        / ((group if "optimizer" in inside else ranks) if stage == 3 else 1)
    )
    copy = model.trainable * convention.parameters / group if inside == {"parameters"} else 0.0
    inside = inside if copy == 0 else set()
    parts = (
        states_by_kind(model.trainable, convention, stage, group if kind in inside else ranks)[kind]
        for kind in convention.by_kind()
    )
    return round(sum(parts) + frozen + copy)


def usable_bytes(machine: Machine) -> int:
    """Bytes of the device that training may take: its capacity less what the process itself holds
    of a GPU.
    """
    return machine.capacity - (0 if machine.gpu.name == "here" else CONTEXT)


@dataclass(frozen=True)
class _Engine:
    """What depends on the recipe and not on what is recomputed. `stepped`: elements that this
    rank's update steps on the device; `coded`,
    `summed`, `handled`: bytes that encoding, adding up, and copies and casts read and write.
    """

    moments: tuple[Moment, ...]
    ledger: Mapping[str, int]
    rest: Mapping[str, int]
    bound: int
    stepped: int
    offloaded: OffloadedBytes
    legs: tuple[Leg, ...]
    wire: Mapping[str, int]
    coded: float
    handled: float
    summed: float


@lru_cache(maxsize=256)
def _engine(
    model: ModelShape,
    recipe: Recipe,
    ranks: int,
    per_node: int | None,
    micro_batches: int,
    optimizer: str,
    nccl: bool,
    window: int,
) -> _Engine:
    units = units_of(model, recipe, ranks, per_node=per_node, nccl=nccl)
    few = min(micro_batches, 2)  # the others take and give what these do
    replay = Replay(units, recipe, window).run(few)
    stepped = sum(
        f.local(slot)
        for u in units
        for f in u.flats
        if f.trainable and f.tiers is None
        for slot in f.layout.slots
    )
    offloaded = offloaded_bytes(units, recipe, micro_batches, optimizer)
    rest, bound = at_rest(units, optimizer), bound_of(units, recipe, few, window)
    legs, sent, coded = (
        legs_of(units, recipe, micro_batches),
        wire(units, recipe, micro_batches),
        coded_bytes(units, recipe, micro_batches),
    )
    handled, summed = (
        handled_bytes(units, recipe, micro_batches),
        summed_bytes(units, recipe, micro_batches),
    )
    return _Engine(
        tuple(replay.moments),
        replay.peak,
        rest,
        bound,
        stepped,
        offloaded,
        tuple(legs),
        sent,
        coded,
        handled,
        summed,
    )


def bound_of(units: list[UnitPlan], recipe: Recipe, micro_batches: int = 1, window: int = 0) -> int:
    """Bytes that the engine's ledger never exceeds, in closed form.

    S + G·(ahead + 2) + C + R·(in_flight + 2) + T, where S is what rests, G the largest gathered
    unit, ahead how many are gathered before their use, C the gathered units around one another at
    most, R the largest reduction of a unit (on each hop its buffer, what is received, what is sent
    where that is a copy), T all gradients once they are reduced (and copied where the masters have
    another dtype), and as long as they are kept whole or held in a group. Of what is stepped off
    the device T has the largest alone, or all while they are sent on, and
    what copies to the host still read: at most a `window` and the largest, or all of it. Where
    parameters come from a disk, G counts once more. Small units that do not count as ahead or under
    way (SMALL_TRAFFIC) add 1 MiB at most.
    """
    rest = {k: v for k, v in at_rest(units).items() if k != MOMENTS}
    prefetch, in_flight = units_ahead(units, recipe), recipe.in_flight if recipe.overlap else 0
    gathered = [sum(f.gathered_bytes for f in u.flats if not f.resident) for u in units]
    late, again = recipe.reduce_at == "boundary" and micro_batches > 1, micro_batches > 1
    names = outer(list(units))
    around = {u.path: g for g, u in zip(gathered, units, strict=True) if u.name in names}
    nested = max(
        (sum(around.get(path, 0) for path in _enclosing(u.path)) for u in units), default=0
    )
    reductions, total, leaving = [], 0, [0]
    for unit in units:
        one = 0
        for f in (f for f in unit.flats if f.trainable):
            one += _on_its_way(f, late)
            sums, sent_on = f.dtypes.sums.itemsize, f.whole_master or f.broadcast_back
            held = again and recipe.gradients.over == GROUP and len(f.hops) > 1
            kept = f.numel * sums if late else f.hops[0].own * sums if held else 0
            landed = f.landed
            copied = f.dtypes.master.itemsize if landed != f.dtypes.master else 0
            # Sums that are sent on wait for the end of backward
            twice = landed.itemsize if sent_on else 0
            elements = f.own if sent_on else f.layout.shard_numel
            if f.tiers is None:
                total += elements * (landed.itemsize + copied + twice)
            elif f.broadcast_back:
                total += elements * landed.itemsize
            else:
                leaving.append(elements * landed.itemsize)
            total += kept
        reductions.append(one)
    every = sum(gathered) if not recipe.reshard_after_forward else 0
    fetched = any(f.gathers_from_disk for u in units for f in u.flats)
    ahead = max(every, max(gathered, default=0) * (prefetch + 2 + fetched)) + nested
    # Small units may be gathered, and small reductions be under way, beyond those counts: the
    # latter with what they send and receive.
    small = min(sum(gathered), SMALL_TRAFFIC) * bool(prefetch) + min(
        sum(reductions), 3 * SMALL_TRAFFIC
    ) * bool(in_flight)
    read = min(window + max(leaving), sum(leaving)) if window else 0
    return (
        sum(rest.values())
        + ahead
        + max(reductions, default=0) * (in_flight + 2)
        + total
        + max(leaving)
        + read
        + small
    )


def _on_its_way(flat: ShardSpec, late: bool) -> int:
    """Bytes of a reduction on all its hops; `late`: it was kept whole, in the dtype of sums."""
    wire, sums, out = flat.dtypes.wire.itemsize, flat.dtypes.sums.itemsize, 0
    for at, hop in enumerate(flat.hops):
        out += hop.span * (sums if at else wire)
        if flat.added_by(hop) == "backend":
            out += hop.own * wire + (hop.span * wire if wire != sums and (late or at) else 0)
        elif flat.encodes(hop):
            room = flat.exchange(at, flat.dtypes.wire)
            out += room.sent + room.received
        else:
            out += hop.span * (2 * wire if wire != sums and (late or at) else wire)
        out += hop.own * sums if wire != sums or at + 1 < len(flat.hops) else 0
    return out


def _enclosing(path: str) -> list[str]:
    """The paths of whatever may lie around a unit, its own among them."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts) + 1)]


def _peak(
    moments: tuple[Moment, ...], activity: Activity, states: int, fragmented: float
) -> dict[str, int]:
    """The categories of the largest slot, once fragmentation is added."""
    engine: dict[tuple[str, str], Moment] = {}
    for m in moments:
        best = engine.get((m.phase, m.unit))
        if best is None or m.total > best.total:
            engine[m.phase, m.unit] = m
    last = {
        phase: max((m for m in moments if m.phase == phase), key=lambda m: m.total, default=None)
        for phase in ("forward", "backward")
    }
    rows: list[dict[str, int]] = []
    slots = activity.slots
    for i, slot in enumerate(slots):
        beside = [
            slots[j]
            for j in (i - 1, i, i + 1)
            if 0 <= j < len(slots) and slots[j].phase == slot.phase
        ]
        near = [
            engine[s.phase, s.unit]
            for s in (beside if slot.unit == "(root)" else [slot])
            if (s.phase, s.unit) in engine
        ]
        held = max(near, key=lambda m: m.total) if near else last[slot.phase]
        mine = dict(held.held) if held is not None else {}
        mine[ACTIVATIONS] = slot.peak - slot.logits - slot.gradients
        mine[LOGITS], mine[TEMPORARY], mine[MOMENTS] = slot.logits, slot.gradients, states
        rows.append(mine)
    rows += [{**m.held, MOMENTS: states} for m in moments if m.phase in ("step", "backward")]
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
    traced = (
        activity.kernels
        if activity.kernels is not None and activity.kernels.flops == activity.flops
        else None
    )
    return Work(
        flops=flops,
        traffic=tuple(traffic),
        model_flops=per_token * tokens,
        precision=job.computes,
        tokens=float(tokens * machine.ranks),
        micro_batches=accumulation,
        forward_share=activity.forward_flops / activity.flops if activity.flops else 1 / 3,
        optimizer_numel=stepped,
        optimizer_bytes=_touched(stepped, job),
        hidden=model.transformer.hidden if model.transformer else 0,
        micro_tokens=scheme.micro_batch * job.seq,
        kernels=traced * accumulation if traced is not None else None,
        handed=float(model.trainable * accumulation),
    )


def _with_host_update(work: Work, offloaded: OffloadedBytes, job: Job) -> Work:
    return replace(
        work,
        host_optimizer_numel=offloaded.stepped,
        host_optimizer_bytes=_touched(offloaded.stepped, job),
    )


def _touched(stepped: int, job: Job) -> int:
    """Bytes of memory that an update reads and writes: gradient and parameter read, parameter
    written; moments both.
    """
    return 4 * (3 + 2 * MOMENTS_OF[job.optimizer]) * stepped
