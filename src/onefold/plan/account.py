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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from onefold.memory import GATHERED, IDLE, LEAVING, MOMENTS, OWNED, REDUCTION
from onefold.plan.activity import divided, on_host
from onefold.plan.degrees import AXES, Degrees, dims_of
from onefold.plan.hardware import Machine
from onefold.plan.job import CHECKPOINTING, Job, Scheme
from onefold.plan.offloaded import HOST, offloaded_bytes
from onefold.plan.owned import Balance
from onefold.plan.program import Layer, Program, program_of
from onefold.plan.rank import Stage, handed_on, holding, rule_of, stages_of
from onefold.plan.reserve import Reserve, reserve_of
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
from onefold.plan.states import filled
from onefold.plan.times import (
    between,
    slowest_of,
    step_seconds,
)
from onefold.recipe import COMPUTE_DTYPES, Recipe
from onefold.recipe.rows import Tier
from onefold.tracing.trace import Activity
from onefold.tracing.watch import Pass

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
    owned, (_, held) = program.owned, offloaded_bytes(program)
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
