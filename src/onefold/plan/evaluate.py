"""The account of one scheme on one machine: what a rank holds, sends and spends. The engine's
buffers and the model's activations are laid over each other.

    engine     ▁▁▃▃▁▁▃▃▁▁▅▅▇▇▅▅▁▁     replayed in integers        (plan/replay.py)
    activity   ▁▂▃▄▅▆▇███▇▆▅▄▃▂▁▁     traced or from dimensions   (plan/activity.py)
    moments    ▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃
    ───────────────────────────────
    sum        its largest slot is the peak

The same layouts say what is stored off the device and moves between tiers (plan/offloaded.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from onefold.comm import OWNERS
from onefold.device.copies import WINDOW
from onefold.memory import GATHERED, IDLE, LEAVING, MOMENTS, OWNED, REDUCTION
from onefold.plan.activity import Activity, flops_per_token
from onefold.plan.efficiency import measured_software
from onefold.plan.formulas import Convention, states_by_kind
from onefold.plan.hardware import Machine
from onefold.plan.job import Job, Scheme
from onefold.plan.offloaded import (
    HOST,
    NVME,
    OffloadedBytes,
    OnHost,
    filled,
    moved_by,
    offloaded_bytes,
    on_host,
)
from onefold.plan.owned import Balance, OwnedMatrices, owned_matrices, stepped_whole
from onefold.plan.replay import Moment, Replay
from onefold.plan.reserve import Reserve, reserve_of
from onefold.plan.schema import ACTIVATIONS, FRAGMENTATION, LOGITS, TEMPORARY, Account
from onefold.plan.shapes import ModelShape
from onefold.plan.states import MOMENTS_OF, at_rest, bound_of, decided, topology_of, units_of
from onefold.plan.times import Work, step_times
from onefold.plan.traffic import Software, node_links, traffic_over
from onefold.plan.wire import Leg, coded_bytes, handled_bytes, legs_of, summed_bytes, wire
from onefold.recipe import Recipe
from onefold.recipe.optimizers import PLANNED, WHOLE
from onefold.recipe.rows import GROUP, Tier

#: The share of temporary bytes on a GPU that its allocator cannot use again (blocks of other
#: sizes). An assumption, in line with the largest models that were trained: 0.63 to 0.90 of what
#: their states allowed.
FRAGMENTED = 0.10
#: The categories that come and go in a step.
_MOVING = (GATHERED, REDUCTION, IDLE, OWNED, LEAVING, ACTIVATIONS, LOGITS, TEMPORARY)


@dataclass(frozen=True)
class Candidate:
    """A scheme with its account.

    Attributes:
        fits: the peak is within the device's `usable` bytes, and the host's and the disks' bytes are
            within a node's. If the device is a CPU, `usable` has to hold the peak and the host's.
        usable: bytes of the device that training may take.
        reserve: the device's other bytes, on a GPU of the table.
        balance: how evenly owners divide the updates of whole matrices; None if none is stepped so.
        accumulation: micro-batches of a rank in a step.
        states: bytes of a rank's share of all states on all tiers, as the papers count them
            (`formulas.states_by_kind`): gradients beside the rest, a 16-bit copy of the parameters
            beside their masters. The engine never holds them all at once: see the account.
        shared: the device is a CPU.
    """

    scheme: Scheme
    account: Account
    fits: bool
    usable: int
    accumulation: int
    states: int = 0
    notes: tuple[str, ...] = field(default=(), compare=False)
    shared: bool = False
    reserve: Reserve = field(default_factory=Reserve)
    balance: Balance | None = None

    @property
    def needed(self) -> int:
        """Bytes at peak that `usable` has to hold: on a CPU the host's too."""
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
    """Account for `scheme`. `activity` is that of its micro-batch and checkpointing. Raises
    ValueError: the global batch does not divide.
    """
    nccl = on_nccl(machine)
    recipe = decided(scheme.recipe(job), machine.ranks, machine.node_ranks, nccl)
    accumulation = job.accumulation(machine.ranks, scheme.micro_batch)
    per_node = machine.node_ranks
    window = 0 if machine.shared else WINDOW
    engine = _engine(
        model, recipe, machine.ranks, per_node, accumulation, job.optimizer, nccl, window
    )
    offloading = OnHost(activity)
    if recipe.offload_activations is not None:
        offloading = on_host(activity, recipe.offload_activations, machine.shared)
    carried = (*engine.offloaded.carried, *offloading.carried(accumulation))
    topology = topology_of(recipe, machine.ranks, per_node)
    micro_tokens = scheme.micro_batch * job.seq
    tokens = micro_tokens * accumulation
    per_token = flops_per_token(model, model.transformer, job.seq)
    stepped, host_stepped, kernels = engine.stepped, engine.offloaded.stepped, activity.kernels
    owned = engine.owned
    # What Adam steps beside matrices has more states than they have
    beside = PLANNED[job.optimizer].rest or job.optimizer
    work = Work(
        flops=activity.flops * accumulation or per_token * tokens,
        traffic=tuple(traffic_over(engine.legs, machine, topology, nccl=nccl)),
        model_flops=per_token * tokens,
        precision=job.computes,
        tokens=float(tokens * machine.ranks),
        micro_batches=accumulation,
        forward_share=activity.forward_flops / activity.flops if activity.flops else 1 / 3,
        optimizer_numel=stepped,
        optimizer_bytes=owned.most.touched if owned else touched(job.optimizer) * stepped,
        update_flops=owned.most.flops if owned else 0,
        host_optimizer_numel=host_stepped,
        host_optimizer_bytes=touched(beside) * host_stepped + engine.offloaded.cast,
        carried=(*carried, *(owned.carried() if owned else ())),
        in_backward=recipe.step_in_backward,
        hidden=model.transformer.hidden if model.transformer else 0,
        micro_tokens=micro_tokens,
        kernels=kernels * accumulation if kernels and kernels.flops == activity.flops else None,
        handed=float(model.trainable * accumulation),
        coded_bytes=engine.coded,
        handled_bytes=engine.handled,
        summed_bytes=engine.summed,
    )
    times = step_times(work, machine, software or measured_software(work, machine))
    links = filled(node_links(engine.legs, machine, topology, nccl=nccl))
    account = Account(
        **_memory(engine, offloading, machine),
        moved=moved_by(carried),
        wire=engine.wire,
        links={k: round(v / machine.local) for k, v in links.items()},
        node_links=links if machine.nodes > 1 else {},
        seconds=times.seconds,
        tiers=times.tiers if work.carried else {},
        tokens_per_s=times.tokens_per_s,
        mfu=times.mfu,
    )
    reserve = Reserve() if machine.is_here else reserve_of(recipe, machine, topology)
    usable = max(0, machine.capacity - reserve.nbytes)
    ranks, host = machine.local, machine.host
    fits = account.by_tier.get(Tier.NVME, 0) * ranks <= host.nvme and (
        account.peak_bytes + account.host <= usable  # the memory of a CPU is the host's
        if machine.shared
        else account.peak_bytes <= usable and account.host * ranks <= host.memory
    )
    return Candidate(
        scheme,
        account,
        fits=fits,
        usable=usable,
        accumulation=accumulation,
        states=states_of(model, job, scheme.stage, machine.ranks, recipe, topology.inner),
        notes=(*activity.notes, *times.notes),
        shared=machine.shared,
        reserve=reserve,
        balance=owned.balance if owned and owned.balance.matrices else None,
    )


