"""The account of one mesh: what a rank of a pipeline's stages holds, sends and spends, with ZeRO over
the ranks that hold the same parameters.

    engine     of a stage's flat buffers, each over its own holders     (plan/divided.py, plan/replay.py)
    activity   of as many micro-batches as the schedule keeps           (here)
    sent       by axis                                                  (plan/collectives.py)

In a pipeline each unit is gathered once a step and reduced once a step, so parameters of stage 3 stay
whole from the first forward pass on, and gradients until the last backward pass.

    step = (compute + tensor, context and expert parallelism) ÷ (1 − bubble) + exposed gathers,
           reductions and sends + optimizer

Compute is that of the stage with the most FLOPs, which the others wait for. What layers send is not
hidden by anything. Gathers and reductions hide as in `plan.times`; sends behind the share `overlap`
of the compute.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from onefold.comm.communicators import communicators_of, flat_over, nodes_of
from onefold.plan.activity import Activity, Slot, flops_per_token, keeps
from onefold.plan.collectives import (
    IN_LAYERS,
    Step,
    bubble,
    by_kind,
    holders_from_first,
    in_flight,
    in_layers,
    over_holders,
    sent,
)
from onefold.plan.degrees import Degrees, dims_of
from onefold.plan.divided import Stage, local_numel, rule_of, stages_of, topology_over, units_over
from onefold.plan.evaluate import FRAGMENTED, on_nccl, peak_of
from onefold.plan.formulas import Convention, MicroBatchBytes, states_by_kind
from onefold.plan.hardware import Machine
from onefold.plan.job import Job
from onefold.plan.replay import Replay
from onefold.plan.reserve import Reserve, reserve_of
from onefold.plan.schema import MOMENTS
from onefold.plan.shapes import ModelShape, Transformer
from onefold.plan.states import MOMENTS_OF, at_rest, bound_of
from onefold.plan.times import Work, step_times
from onefold.plan.traffic import Software
from onefold.plan.wire import wire
from onefold.recipe import COMPUTE_DTYPES, Recipe

#: The parts of a step's seconds over axes, and their sum.
SECONDS = (
    "compute", "tensor parallel", "context parallel", "expert parallel", "bubble", "pipeline sends", "gathers and reductions",
    "optimizer", "step",
)  # fmt: skip
_OF_AXIS = {"tp": "tensor parallel", "cp": "context parallel", "ep": "expert parallel"}
_FP32 = 4
#: The share of blocks whose forward pass runs again, by checkpointing.
RECOMPUTED = {"none": 0.0, "selective": 0.5, "full": 1.0}
#: The same in a sentence.
RECOMPUTE_SAID = {
    "none": "without recompute",
    "selective": "with recompute of every second block",
    "full": "with recompute of every block",
}


@dataclass(frozen=True)
class MeshAccount:
    """What a rank of a mesh holds, sends and spends.

    Attributes:
        zero: the ZeRO stage.
        micro_batches: of a rank in a step.
        stage: the pipeline's stage whose rank holds most; the memory is that rank's.
        rest, peak: its bytes between steps and at peak, by category.
        bound: bytes that its tensors never exceed, if they are what the plan counts.
        states: bytes of model states of that rank as the papers count them.
        activations: bytes of activations of that rank, at most; `kept`: those of its blocks that all
            micro-batches in flight keep for their backward passes.
        usable, reserve: bytes of the device that training may take, and its other bytes.
        holders: how many ranks hold each part, by kind.
        sent: bytes of the rank that sends most, by axis and kind (`collectives.sent`).
        wire: bytes of gathers and reductions of the stage that holds most, exactly, by move.
        bubble: the share of a step that a rank waits for the pipeline.
        seconds: by `SECONDS`; {} if no speeds are known. tokens: of a step.
    """

    degrees: Degrees
    zero: int
    checkpointing: str
    micro_batch: int
    micro_batches: int
    stage: int
    rest: Mapping[str, int]
    peak: Mapping[str, int]
    bound: int
    states: int
    activations: int
    kept: int
    usable: int
    reserve: Reserve
    holders: Mapping[str, int]
    sent: Mapping[str, Mapping[str, float]]
    wire: Mapping[str, int]
    bubble: float
    seconds: Mapping[str, float]
    tokens: float
    mfu: float
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def rest_bytes(self) -> int:
        return sum(self.rest.values())

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.usable

    @property
    def papers_bytes(self) -> float:
        """Bytes of the device if all model states exist at once, as the papers count them: with
        activations, what the allocator cannot use again, the driver and NCCL.
        """
        return self.states + self.activations * (1 + FRAGMENTED) + self.reserve.nbytes

    @property
    def seconds_per_token(self) -> float:
        return self.seconds["step"] / self.tokens

    def to_json(self) -> dict[str, Any]:
        return {
            **{n: getattr(self.degrees, n) for n in ("dp", "tp", "pp", "cp", "ep", "chunks")},
            "schedule": self.degrees.schedule,
            "sequence_parallel": self.degrees.sequence_divided,
            "zero_stage": self.zero,
            "checkpointing": self.checkpointing,
            "micro_batch": self.micro_batch,
            "micro_batches": self.micro_batches,
            "fits": self.fits,
            "fullest_stage": self.stage,
            "rest": dict(self.rest),
            "peak": dict(self.peak),
            "bound": self.bound,
            "states": self.states,
            "activations": self.activations,
            "kept": self.kept,
            "usable": self.usable,
            "reserve": self.reserve.nbytes,
            "holders": dict(self.holders),
            "sent": {axis: {k: round(v) for k, v in by.items()} for axis, by in self.sent.items()},
            "wire": dict(self.wire),
            "bubble": self.bubble,
            "seconds": dict(self.seconds),
            "tokens": self.tokens,
            "tokens_per_s": self.tokens / self.seconds["step"] if self.seconds else 0.0,
            "mfu": self.mfu,
        }


@dataclass(frozen=True)
class MeshQuestion:
    """Everything but the mesh.

    Attributes:
        code: the family whose code runs (`formulas.CODES`).
        convention: bytes per parameter of the papers' count; None: the job's.
    """

    model: ModelShape
    machine: Machine
    job: Job
    code: str = ""
    convention: Convention | None = None

    @property
    def dims(self) -> Transformer:
        return dims_of(self.model)

    @property
    def bytes_per_parameter(self) -> Convention:
        return self.convention or self.job.convention

    def samples(self) -> int:
        """Samples of a step: the job's, or as many as if every GPU had a micro-batch."""
        return self.job.global_batch or self.machine.ranks * self.job.micro_batch

    def micro_batches(self, degrees: Degrees, micro_batch: int) -> int:
        """Return the micro-batches of a rank. Raises ValueError: the batch does not divide."""
        each, samples = degrees.dp * micro_batch, self.samples()
        if samples % each:
            near = max(each, round(samples / each) * each)
            raise ValueError(
                f"a global batch of {samples} does not divide into micro-batches of {micro_batch} on"
                f" {degrees.dp} data-parallel ranks ({each} samples at once): use --global-batch"
                f" {near}, or another --micro-batch."
            )
        return samples // each

    def step(self, degrees: Degrees, zero: int, micro_batch: int, checkpointing: str) -> Step:
        recipe = self.job.recipe(zero)
        computed = COMPUTE_DTYPES[self.job.computes]
        return Step(
            zero,
            self.micro_batches(degrees, micro_batch),
            micro_batch,
            self.job.seq,
            computed.itemsize,
            (recipe.gradients.wire or computed).itemsize,
            RECOMPUTED[checkpointing],
            recipe.reduces_at == "micro-batch",
            recipe.reshard_after_forward,
        )

    def recipe(self, zero: int, pp: int) -> Recipe:
        """Return the recipe of a stage of the pipeline."""
        if pp == 1 or zero < 2:
            return self.job.recipe(zero)
        held = {"reshard_after_forward": False} if zero == 3 else {}
        return self.job.recipe(zero, reduce_at="boundary", **held)


