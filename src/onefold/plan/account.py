"""The account of one scheme on one machine: what a rank holds, sends and spends, with data ranks alone
or with other axes beside them.

    model ──► stage of a pipeline ──► flat buffers of a rank ──► program ─┐     (plan/rank.py, plan/program.py)
    activations, traced or from dimensions ──────────────────────────────┴──► bytes at each moment, seconds

The peak is the largest sum of the engine's bytes and the activations while one unit runs. In a
pipeline the account of memory is that of the stage that holds most, and seconds are those of the
stage with the most FLOPs, which the others wait for.

| axis | what                                           | bytes of one rank                                              |
|------|------------------------------------------------|----------------------------------------------------------------|
| tp   | behind attention and behind the feed-forward,  | 2·n·h·e·2·(t−1)/t a block and pass: an all-reduce, or with     |
|      | their inputs' gradients                        | sequence parallelism an all-gather and a reduce-scatter        |
|      | embedding, head                                | 2·n·h·e·(t−1)/t each, once                                     |
| cp   | keys and values of a block                     | n·(k+v)/t·e·(c−1) a pass: gathered by the ranks that divide a  |
|      |                                                | sample, their gradients scattered                              |
| ep   | tokens to their experts, and back              | 2·n·a·h·e·(x−1)/x a block and pass, ÷ t with sequence          |
|      |                                                | parallelism                                                    |
| pp   | a stage's output, and its gradient             | n·h·e each, ÷ t with sequence parallelism, for each chunk      |

with t, c, x the degrees of tensor, context and expert parallelism; n = micro-batch × tokens ÷ c the
tokens of a rank in a micro-batch; h, k, v the widths of a block, of its keys and values; e bytes an
element; a active experts. A block has two passes, three where it is recomputed. Sources: Narayanan et
al. 2021 (arXiv:2104.04473), section 3.2; Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2;
Llama team 2024 (arXiv:2407.21783), section 3.3.2 (context parallelism by all-gather); DeepSeek-AI
2024 (arXiv:2412.19437), section 3.2. With sequence parallelism the input of a column-wise layer may
be gathered once more in the backward pass; that is not counted.

In a pipeline each unit is gathered once a step and reduced once a step, so parameters of stage 3 stay
whole from the first forward pass on, and gradients until the last backward pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from onefold.comm.communicators import communicators_of
from onefold.layout import Level
from onefold.memory import GATHERED, IDLE, LEAVING, MOMENTS, OWNED, REDUCTION
from onefold.plan.activity import divided, on_host
from onefold.plan.degrees import AXES, Degrees, dims_of
from onefold.plan.hardware import Machine
from onefold.plan.job import CHECKPOINTING, Job, Scheme
from onefold.plan.offloaded import HOST, offloaded_bytes
from onefold.plan.owned import Balance, stepped_whole
from onefold.plan.program import Layer, Program, members, program_of
from onefold.plan.rank import Stage, UnitPlan, filled, handed_on, holding, rule_of, stages_of
from onefold.plan.schema import (
    ACTIVATIONS,
    FRAGMENTATION,
    IN_LAYERS,
    LOGITS,
    SECONDS,
    TEMPORARY,
    Account,
)
from onefold.plan.shapes import ModelShape
from onefold.plan.times import (
    between,
    slowest_of,
    step_seconds,
)
from onefold.recipe import COMPUTE_DTYPES, Recipe
from onefold.recipe.optimizers import PLANNED, WHOLE
from onefold.recipe.rows import NATIVE, Tier
from onefold.tracing.trace import Activity
from onefold.tracing.watch import Pass
from onefold.wording import readable

#: The share of temporary bytes on a GPU that its allocator cannot use again (blocks of other
#: sizes). An assumption, in line with the largest models that were trained: 0.63 to 0.90 of what
#: their states allowed.
FRAGMENTED = 0.10
#: The categories that come and go in a step.
_MOVING = (GATHERED, REDUCTION, IDLE, OWNED, LEAVING, ACTIVATIONS, LOGITS, TEMPORARY)

# (samples of a micro-batch, checkpointing) → their activity
Activities = Callable[[int, str], Activity]


@dataclass(frozen=True)
class Candidate:
    """A scheme with its account.

    Attributes:
        fits: the peak is within the device's `usable` bytes, and the host's and the disks' bytes are
            within a node's. If the device is a CPU, `usable` has to hold the peak and the host's.
        usable: bytes of the device that training may take.
        accumulation: micro-batches of a rank in a step.
        needed: bytes at peak that `usable` has to hold: on a CPU the host's too.
        reserve: the device's other bytes, on a GPU of the table.
        owners: how evenly they divide the updates of whole matrices; None if none is stepped so.
        pipeline_stage: whose rank holds most. holders: how many ranks hold each part, by kind
            of parameters.
    """

    scheme: Scheme
    account: Account
    fits: bool
    usable: int
    needed: int
    accumulation: int
    notes: tuple[str, ...]
    reserve: Reserve
    owners: Balance | None
    pipeline_stage: int
    holders: Mapping[str, int]

    @property
    def bubble(self) -> float:
        """The share of a step that a rank waits for the pipeline."""
        return bubble(self.scheme.degrees, self.accumulation)

    @property
    def spare(self) -> int:
        """Bytes left on the device at peak; below 0 where it does not fit."""
        return self.usable - self.needed

    @property
    def step(self) -> float:
        """Seconds of a step; 0 if no speeds are known."""
        return self.account.seconds.get("step", 0.0)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        out = asdict(self)
        scheme = out.pop("scheme")
        out["reserve"]["nbytes"] = self.reserve.nbytes
        del out["notes"]
        return scheme.pop("degrees") | scheme | out | {"bubble": self.bubble}


@dataclass(frozen=True)
class Question:
    """Everything that a choice needs: the model, its activities, the machine and the job.

    Attributes:
        activities: the activity of a micro-batch, by its size and checkpointing. source: where they
            come from.
        notes: what had to be assumed.
    """

    model: ModelShape
    activities: Activities
    machine: Machine
    job: Job
    source: str = ""
    notes: tuple[str, ...] = ()
    _told: dict[Scheme, Candidate] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def answer(self, scheme: Scheme) -> Candidate:
        """Account for one scheme. Raises ValueError if the global batch does not divide."""
        if scheme not in self._told:
            self._told[scheme] = account_of(self, scheme)
        return self._told[scheme]

    def micro_batches(self, scheme: Scheme) -> int:
        """Return the micro-batches of a rank: as many as if every GPU had one, if the job names no
        global batch. Raises ValueError: it does not divide.
        """
        others = scheme.degrees.of_stage_without_dp * scheme.degrees.pp
        if not self.job.global_batch:
            return others
        return self.job.accumulation(self.machine.ranks // others, scheme.micro_batch)

    def activity(self, scheme: Scheme, stage: Stage) -> Activity:
        """Return what a rank of `stage` keeps and computes."""
        degrees, job = scheme.degrees, self.job
        whole = self.activities(scheme.micro_batch, scheme.checkpointing)
        if degrees.data_only:
            return whole
        element, batches = COMPUTE_DTYPES[job.computes].itemsize, self.micro_batches(scheme)
        given = scheme.micro_batch, job.seq, element, batches
        return divided(whole, self.model, stage, degrees, *given)


def pipelined(recipe: Recipe, degrees: Degrees) -> Recipe:
    """Return the recipe as a stage of a pipeline runs it: it gathers a unit once a step, and reduces it
    once.
    """
    if degrees.pp == 1 or recipe.stage < 2:
        return recipe
    held = {"reshard_after_forward": False} if recipe.stage == 3 else {}
    return recipe.replace(reduce_at="boundary", **held)


def account_of(question: Question, scheme: Scheme) -> Candidate:
    """Account for `scheme`. Raises ValueError: the global batch does not divide."""
    machine, job, model = question.machine, question.job, question.model
    degrees = scheme.degrees
    if degrees.data_only:
        degrees = replace(degrees, dp=machine.ranks)
    recipe, accumulation = pipelined(scheme.recipe(job), degrees), question.micro_batches(scheme)
    found = []
    for stage in unlike(stages_of(model, degrees)):
        kept = question.activity(scheme, stage)
        if recipe.offload_activations is not None:
            kept = on_host(kept, recipe.offload_activations, machine.shared)
        program = program_of(
            stage, degrees, recipe, job.optimizer, accumulation, machine.node_ranks, not machine.shared,
            away=kept.away, layers=tuple(in_layers(question, scheme, stage)),
        )  # fmt: skip
        peak = peak_of(program, kept, 0.0 if machine.is_here else FRAGMENTED)
        found.append((stage, program, kept, peak))
    slowest = max(found, key=lambda one: one[2].flops)
    stage, program, kept, peak = max(found, key=lambda one: sum(one[-1].values()))
    owned, held = program.owned, offloaded_bytes(program)
    if kept.on_host:
        held[HOST][ACTIVATIONS] = kept.on_host
    seconds, busy = _seconds(question, scheme, *slowest[:3])
    links, wire, sent = Counter[str](), program.bytes_of("move"), dict[str, int]()
    for op, times in program.counted():
        if op.kind == "move":
            far = between(op, machine)
            links.update({"inside": times * (op.nbytes - far), "between": times * far})
    if not scheme.degrees.data_only:
        crossed = handed_bytes(question, scheme, stage) * accumulation
        sent = {"data": sum(wire.values()), **program.bytes_of("layer"), "pp": crossed}
    tokens = scheme.micro_batch * job.seq * accumulation * degrees.dp
    model_flops = model.flops_per_token(job.seq) * tokens / machine.ranks
    step = seconds.get("step", 0.0)
    account = Account(
        rest=program.rest,
        peak=filled(peak),
        ledger=dict(program.peak),
        offloaded={tier: by for tier, by in held.items() if by},
        moved=program.bytes_of("copy", "disk"),
        wire=wire,
        sent=filled(sent),
        links={link: round(n) for link, n in links.items() if n},
        sent_between=round(links["between"]) * machine.local,
        seconds=seconds,
        tiers=busy,
        tokens_per_s=tokens / step if step else 0.0,
        mfu=model_flops / (step * machine.peak(job.computes)) if step else None,
    )
    reserve = Reserve() if machine.is_here else reserve_of(program.rank, machine, degrees)
    usable, host = max(0, machine.capacity - reserve.nbytes), machine.host
    # The memory of a CPU is the host's
    needed = account.peak_bytes + (account.host if machine.shared else 0)
    room = math.inf if machine.shared else host.memory
    return Candidate(
        scheme,
        account,
        fits=needed <= usable
        and account.host * machine.local <= room
        and account.by_tier[Tier.NVME] * machine.local <= host.nvme,
        usable=usable,
        needed=needed,
        accumulation=accumulation,
        notes=(*kept.notes, _reached(machine)) if machine.is_timed else kept.notes,
        reserve=reserve,
        owners=owned.balance if owned and owned.balance.matrices else None,
        pipeline_stage=stage.index,
        holders={
            rule_of(slot.name).kind: len(flat.held)
            for unit in program.rank for flat in unit.flats for slot in flat.layout.slots
        },
    )  # fmt: skip


def unlike(stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages that may hold or send most: of those with the same number of elements, the
    first, which keeps the most micro-batches.
    """
    seen: dict[tuple[int, bool, bool], Stage] = {}
    for stage in stages:
        seen.setdefault((stage.numel, stage.first, stage.last), stage)
    return list(seen.values())


