"""Seconds of a step from FLOPs and bytes: the time model.

    compute        FLOPs ÷ (what large products reach × kernel_share), × the wait for the slowest of N ranks;
                   on a calibrated machine what its operations cost N ranks together
                   (`onefold.doctor.fit`) ÷ step_share; and what encoding, decoding and adding up
                   and the engine's own copies and casts read and write (plan/copies.py)
    communication  per move: the slower of its two links, + calls × hops × hop_seconds; a move over
                   groups is two, each on its level. A ring takes N−1 hops, one after another;
                   messages to all at once (an all-to-all) take one
    exposed        what communication is left over when `overlap` of the compute beside it is used up; never less than the ends:
                   the first gather and the last reduction of each micro-batch have nothing to hide
                   behind. Moves of several units are under way at once, so that those inside nodes
                   and those between them take as long as the slower of the two links
    optimizer      bytes that the update moves ÷ memory bandwidth
    io             host link and NVMe, as far as compute leaves room to hide them

        compute  │██ fwd ████████████│████████ bwd ████████████████████│
        moves    │▓▓▓ ▒▒▒ ▒▒▒ ▒▒▒    │ ▒▒▒▒ ▒▒▒▒ ▒▒▒▒ ▒▒▒▒ ▒▒▒▒     ▓▓▓│     ▒ hidden   ▓ exposed: an end, or more than fits

Every constant is stated in `Software` (plan/traffic.py) or in
`benchmarks.validation.systems`, which says on what it was fitted.

Tiers (the host link, the disks, the update on the host):

    forward     │██████████████│              parameters up, or read              hide behind the forward passes
    backward    │████████████████████████│    the same again, gradients down       hide behind the backward passes
    step                                 │▒▒▒ read ▒ update ▒ written ▒ up ▒│     the slower of update and moves; with
                                                                                  step_in_backward behind the backward passes

Link and disk work at the same time; what each of them carries in one phase it carries one after the
other. Behind a phase hides as much as communication has left of it. Where
the device is a CPU a copy is made by who computes: it hides behind nothing, and gradients need
none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from onefold.doctor.kernels import Kernels
from onefold.plan.hardware import Machine
from onefold.plan.offloaded import Carried
from onefold.plan.schema import SECONDS
from onefold.plan.traffic import Software, Traffic

#: What share of a copy's speed encoding and decoding reach: the goal of the kernels on a GPU, which
#: has not been measured there; what the plain operations reach on a CPU (docs/decisions.md,
#: Codecs). SUMMING_ON_A_GPU: the same of adding up, an assumption.
CODING_ON_A_GPU, CODING_ON_A_CPU = 0.8, 0.3
SUMMING_ON_A_GPU = 0.8
#: torch's name of what products of a precision are computed in.
DTYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Work:
    """What one rank does in one optimizer step.

    Attributes:
        flops: done, recompute included; model_flops: what MFU counts (None: the same).
        precision: of the matrix products: "fp32", "tf32", "fp16", "bf16".
        tokens: of all ranks together.
        micro_batches: of one rank.
        forward_share: of the compute, what is forward: 1/3, or 1/4 under full recompute.
        optimizer_numel, optimizer_bytes: elements that this rank's update steps on the device,
            bytes it moves (28 an element: Adam in fp32 reads p, g, m, v and writes p, m, v).
        host_optimizer_numel, host_optimizer_bytes: the same on the host.
        carried: what goes between tiers, by what it can hide behind. in_backward: units are stepped
            in the backward pass.
        host_bytes, nvme_bytes: over this rank's host link, and to and from NVMe, behind any
            compute: for published systems.
        hidden, micro_tokens: width of a block and tokens of a micro-batch, for a calibrated rate at
            that shape.
        kernels: what runs in all passes of the step, where that was traced: a calibrated machine
            knows what each part of it costs.
        handed: elements of gradients that the engine takes over, all micro-batches together.
        coded_bytes: read and written by encoding and decoding. summed_bytes: by adding up, where
            moves were not measured with it.
        handled_bytes: by the engine's copies and casts.
    """

    flops: float
    traffic: Sequence[Traffic] = ()
    model_flops: float | None = None
    precision: str = "bf16"
    tokens: float = 0.0
    micro_batches: int = 1
    forward_share: float = 1 / 3
    optimizer_numel: float = 0.0
    optimizer_bytes: float = 0.0
    host_optimizer_numel: float = 0.0
    host_optimizer_bytes: float = 0.0
    carried: Sequence[Carried] = ()
    in_backward: bool = False
    host_bytes: float = 0.0
    nvme_bytes: float = 0.0
    hidden: int = 0
    micro_tokens: int = 0
    kernels: Kernels | None = None
    handed: float = 0.0
    coded_bytes: float = 0.0
    handled_bytes: float = 0.0
    summed_bytes: float = 0.0


@dataclass(frozen=True)
class Times:
    """Seconds of a step by `schema.SECONDS`, MFU of the machine's nominal peak, what the moves take
    if nothing hides them, and seconds of tiers by `schema.TIER_SECONDS`.
    """

    seconds: Mapping[str, float]
    mfu: float
    tokens_per_s: float
    communication: float = 0.0
    tiers: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def step(self) -> float:
        return self.seconds["step"]


def slowest_of(ranks: int, straggler: float) -> float:
    """How much longer a step takes than a rank's mean because all wait for the slowest: 1 +
    σ·sqrt(2 ln N).
    """
    return 1 + straggler * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 1.0


def compute_seconds(work: Work, machine: Machine, software: Software) -> float:
    """Of forward, backward and recompute, all micro-batches."""
    measured, dtype = machine.measured, DTYPES[work.precision]
    handed = work.handed * software.handed_s
    if measured is not None and work.kernels is not None and knows_passes(work, machine):
        passes = measured.pass_seconds(work.kernels, dtype, machine.ranks)
        return passes / software.step_share + handed
    if measured is not None and work.hidden and work.micro_tokens:
        rate = measured.block_rate(work.hidden, work.micro_tokens, dtype, machine.ranks)
        return work.flops / (rate * software.step_share) + handed
    own = work.flops / (machine.matrix_rate(work.precision) * software.kernel_share)
    return own * slowest_of(machine.ranks, software.straggler)


def exposed_seconds(
    work: Work, compute: float, machine: Machine, software: Software
) -> tuple[float, float, dict[str, float]]:
    """(exposed, all) seconds of communication, and what it leaves of "forward" and "backward" to
    hide something else behind.

    Phase by phase: `overlap` × the phase's compute hides its moves, of which each hidden second
    costs `contention` of itself in compute.
    """
    room = software.overlap * (1 - machine.contention) * compute
    left = {"forward": room * work.forward_share, "backward": room * (1 - work.forward_share)}
    by_phase: dict[str, list[Traffic]] = {}
    for traffic in work.traffic:
        by_phase.setdefault(traffic.phase, []).append(traffic)
    exposed = 0.0
    # the narrowest room first: what it hides is gone for the wider
    for phase in ("first forward", "last backward", "forward", "backward", "both", "boundary"):
        once = phase in ("first forward", "last backward", "boundary")
        hideable, ends = _hideable(
            by_phase.get(phase, ()), 1 if once else work.micro_batches, machine, software
        )
        hidden = 0.0
        for part in left:
            if phase == "both" or phase.endswith(part):
                taken = min(hideable - hidden, left[part] / (work.micro_batches if once else 1))
                left[part] -= taken
                hidden += taken
        exposed += hideable + ends - hidden
    return exposed, sum(t.seconds(machine, software) for t in work.traffic), left


def _hideable(
    moves: Sequence[Traffic], micro_batches: int, machine: Machine, software: Software
) -> tuple[float, float]:
    """Seconds of these moves that compute can hide, and those of the first and last of each
    micro-batch, which it cannot.

    An end goes over its levels one after the other; of the rest one unit's move inside nodes runs
    beside another's between them.
    """
    moving = [t for t in moves if t.calls and t.nbytes and t.ranks > 1]
    # A move's levels are one
    calls = sum(max(t.calls for t in moving if t.move == move) for move in {t.move for t in moving})
    ends = min(1.0, 2 * micro_batches / calls) if calls else 0.0
    parts = [t.parts(machine, software) for t in moving]
    inside, between, hops = (sum(part[i] for part in parts) for i in range(3))
    return (1 - ends) * (max(inside, between) + hops), ends * sum(
        t.seconds(machine, software) for t in moving
    )


def step_times(work: Work, machine: Machine, software: Software | None = None) -> Times:
    """Seconds of a step of this work on one rank of this machine.

    A calibrated machine's figures stand for its block rate, its moves and its optimizer; what its
    reference steps showed is a `software` too (`onefold.plan.efficiency`).
    """
    soft, memory = software or Software(), machine.gpu.memory_bandwidth
    compute = compute_seconds(work, machine, soft)
    if machine.measured is None:  # else its reference steps have them
        compute += (work.handled_bytes + work.summed_bytes / SUMMING_ON_A_GPU) / memory
    exposed, communication, left = exposed_seconds(work, compute, machine, soft)
    compute += work.coded_bytes / (
        memory * (CODING_ON_A_CPU if machine.shared else CODING_ON_A_GPU)
    )
    tiers = tier_times(work, machine, left)
    optimizer = _device_update(work, machine) + tiers.update
    step = compute + exposed + optimizer + tiers.io
    seconds = dict(zip(SECONDS, (compute, exposed, optimizer, tiers.io, step), strict=True))
    model = work.flops if work.model_flops is None else work.model_flops
    return Times(
        seconds,
        mfu=model / (step * machine.peak(work.precision)) if step else 0.0,
        tokens_per_s=work.tokens / step if step else 0.0,
        communication=communication,
        tiers=tiers.parts,
        notes=_notes(soft, machine, max((t.hops for t in work.traffic), default=0)),
    )


def knows_passes(work: Work, machine: Machine) -> bool:
    """Whether compute is priced operation by operation: what runs is known, and this machine was
    measured with passes of this dtype.
    """
    measured = machine.measured
    return (
        work.kernels is not None
        and measured is not None
        and measured.knows_passes(DTYPES[work.precision])
    )


def _notes(software: Software, machine: Machine, hops: int) -> tuple[str, ...]:
    """What the seconds assume of software, or what a calibrated machine's reference steps showed,
    as a sentence.
    """
    if machine.measured is None and machine.gpu.name == "here":
        return ()  # nobody knows its speeds
    if machine.measured is None:
        said = (
            f"seconds assume that a step reaches {software.kernel_share:.0%} of the rate of large"
            " matrix products"
        )
        if machine.ranks > 1:
            slower = slowest_of(machine.ranks, software.straggler) - 1
            said += (
                f" and {software.link_share:.0%} of the links' nominal rates, hides moves behind"
                f" {software.overlap:.0%} of the compute beside them, and loses with the number of"
                f" ranks: {1e6 * software.hop_seconds:.0f} µs × up to {hops:,} hops a move, and"
                f" {slower:.1%} waiting for the slowest of {machine.ranks:,}"
            )
        return (said,)
    if software.handed_s == 0:
        return ()
    moves = f" and {software.move_share:.0%} of that of moves" if machine.ranks > 1 else ""
    return (
        f"training steps measured on this machine reach {software.step_share:.0%} of the speed of"
        f" passes alone{moves}, and take {1e9 * software.handed_s:.1f} ns for each gradient and"
        " micro-batch; seconds count that in",
    )


def _device_update(work: Work, machine: Machine) -> float:
    if machine.measured is not None and work.optimizer_numel:
        return machine.measured.optimizer_seconds(round(work.optimizer_numel), machine.ranks)
    return work.optimizer_bytes / machine.gpu.memory_bandwidth


# -- tiers -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TierTimes:
    """Seconds of a step: `io` waits for link and disks, `update` is the host's that nothing hides;
    `parts` by `schema.TIER_SECONDS`.
    """

    io: float
    update: float
    parts: Mapping[str, float]


def tier_times(work: Work, machine: Machine, room: Mapping[str, float]) -> TierTimes:
    """`room`: seconds of the "forward" and "backward" passes that communication leaves to hide
    behind.
    """
    left, parts = dict(room), defaultdict[str, float](float)
    io = 0.0
    for phase in ("forward", "backward"):
        beside, alone = _beside(work.carried, phase, machine, parts)
        io += alone + _hide(beside, phase, left, parts)
    link, disk = (
        work.host_bytes / machine.host_link(),
        work.nvme_bytes / (machine.host.nvme_bandwidth / machine.local),
    )
    parts["link"], parts["disk"] = parts["link"] + link, parts["disk"] + disk
    anywhere = max(link, disk)
    for phase in ("forward", "backward"):
        anywhere = _hide(anywhere, phase, left, parts)
    io += anywhere
    update = update_seconds(work, machine)
    beside, alone = _beside(work.carried, "step", machine, parts)
    parts["host update"] = update
    parts["hidden behind the update"] = min(beside, update)
    waits = max(update, beside) + alone
    if work.in_backward:
        waits = _hide(waits, "backward", left, parts)
    waiting = min(update, waits)
    return TierTimes(io + waits - waiting, waiting, {k: v for k, v in parts.items() if v})


def update_seconds(work: Work, machine: Machine) -> float:
    """Of the update on the host; on a CPU as it was measured there."""
    if machine.shared and machine.measured is not None and work.host_optimizer_numel:
        return machine.measured.optimizer_seconds(round(work.host_optimizer_numel), machine.ranks)
    return work.host_optimizer_bytes / (machine.host.memory_bandwidth / machine.local)


def _beside(
    carried: Iterable[Carried], phase: str, machine: Machine, parts: dict[str, float]
) -> tuple[float, float]:
    """(seconds that something else can hide, seconds that nothing can) of what one phase
    carries.
    """
    nbytes = defaultdict[str, float](float)
    for c in carried:
        nbytes[c.move] += c.nbytes if c.phase == phase else 0.0
    local, host = machine.local, machine.host
    disk = nbytes["read"] / (host.nvme_bandwidth / local) + nbytes["written"] / (
        (host.nvme_write or host.nvme_bandwidth) / local
    )
    read = nbytes["read"] if phase != "step" else 0  # parameters, which go on to the device
    link = (nbytes["up"] + nbytes["down"] + read) / machine.host_link()
    if machine.shared:
        link = 2 * nbytes["up"] / machine.gpu.memory_bandwidth
    parts["link"], parts["disk"] = parts["link"] + link, parts["disk"] + disk
    return (disk, link) if machine.shared else (max(link, disk), 0.0)


def _hide(seconds: float, phase: str, left: dict[str, float], parts: dict[str, float]) -> float:
    """What is left of `seconds` when a phase's room is used up."""
    hidden = min(seconds, left[phase])
    left[phase] -= hidden
    parts[f"hidden behind {phase}"] += hidden
    return seconds - hidden