# -- seconds ---------------------------------------------------------------------------------------


def stage_flops(
    stage: Stage, dims: Transformer, degrees: Degrees, step: Step
) -> tuple[float, float]:
    """Return a rank's FLOPs in one micro-batch of this stage: (all, with recompute; forward)."""
    multiplied, in_blocks = _multiplied(stage, dims)
    attention = 2 * stage.blocks * (dims.q + dims.out) * step.seq
    tokens = step.micro_batch * step.seq / (degrees.cp * degrees.tp)
    forward = (2 * multiplied + attention) * tokens
    # torch ends a recomputed block before its last product (plan/activity.py)
    last = 2 * stage.blocks * dims.ffn * dims.hidden if dims.experts <= 1 else 0
    again = (2 * in_blocks + attention - last) * tokens * step.recomputed
    return 3 * forward + again, forward


@lru_cache(maxsize=1024)
def _multiplied(stage: Stage, dims: Transformer) -> tuple[float, float]:
    """Return (elements that a token is multiplied with, those of blocks)."""
    every = blocks = 0.0
    names = {name for chunk in stage.chunks for name in chunk}
    for unit in stage.units:
        for p in unit.parameters:
            kind = rule_of(p.name).kind
            looked_up = kind == "embedding" and not _is_head(p, stage, dims)
            if len(p.shape) > 1 and kind != "norm" and not looked_up:
                used = p.numel * (dims.active / dims.experts if p.routed else 1)
                every += used
                blocks += used if unit.name in names else 0
    return every, blocks


