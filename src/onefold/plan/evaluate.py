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
    coded_bytes,
    handled_bytes,
    legs_of,
    summed_bytes,
    topology_of,
    units_ahead,
    units_of,
    wire,
)
from onefold.plan.times import Software, Work, node_links, step_times, traffic_over
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
    recipe, nccl = scheme.recipe(job), on_nccl(machine)
    accumulation = job.accumulation(machine.ranks, scheme.micro_batch)
    per_node = machine.local if machine.nodes > 1 else None
    window = 0 if machine.shared else WINDOW
    engine = _engine(
        model, recipe, machine.ranks, per_node, accumulation, job.optimizer, nccl, window
    )
    states, offloaded = engine.rest.get(MOMENTS, 0), engine.offloaded
    offloading = OnHost(activity)
    if recipe.offload_activations is not None:
        offloading = on_host(activity, recipe.offload_activations, machine.shared)
    bound = engine.bound + states + max((s.peak for s in offloading.activity.slots), default=0)
    fragmented = 0.0 if machine.gpu.name == "here" else FRAGMENTED
    peak = _peak(engine.moments, offloading.activity, states, fragmented)
    carried = (*offloaded.carried, *offloading.carried(accumulation))
    held = {tier: dict(by) for tier, by in offloaded.peak.items()}
    if offloading.nbytes:
        held[HOST][ACTIVATIONS] = offloading.nbytes
    host = sum(held[HOST].values())
    topology = topology_of(recipe, machine.ranks, per_node)
    traffic = traffic_over(engine.legs, machine, topology, nccl=nccl)
    links = node_links(engine.legs, machine, topology, nccl=nccl)
    links = {k: v for k, v in links.items() if v}
    work = replace(
        _work(model, engine, activity, machine, job, scheme, accumulation),
        traffic=tuple(traffic),
        carried=carried,
        in_backward=recipe.step_in_backward,
    )
    times = step_times(work, machine, software)
    account = Account(
        rest={k: v for k, v in engine.rest.items() if v},
        peak={k: v for k, v in peak.items() if v},
        ledger=dict(engine.ledger),
        bound=bound + peak.get(FRAGMENTATION, 0),
        host=host,
        nvme=offloaded.nvme,
        offloaded={tier: by for tier, by in held.items() if by},
        moved=moved_by(carried),
        wire=engine.wire,
        links={k: round(v / machine.local) for k, v in links.items()},
        node_links=links if machine.nodes > 1 else {},
        seconds=times.seconds,
        tiers=times.tiers if carried else {},
        tokens_per_s=times.tokens_per_s,
        mfu=times.mfu,
    )
    usable, local, there = usable_bytes(machine), machine.local, machine.host
    on_device = account.peak_bytes + (host if machine.shared else 0)
    return Candidate(
        scheme,
        account,
        fits=on_device <= usable
        and (machine.shared or host * local <= there.memory)
        and offloaded.nvme * local <= there.nvme,
        usable=usable,
        accumulation=accumulation,
        states=states_of(model, job, scheme.stage, machine.ranks, recipe, topology.inner),
        notes=(*activity.notes, *times.notes),
        shared=machine.shared,
    )


def on_nccl(machine: Machine) -> bool:
    """Whether moves are operations of NCCL's, on the device."""
    return bool(
        getattr(machine.measured, "backend", "gloo" if machine.shared else "nccl") != "gloo"
    )


def states_of(
    model: ModelShape, job: Job, stage: int, ranks: int, recipe: Recipe, group: int
) -> int:
    """Bytes of model states on a rank by the formula of Rajbhandari et al. 2020, section 5, at the
    job's bytes per parameter. `recipe` says which kinds are divided among the `group` ranks of a
    group only, and whether parameters are in it besides.
    """
    convention = job.convention
    inside = {kind for kind in convention.by_kind() if getattr(recipe, kind).over == GROUP}
    over = (group if "optimizer" in inside else ranks) if stage == 3 else 1
    total = (model.numel - model.trainable) * convention.parameters / over
    copy = 0.0
    if inside == {"parameters"}:
        copy, inside = model.trainable * convention.parameters / group, set()
    parts = (
        states_by_kind(model.trainable, convention, stage, group if kind in inside else ranks)[kind]
        for kind in convention.by_kind()
    )
    return round(sum(parts) + total + copy)