# -- memory ----------------------------------------------------------------------------------------


def peak_of(program: Program, activity: Activity, fragmented: float) -> dict[str, int]:
    """Return the categories of the moment that is largest with fragmentation."""
    rows, updating = list[dict[str, int]](), program.owned.beside if program.owned else 0
    for at, held in program.highest.items():
        found = activity.passes.get(at, Pass())
        row = {
            **held,
            ACTIVATIONS: found.nbytes - found.logits - found.gradients,
            LOGITS: found.logits,
            TEMPORARY: updating if at[0] == "step" else found.gradients,
            MOMENTS: program.rest.get(MOMENTS, 0),
        }
        row[FRAGMENTATION] = int(fragmented * sum(v for k, v in row.items() if k in _MOVING))
        rows.append(row)
    return max(rows, key=lambda row: sum(row.values()))


# -- what a process takes of a GPU beside its tensors: the driver's context, NCCL's buffers ----------
#
# | part                    | bytes                                 | source                                                        |
# |-------------------------|---------------------------------------|---------------------------------------------------------------|
# | context                 | 640 MiB                               | an assumption: CUDA's context, loaded kernels, libraries      |
# | each communicator       | 512 MiB                               | an assumption: rings of 16 to 32 channels, by NCCL's buffers  |
# | sends to a peer in the  | 14 MiB × channels to that peer, which | NCCL's issue 1685: on eight H100 the first all-to-all took    |
# | node (all-to-all)       | are 2 × its NVLinks, up to 32; 2      | 3.28 GB, in buffers of 10 MiB and twice 2 MiB on 32 channels; |
# |                         | without NVLink                        | 7 × 32 × 14 MiB are 3.29 GB                                   |
# | sends to other nodes    | 512 MiB, however many peers           | NCCL's issues 1450 and 2363: one shared buffer                |
#
# Ordered sums and codecs send to every peer; native sums (reduce="native") do not. The engine makes
# its communicators as `onefold.comm.communicators.communicators_of` counts them. The script's own process
# group is not counted: it takes a communicator more once the script uses it on the device.