def touched(optimizer: str) -> int:
    """Return the bytes that an update moves for one element: it reads gradient and parameter and
    writes the parameter; it reads and writes moments.
    """
    return 4 * (3 + 2 * MOMENTS_OF[optimizer])


def _memory(engine: _Engine, offloading: OnHost, machine: Machine) -> dict[str, Any]:
    """Return what an account says of memory: the engine's buffers, the moments, and the activations
    that stay on the device.
    """
    states = engine.rest.get(MOMENTS, 0)
    slots = offloading.activity.slots
    fragmented = 0.0 if machine.is_here else FRAGMENTED
    beside = engine.owned.most.beside if engine.owned else 0
    peak = peak_of(engine.moments, offloading.activity, states, fragmented, beside)
    bound = engine.bound + states + max(beside, *(s.peak for s in slots), 0)
    held = {tier: dict(by) for tier, by in engine.offloaded.peak.items()}
    if offloading.nbytes:
        held[HOST][ACTIVATIONS] = offloading.nbytes
    return {
        "rest": filled(engine.rest),
        "peak": filled(peak),
        "ledger": dict(engine.ledger),
        "bound": bound + peak.get(FRAGMENTATION, 0),
        "host": sum(held[HOST].values()),
        "nvme": sum(held[NVME].values()),
        "offloaded": {tier: by for tier, by in held.items() if by},
    }