def usable_bytes(machine: Machine) -> int:
    """Bytes of the device that training may take: its capacity less what the process itself holds
    of a GPU.
    """
    return machine.capacity - (0 if machine.gpu.name == "here" else CONTEXT)


@dataclass(frozen=True)
class _Engine:
    """What depends on the recipe and not on what is recomputed. `stepped`: elements that this
    rank's update steps on the device; `coded`, `summed`, `handled`: bytes that encoding, adding up,
    and copies and casts read and write.
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
    here = (f for u in units for f in u.flats if f.trainable and f.tiers is None)
    return _Engine(
        moments=tuple(replay.moments),
        ledger=replay.peak,
        rest=at_rest(units, optimizer),
        bound=bound_of(units, recipe, few, window),
        stepped=sum(f.local(slot) for f in here for slot in f.layout.slots),
        offloaded=offloaded_bytes(units, recipe, micro_batches, optimizer),
        legs=tuple(legs_of(units, recipe, micro_batches)),
        wire=wire(units, recipe, micro_batches),
        coded=coded_bytes(units, recipe, micro_batches),
        handled=handled_bytes(units, recipe, micro_batches),
        summed=summed_bytes(units, recipe, micro_batches),
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


def _higher(a: Moment | None, b: Moment) -> Moment:
    """The one that holds more; the first of equals."""
    return b if a is None or b.total > a.total else a


def _peak(
    moments: Sequence[Moment], activity: Activity, states: int, fragmented: float
) -> dict[str, int]:
    """The categories of the largest slot, once fragmentation is added."""
    engine: dict[tuple[str, str], Moment] = {}
    last: dict[str, Moment] = {}
    for m in moments:
        engine[m.phase, m.unit] = _higher(engine.get((m.phase, m.unit)), m)
        last[m.phase] = _higher(last.get(m.phase), m)
    rows: list[dict[str, int]] = []
    slots = activity.slots
    for i, slot in enumerate(slots):
        beside = [s for s in slots[max(0, i - 1) : i + 2] if s.phase == slot.phase]
        near = [
            engine[s.phase, s.unit]
            for s in (beside if slot.unit == "(root)" else [slot])
            if (s.phase, s.unit) in engine
        ]
        held = max(near, key=lambda m: m.total) if near else last.get(slot.phase)
        mine = {
            ACTIVATIONS: slot.peak - slot.logits - slot.gradients,
            LOGITS: slot.logits,
            TEMPORARY: slot.gradients,
            MOMENTS: states,
        }
        rows.append((held.held if held is not None else {}) | mine)
    rows += [{**m.held, MOMENTS: states} for m in moments if m.phase in ("step", "backward")]
    for row in rows:
        row[FRAGMENTATION] = int(fragmented * sum(v for k, v in row.items() if k in _MOVING))
    return max(rows, key=lambda row: sum(row.values()))


def _work(
    model: ModelShape,
    engine: _Engine,
    activity: Activity,
    machine: Machine,
    job: Job,
    scheme: Scheme,
    accumulation: int,
) -> Work:
    micro_tokens = scheme.micro_batch * job.seq
    tokens = micro_tokens * accumulation
    per_token = flops_per_token(model, model.transformer, job.seq)
    stepped, on_host = engine.stepped, engine.offloaded.stepped
    kernels = activity.kernels
    return Work(
        flops=activity.flops * accumulation or per_token * tokens,
        model_flops=per_token * tokens,
        precision=job.computes,
        tokens=float(tokens * machine.ranks),
        micro_batches=accumulation,
        forward_share=activity.forward_flops / activity.flops if activity.flops else 1 / 3,
        optimizer_numel=stepped,
        optimizer_bytes=_touched(stepped, job),
        host_optimizer_numel=on_host,
        host_optimizer_bytes=_touched(on_host, job),
        hidden=model.transformer.hidden if model.transformer else 0,
        micro_tokens=micro_tokens,
        kernels=kernels * accumulation if kernels and kernels.flops == activity.flops else None,
        handed=float(model.trainable * accumulation),
        coded_bytes=engine.coded,
        handled_bytes=engine.handled,
        summed_bytes=engine.summed,
    )


def _touched(stepped: int, job: Job) -> int:
    """Bytes of memory that an update reads and writes: gradient and parameter read, parameter
    written; moments both.
    """
    return 4 * (3 + 2 * MOMENTS_OF[job.optimizer]) * stepped