def _is_head(p: Any, stage: Stage, dims: Transformer) -> bool:
    """Whether an embedding's matrix is the head of this stage too."""
    return dims.tied and stage.last and (not stage.tied or p.name.startswith("tied."))


def seconds_of(
    question: MeshQuestion, degrees: Degrees, step: Step, software: Software
) -> tuple[dict[str, float], float, float]:
    """Return (seconds by `SECONDS`, tokens of a step, MFU)."""
    machine, dims, job = question.machine, question.dims, question.job
    stages = stages_of(question.model, degrees)
    slowest = max(stages, key=lambda s: stage_flops(s, dims, degrees, step)[0])
    whole, forward = stage_flops(slowest, dims, degrees, step)
    moved = over_holders(slowest, degrees, step, machine)
    numel = sum(
        n / (degrees.holding(divided) if step.zero else 1)
        for (_, divided), n in by_kind(slowest, degrees, trained=True).items()
    )
    tokens = float(question.samples() * step.seq)
    work = Work(
        flops=whole * step.micro_batches,
        traffic=tuple(moved),
        model_flops=flops_per_token(question.model, dims, step.seq) * tokens / machine.ranks,
        precision=job.computes,
        tokens=tokens,
        micro_batches=step.micro_batches,
        forward_share=forward / whole,
        optimizer_numel=numel,
        optimizer_bytes=4 * (3 + 2 * MOMENTS_OF[job.optimizer]) * numel,
        handled_bytes=_handled_bytes(slowest, degrees, step),
        summed_bytes=_summed_bytes(slowest, degrees, step),
    )
    times = step_times(work, machine, software)
    # Middle stages send to both sides
    busiest = stages[len(stages) // 2] if len(stages) > 2 else stages[0]
    in_step = {
        axis: traffic.seconds(machine, software)
        for axis, traffic in in_layers(
            sent(slowest, dims, degrees, step), slowest, degrees, step, machine
        )
    }
    crossing = dict(
        in_layers(sent(busiest, dims, degrees, step), busiest, degrees, step, machine)
    ).get("pp")
    sends = crossing.seconds(machine, software) if crossing is not None else 0.0
    compute = times.seconds["compute"]
    layers = compute + sum(in_step.get(axis, 0.0) for axis in IN_LAYERS)
    share = bubble(degrees, step.micro_batches)
    out = {
        "compute": compute,
        **{_OF_AXIS[axis]: in_step.get(axis, 0.0) for axis in IN_LAYERS},
        "bubble": layers * share / (1 - share),
        "pipeline sends": max(0.0, sends - software.overlap * compute)
        + 2 * (degrees.pp - 1) * software.hop_seconds,
        "gathers and reductions": times.seconds["exposed communication"],
        "optimizer": times.seconds["optimizer"],
    }
    out["step"] = sum(out.values())
    mfu = work.model_flops / (out["step"] * machine.peak(job.computes)) if work.model_flops else 0.0
    return {name: out[name] for name in SECONDS}, tokens, mfu


def _handled_bytes(stage: Stage, degrees: Degrees, step: Step) -> float:
    """Return the bytes that copies of gradients read and write (`plan.wire.handled_bytes`)."""
    numel, e, m = (
        sum(by_kind(stage, degrees, trained=True).values()),
        step.element,
        step.micro_batches,
    )
    if m > 1 and step.held_whole(degrees.pp):
        return numel * ((e + _FP32) + (m - 1) * (e + 2 * _FP32))
    return m * numel * (e + step.wire)


def _summed_bytes(stage: Stage, degrees: Degrees, step: Step) -> float:
    """Return the bytes that adding up gradients reads and writes (`plan.wire.summed_bytes`)."""
    _, reductions = step.passes(degrees.pp)
    return reductions * sum(
        numel * (step.wire + _FP32 / degrees.holding(divided))
        for (_, divided), numel in by_kind(stage, degrees, trained=True).items()
        if degrees.holding(divided) > 1
    )


# -- memory ----------------------------------------------------------------------------------------


def states_of_stage(stage: Stage, degrees: Degrees, convention: Convention, zero: int) -> float:
    """Return a rank's bytes of model states as the papers count them (Rajbhandari et al. 2020,
    section 5): each kind of parameters over the ranks that hold it.
    """
    total = 0.0
    for (_, divided), numel in by_kind(stage, degrees).items():
        total += sum(states_by_kind(numel, convention, zero, degrees.holding(divided)).values())
    return total


def local_dims(dims: Transformer, degrees: Degrees) -> Transformer:
    """Return the widths of a block on one rank. With sequence parallelism what lies between its
    layers is divided too: that is counted as a narrower block.
    """
    t = degrees.tp
    between = t if degrees.sequence_divided else 1
    whole = dims.experts > 1 and not degrees.expert_tp and not degrees.sequence_divided
    return replace(
        dims,
        hidden=-(-dims.hidden // between),
        heads=dims.heads // t,
        kv_heads=(dims.kv_heads or dims.heads) // t,
        head_dim=dims.head,
        ffn=dims.ffn if whole else dims.ffn // t,
        vocab=-(-dims.vocab // t),
    )


def activity_of(
    stage: Stage, dims: Transformer, degrees: Degrees, step: Step, code: str, checkpointing: str
) -> Activity:
    """Return the activations of the micro-batches that a rank of this stage keeps at its fullest,
    while one of them runs.
    """
    local, e = local_dims(dims, degrees), step.element
    size = MicroBatchBytes(local, step.micro_batch, step.seq // degrees.cp, e, code)
    flights = in_flight(degrees, stage.index, step.micro_batches)
    kept = [keeps(i, checkpointing) for i in range(stage.blocks)]
    chunk = sum(size.kept(whole) for whole in kept) / len(stage.chunks)
    crossing = 0 if stage.last and degrees.chunks == 1 else size.tokens * local.hidden * e
    before = size.before if stage.first else 16 * size.tokens
    others = round((flights - 1) * (chunk + crossing + before / len(stage.chunks)))
    largest = _largest(stage, degrees)
    extra = _in_hand(dims, local, degrees, size.tokens, e)
    slots: list[Slot] = []
    held = others + before + crossing
    names = [name for part in stage.chunks for name in part]
    at: float = held
    for name, whole in zip(names, kept, strict=True):
        slots.append(Slot(name, "forward", round(at + size.whole + size.in_hand() + extra)))
        at += size.kept(whole) / len(stage.chunks)
    top = held + chunk
    if stage.last:
        logits = size.first_logits
        slots.append(Slot("(root)", "forward", round(top + size.behind + logits), logits))
        logits = 3 * size.logits
        slots.append(Slot("(root)", "backward", round(top + size.behind + logits), logits))
    at = top
    for name, whole in reversed(list(zip(names, kept, strict=True))):
        again = 0 if whole else size.whole
        mine = largest[name] * e
        beside = size.beside(mine)
        gradients = min(mine, again + beside)
        slots.append(
            Slot(name, "backward", round(at + again + beside + extra), 0, round(gradients))
        )
        at -= size.kept(whole) / len(stage.chunks)
    for unit in stage.units:
        if unit.name not in names and unit.name != "(root)":
            own = largest[unit.name] * e
            slots.append(Slot(unit.name, "backward", round(at + own), 0, own))
    saved = round(top + others)
    return Activity(tuple(slots), saved, size.logits if stage.last else 0, 0.0, 0.0, "formula")


@lru_cache(maxsize=1024)
def _largest(stage: Stage, degrees: Degrees) -> Mapping[str, int]:
    """Return the elements of each unit's largest parameter on a rank."""
    return {
        u.name: max((local_numel(p, degrees) for p in u.parameters), default=0) for u in stage.units
    }


def kept_by(
    stage: Stage, dims: Transformer, degrees: Degrees, step: Step, code: str, checkpointing: str
) -> int:
    """Return the bytes that the blocks of a stage keep, of all micro-batches in flight."""
    local = local_dims(dims, degrees)
    size = MicroBatchBytes(local, step.micro_batch, step.seq // degrees.cp, step.element, code)
    own = sum(size.kept(keeps(i, checkpointing)) for i in range(stage.blocks))
    return own * in_flight(degrees, stage.index, step.micro_batches) // len(stage.chunks)


def _in_hand(
    dims: Transformer, local: Transformer, degrees: Degrees, tokens: int, element: int
) -> float:
    """Bytes that a block uses while it runs only because of the axes: its whole input under sequence
    parallelism, keys and values of a whole sample, tokens on their way to and from experts.
    """
    out = 0.0
    if degrees.sequence_divided:
        out += tokens * (dims.hidden - local.hidden) * element
    if degrees.cp > 1:
        out += tokens * (degrees.cp - 1) * (local.k + local.v) * element
    if degrees.ep > 1:
        out += tokens * dims.active * local.hidden * element
    return out


def least_bytes(question: MeshQuestion, degrees: Degrees, step: Step, checkpointing: str) -> float:
    """Return bytes below what a rank of this mesh holds at peak: states; gradients, if they are kept
    whole over several micro-batches; parameters, if a pipeline keeps them gathered; and what blocks
    keep of the other micro-batches in flight.
    """
    convention, dims = replace(question.job.convention, gradients=0.0), question.dims
    held = step.micro_batches > 1 and step.held_whole(degrees.pp)
    each = question.job.recipe(step.zero).gradients.dtype.itemsize if held else 0
    each += step.element if step.zero == 3 and degrees.pp > 1 else 0
    least = 0.0
    for stage in unlike(stages_of(question.model, degrees)):
        numel = sum(by_kind(stage, degrees, trained=True).values())
        kept = kept_by(stage, dims, degrees, step, question.code, checkpointing)
        states = states_of_stage(stage, degrees, convention, step.zero)
        least = max(least, states + kept + each * numel)
    return least


def reserve_over(
    question: MeshQuestion, degrees: Degrees, recipe: Recipe, held: Collection[tuple[str, ...]]
) -> Reserve:
    """Return the bytes of a GPU beside its tensors: as `plan.reserve` counts them for the largest
    group that holds parameters, with the communicators of the other groups and one for each other
    axis.

    Args:
        held: the axes that divide parameters, by kind.
    """
    per_node = question.machine.node_ranks
    groups = sorted({holders_from_first(degrees, divided) for divided in held}, key=len)
    data = degrees.dp * degrees.cp
    *others, largest = (topology_over(ranks, recipe, per_node, data) for ranks in groups)
    flat = flat_over(nodes_of(groups[-1], per_node), largest)
    decided = recipe.with_sums(on_nccl(question.machine), flat)
    found = reserve_of(decided, question.machine, largest)
    axes = sum(n > 1 for n in (degrees.tp, degrees.pp, degrees.cp, degrees.ep))
    more = axes + sum(communicators_of(topology) for topology in others)
    return replace(found, communicators=found.communicators + more)


@lru_cache(maxsize=64)
def _engine(
    stage: Stage,
    degrees: Degrees,
    recipe: Recipe,
    optimizer: str,
    per_node: int | None,
    nccl: bool,
    micro_batches: int,
) -> tuple[Any, dict[str, int], dict[str, int], int]:
    """Return (moments, bytes at rest, bytes of gathers and reductions in a step by move, bytes that
    the engine never exceeds).
    """
    units = units_over(stage, degrees, recipe, per_node, nccl)
    replay = Replay(units, recipe).run(min(micro_batches, 3))
    passes = 1 if degrees.pp > 1 else micro_batches
    bound = bound_of(units, recipe, micro_batches)
    return tuple(replay.moments), at_rest(units, optimizer), wire(units, recipe, passes), bound


def account_of(
    question: MeshQuestion,
    degrees: Degrees,
    zero: int,
    checkpointing: str,
    software: Software | None = None,
) -> MeshAccount:
    """Account for a mesh. Raises ValueError: the global batch does not divide."""
    machine, job, dims = question.machine, question.job, question.dims
    micro_batch = job.micro_batch
    step = question.step(degrees, zero, micro_batch, checkpointing)
    recipe = question.recipe(zero, degrees.pp)
    stages = stages_of(question.model, degrees)
    nccl, fragmented = on_nccl(machine), 0.0 if machine.is_here else FRAGMENTED
    found = []
    for stage in unlike(stages):
        moments, rest, moved, bound = _engine(
            stage, degrees, recipe, job.optimizer, machine.node_ranks, nccl, step.micro_batches
        )
        activity = activity_of(stage, dims, degrees, step, question.code, checkpointing)
        peak = peak_of(moments, activity, rest.get(MOMENTS, 0), fragmented)
        bound += rest.get(MOMENTS, 0) + max(slot.peak for slot in activity.slots)
        found.append((sum(peak.values()), stage, peak, rest, moved, activity, bound))
    _, stage, peak, rest, moved, activity, bound = max(found, key=lambda one: one[0])
    seconds, tokens, mfu = seconds_of(question, degrees, step, software or Software())
    kinds = by_kind(stage, degrees)
    reserve = (
        Reserve()
        if machine.is_here
        else reserve_over(question, degrees, recipe, {divided for _, divided in kinds})
    )
    return MeshAccount(
        degrees,
        zero,
        checkpointing,
        micro_batch,
        step.micro_batches,
        stage.index,
        {k: v for k, v in rest.items() if v},
        {k: v for k, v in peak.items() if v},
        bound,
        round(states_of_stage(stage, degrees, question.bytes_per_parameter, zero)),
        max(slot.peak for slot in activity.slots),
        kept_by(stage, dims, degrees, step, question.code, checkpointing),
        max(0, machine.capacity - reserve.nbytes),
        reserve,
        {kind: degrees.holders(divided).size for kind, divided in kinds},
        most_sent(stages, dims, degrees, step),
        moved,
        bubble(degrees, step.micro_batches),
        seconds,
        tokens,
        mfu,
    )


def most_sent(
    stages: Sequence[Stage], dims: Transformer, degrees: Degrees, step: Step
) -> dict[str, dict[str, float]]:
    """Return the bytes by axis and kind of the stage whose ranks send most."""
    every = (sent(stage, dims, degrees, step) for stage in unlike(stages))
    return max(every, key=lambda by: sum(sum(kinds.values()) for kinds in by.values()))


def unlike(stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages that may hold or send most: of those with the same number of elements, the
    first, which keeps the most micro-batches.
    """
    seen: dict[tuple[int, bool, bool], Stage] = {}
    for stage in stages:
        seen.setdefault((stage.numel, stage.first, stage.last), stage)
    return list(seen.values())