CONTEXT, COMMUNICATOR, CHANNEL, NETWORK = 640 << 20, 512 << 20, 14 << 20, 512 << 20
#: Bytes/s of one NVLink in one direction, from the second generation on.
NVLINK = 25e9
#: The most channels to one peer, and those without NVLink.
MOST_CHANNELS, FEWEST_CHANNELS = 32, 2


@dataclass(frozen=True)
class Reserve:
    """Bytes of one GPU that hold no tensor.

    Attributes:
        context: of the driver.
        communicators: how many communicators the engine makes.
        exchanges: bytes of NCCL's buffers for messages to single peers.
    """

    context: int = 0
    communicators: int = 0
    exchanges: int = 0

    @property
    def nbytes(self) -> int:
        return self.context + self.communicators * COMMUNICATOR + self.exchanges

    def __str__(self) -> str:
        said = f"{readable(self.context)} for the driver"
        if self.communicators:
            said += (
                f", {readable(self.communicators * COMMUNICATOR)} for {self.communicators}"
                " communicators"
            )
        if self.exchanges:
            said += (
                f", {readable(self.exchanges)} for all-to-alls (NCCL_MAX_P2P_NCHANNELS limits"
                " their channels)"
            )
        return said


def channels_to_a_peer(link: float) -> int:
    """Return NCCL's channels between two GPUs of a node, joined by `link` bytes/s in one
    direction: a power of 2.
    """
    wanted = 2 * int(link // NVLINK) if link > NVLINK else FEWEST_CHANNELS
    return min(MOST_CHANNELS, 1 << max(0, wanted - 1).bit_length())


def reserve_of(units: Sequence[UnitPlan], machine: Machine, degrees: Degrees) -> Reserve:
    """Return what is reserved on each GPU of `machine`: buffers for the largest group that holds
    parameters, communicators of all groups, and one for each other axis.
    """
    if machine.ranks == 1:
        return Reserve(CONTEXT)
    groups = {flat.held: flat for u in units for flat in u.flats}
    exchanges, largest = 0, groups[max(groups, key=len)]
    topology = largest.topology
    levels: tuple[Level, ...] = ("intra-group", "inter-group") if topology.two_levels else ("all",)
    for level in levels if largest.recipe.reduce != NATIVE else ():
        over = members(topology, range(topology.size), 0, level)
        far = sum(rank >= machine.local for rank in over)
        exchanges += (len(over) - 1 - far) * channels_to_a_peer(machine.gpu.link) * CHANNEL
        exchanges += NETWORK if far else 0
    communicators = sum(n > 1 for n in (degrees.tp, degrees.pp, degrees.cp, degrees.ep))
    communicators += sum(communicators_of(flat.topology) for flat in groups.values())
    return Reserve(CONTEXT, communicators, exchanges)


# -- what is sent ----------------------------------------------------------------------------------


def in_layers(question: Question, scheme: Scheme, stage: Stage) -> list[Layer]:
    """Return (axis, bytes, messages, ranks) that a block sends in a pass, as the mean over passes."""
    degrees = scheme.degrees
    if degrees.tp * degrees.cp * degrees.ep == 1:
        return []
    dims, job = dims_of(question.model), question.job
    t, c, x = degrees.tp, degrees.cp, degrees.ep
    once = scheme.micro_batch * job.seq / c * COMPUTE_DTYPES[job.computes].itemsize
    passes = (2 + CHECKPOINTING[scheme.checkpointing]) / 2
    ends = (stage.first + stage.last) / 2 / max(stage.blocks, 1)
    reduced = once * 2 * dims.hidden * (t - 1) / t
    width = dims.hidden / (t if degrees.sequence_divided else 1)
    found = (
        ("tp", reduced * (2 * passes + ends), 2 * (2 if degrees.sequence_divided else 1)),
        ("cp", passes * once * (dims.k + dims.v) / t * (c - 1), 1),
        ("ep", passes * 2 * once * dims.active * width * (x - 1) / x, 2),
    )
    return [
        (axis, n, calls, holding(degrees, tuple(other for other in AXES if other != axis)))
        for axis, n, calls in found
        if n
    ]


def handed_bytes(question: Question, scheme: Scheme, stage: Stage) -> int:
    """Return the bytes that a stage of a pipeline hands on in one micro-batch."""
    shape = handed_on(question.model, scheme.degrees, scheme.micro_batch, question.job.seq)
    return stage.crossings * math.prod(shape) * COMPUTE_DTYPES[question.job.computes].itemsize


# -- seconds ---------------------------------------------------------------------------------------


def bubble(degrees: Degrees, micro_batches: int) -> float:
    """Return the share of a step in which a rank of the pipeline has nothing to do:
    (P−1)/(V·M + P−1) for P stages, M micro-batches and V chunks a stage.

    It is (P−1)/(M+P−1) for 1F1B. Over the ideal time the loss is (P−1)/M ÷ V (Narayanan
    et al. 2021, sections 2.2.1 and 2.2.2).
    """
    lost = degrees.pp - 1
    return lost / (degrees.chunks * micro_batches + lost)


def flop_seconds(question: Question) -> float:
    """Return the seconds that a rank's passes take for each of their FLOPs."""
    machine, soft = question.machine, question.machine.software
    rate = machine.matrix_rate(question.job.computes) * soft.kernel_share
    return slowest_of(machine.ranks, soft.straggler) / rate


def _seconds(
    question: Question, scheme: Scheme, stage: Stage, program: Program, kept: Activity
) -> tuple[dict[str, float], dict[str, float]]:
    """Return (the seconds of a step, those in which tiers are busy); ({}, {}) if no speeds are known."""
    machine, soft, each = question.machine, question.machine.software, flop_seconds(question)
    if not machine.is_timed:
        return {}, {}
    passes = {at: one.flops * each for at, one in kept.passes.items()}
    parts, busy = step_seconds(program, machine, passes)
    out = dict.fromkeys(SECONDS[:-1], 0.0) | parts
    if scheme.degrees.pp > 1:
        degrees, accumulation = scheme.degrees, question.micro_batches(scheme)
        share = bubble(degrees, accumulation)
        layers = out["compute"] + sum(out.get(name, 0.0) for name in IN_LAYERS.values())
        out["bubble"] = layers * share / (1 - share)
        sent = handed_bytes(question, scheme, stage) * accumulation
        rate = machine.gpu.link
        if machine.between and degrees.ranks // degrees.pp >= machine.local:
            rate = machine.between.bandwidth / machine.local
        sends = sent / (rate * soft.link_share) - out["compute"]
        out["pipeline sends"] = max(0.0, sends) + 2 * (degrees.pp - 1) * soft.hop_seconds
    out["step"] = sum(out.values())
    return out, busy


def _reached(machine: Machine) -> str:
    """Return a note about the assumptions on software, or on what was measured."""
    software = machine.software
    share = f"{software.kernel_share:.0%} of the rate of large matrix products"
    if machine.is_here:
        return f"training steps measured on this machine reach {share}; seconds count that in"
    said = f"seconds assume that a step reaches {share}"
    if machine.ranks > 1:
        slower = slowest_of(machine.ranks, software.straggler) - 1
        said += (
            f" and {software.link_share:.0%} of the links' nominal rates, and loses with the number"
            f" of ranks: {1e6 * software.hop_seconds:.0f} µs for each hop of a ring, and {slower:.1%}"
            f" waiting for the slowest of {machine.ranks:,}"
        )
    return said


# -- in sentences ---------------------------------------------------------------------------------


def in_a_line(best: Candidate) -> str:
    """Return a candidate with what it needs, in words."""
    accumulated = f" x {best.accumulation} accumulated" if best.accumulation > 1 else ""
    others = [f", {readable(n)} {tier.where}" for tier, n in best.account.by_tier.items() if n]
    return (
        f"{best.scheme}, micro-batch {best.scheme.micro_batch}{accumulated}: {readable(best.needed)} of the"
        f" {readable(best.usable)} that a rank may use{''.join(others)}"
    )


def notes_of(question: Question, shown: Candidate) -> Iterator[str]:
    """Yield notes on speeds that are not known, and on options without effect in the recipe that a plan
    shows. Of others without effect, `onefold.shard` tells (runtime/state/start.py).
    """
    machine, computes = question.machine, question.job.computes
    recipe, gpu = shown.scheme.recipe(question.job), machine.gpu
    if computes not in gpu.rates and not machine.is_here:
        other = computes == "bf16" and "fp16" in gpu.rates
        yield (
            f"{gpu.title or gpu.name} has no {computes}: seconds are at its fp32 rate"
            f"{'; --precision fp16 would run at its own rate' if other else ''}"
        )
    if not machine.is_timed:
        yield (
            "speeds of this machine are not measured: onefold doctor --calibrate would add seconds to"
            " the plan"
        )
    yield from (n for n in recipe.notes if " has no effect " in n)


def assumptions_of(question: Question, shown: Candidate) -> Iterator[str]:
    """Yield notes on what the figures of a plan rest on."""
    yield _of_job(question)
    yield from _of_whole_matrices(question.job, question.model)
    if shown.reserve.communicators:
        yield (
            f"{readable(shown.reserve.nbytes)} of each GPU are not for training, by assumption:"
            f" {shown.reserve}"
        )
    degrees, dims = shown.scheme.degrees, question.model.transformer
    if not degrees.data_only:
        yield (
            "on a mesh a rank has its share of each block's activations; what layers send along tp, cp"
            " and ep is not hidden"
        )
        if dims is not None and dims.tied and degrees.pp > 1:
            yield (
                "embedding and head are tied: both ends of the pipeline hold the matrix, and add its"
                " gradients up (not counted)"
            )
        if degrees.ep > 1:
            yield "tokens are counted as spread evenly over the experts"
    yield (
        "MFU counts model FLOPs (6N + 12Lhs a token, no recompute) over the nominal rate of the device"
    )


def _of_job(question: Question) -> str:
    """Return a note on the bytes per parameter."""
    job = question.job
    sums, found = job.recipe(3).gradients.dtype, job.convention
    kept = job.moment_bytes
    names = {dtype: name for name, dtype in COMPUTE_DTYPES.items()}
    return (
        f"bytes per trained parameter: {found.parameters} parameters + {found.gradients} gradients"
        f" ({names.get(sums, sums)}) + {found.optimizer - kept:g} master weights + {kept:g}"
        f" {job.optimizer} states = {found.total:g}; gradients are gone between steps"
    )


def _of_whole_matrices(job: Job, model: ModelShape) -> Iterator[str]:
    """Yield a note on what an optimizer of whole matrices steps."""
    row = PLANNED[job.optimizer]
    if row.update != WHOLE:
        return
    names = stepped_whole(model, job.optimizer)
    numel = sum(p.numel for u in model.units for p in u.parameters if p.name in names)
    others = f"; {row.rest} steps the others" if row.rest else ""
    yield (
        f"{job.optimizer} steps {len(names):,} parameters whole, {numel / max(model.trainable, 1):.0%} of all"
        f" trained elements{others}. States, bytes and seconds of owners are those of the rank that has most"
    )