def on_nccl(machine: Machine) -> bool:
    """Return whether moves are NCCL's operations, on the device."""
    if machine.measured is not None:
        return machine.measured.backend != "gloo"
    return not machine.shared


def states_of(
    model: ModelShape, job: Job, stage: int, ranks: int, recipe: Recipe, group: int
) -> int:
    """Return the bytes of model states on a rank by the formula of Rajbhandari et al. 2020, section
    5, at the job's bytes per parameter.

    The recipe says which kinds are divided among the `group` ranks of a group only. If those are
    the parameters alone, the group's copy of them comes on top.
    """
    convention = _average(job, model)
    over_all, over_group = (
        states_by_kind(model.trainable, convention, stage, n) for n in (ranks, group)
    )
    in_group = {kind for kind in over_all if getattr(recipe, kind).over == GROUP}
    over = (group if "optimizer" in in_group else ranks) if stage == 3 else 1
    frozen = (model.numel - model.trainable) * convention.parameters / over
    copy = 0.0
    if in_group == {"parameters"}:
        copy, in_group = model.trainable * convention.parameters / group, set()
    parts = (over_group[kind] if kind in in_group else n for kind, n in over_all.items())
    return round(sum(parts) + frozen + copy)


def _average(job: Job, model: ModelShape) -> Convention:
    """Return the job's bytes per parameter. If other parameters than matrices have more states, an
    average over all.
    """
    found, rest = job.convention, PLANNED[job.optimizer].rest
    if not rest:
        return found
    more = (MOMENTS_OF[rest] - MOMENTS_OF[job.optimizer]) * job.recipe(3).optimizer.dtype.itemsize
    names = stepped_whole(model, job.optimizer)
    others = sum(
        p.numel for u in model.units for p in u.parameters if p.trainable and p.name not in names
    )
    return replace(found, optimizer=found.optimizer + more * others / max(model.trainable, 1))


@dataclass(frozen=True)
class _Engine:
    """What depends on the recipe and not on checkpointing. `stepped`: elements that this rank's
    update steps on the device. `owned`: of matrices that are stepped whole; of each figure the
    largest of all ranks counts. `coded`, `handled`, `summed`: as plan/wire.py counts them.
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
    owned: OwnedMatrices | None = None


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
    few = min(micro_batches, 3)  # further ones take the same buffers
    owned = None
    if PLANNED[optimizer].update == WHOLE:
        owned = owned_matrices(units, stepped_whole(model, optimizer), optimizer)
    most, legs = owned.most if owned else None, legs_of(units, recipe, micro_batches)
    buffers = most.buffers if most else 0
    replay = Replay(units, recipe, window).run(few, buffers)
    here = (f for u in units for f in u.flats if f.trainable and f.tiers is None)
    return _Engine(
        moments=tuple(replay.moments),
        ledger=replay.peak,
        rest=at_rest(units, optimizer, most.states if most else None),
        bound=bound_of(units, recipe, few, window) + buffers,
        stepped=most.numel if most else sum(f.local(s) for f in here for s in f.layout.slots),
        offloaded=offloaded_bytes(
            units,
            recipe,
            micro_batches,
            optimizer,
            streams=window > 0,
            held=most.host_states if most else None,
            stepped=most.host_numel if most else None,
        ),
        legs=(*legs, *(owned.legs() if owned else ())),
        wire=wire(units, recipe, micro_batches)
        | ({OWNERS: most.sent} if most and most.sent else {}),
        coded=coded_bytes(units, recipe, micro_batches),
        handled=handled_bytes(units, recipe, micro_batches),
        summed=summed_bytes(units, recipe, micro_batches),
        owned=owned,
    )


def _higher(a: Moment | None, b: Moment) -> Moment:
    """Return the moment that holds more; of equals the first."""
    return b if a is None or b.total > a.total else a


def peak_of(
    moments: Sequence[Moment],
    activity: Activity,
    states: int,
    fragmented: float,
    updating: int = 0,
) -> dict[str, int]:
    """Return the categories of the slot that is largest with fragmentation. `updating`: temporary
    bytes of the update.
    """
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
    rows += [
        {**m.held, MOMENTS: states}
        | ({TEMPORARY: updating} if m.phase == "step" and updating else {})
        for m in moments
        if m.phase in ("step", "backward")
    ]
    for row in rows:
        row[FRAGMENTATION] = int(fragmented * sum(v for k, v in row.items() if k in _MOVING))
    return max(rows, key=lambda row: sum(row.values()))
