"""Seconds of a step from FLOPs and bytes: the time model.

    compute        FLOPs ÷ (rate of large products × kernel_share), × the wait for the slowest of N ranks;
                   on a calibrated machine the cost of its operations, N ranks together (`onefold.machine.fit`), ÷ step_share;
                   plus what encoding, adding up, and the engine's copies and casts read and write (plan/wire.py)
    communication  for each move: the slower of its two links, + calls × hops × hop_seconds. A move over groups is two moves,
                   each on its level. A ring takes N−1 hops, one after another; messages to all at once (an all-to-all) take one
    exposed        the communication that is left when it has used up `overlap` of the compute beside it, but at least the ends:
                   the first gather and the last reduction of a micro-batch have nothing to hide behind. Moves of several units
                   are in flight at once, so moves inside nodes and between them together take as long as the slower link
    optimizer      bytes that the update moves ÷ memory bandwidth; if it has matrix products (Muon), also their FLOPs ÷ rate of large
                   products, of the rank that owns most
    io             host link and NVMe, as far as compute leaves no room to hide them

        compute  │██ fwd ████████████│████████ bwd ████████████████████│
        moves    │▓▓▓ ▒▒▒ ▒▒▒ ▒▒▒    │ ▒▒▒▒ ▒▒▒▒ ▒▒▒▒ ▒▒▒▒ ▒▒▒▒     ▓▓▓│     ▒ hidden   ▓ exposed: an end, or more than fits

Each constant is explained in `Software` (plan/traffic.py), or in `benchmarks.validation.systems`
with the data to which it was fitted.

Tiers (the host link, the disks, the update on the host):

    forward     │██████████████│              parameters up, or read              hidden behind the forward passes
    backward    │████████████████████████│    the same again, gradients down       hidden behind the backward passes
    step                                 │▒▒▒ read ▒ update ▒ written ▒ up ▒│     the slower of update and moves; with
                                                                                  step_in_backward behind the backward passes

Link and disk work at the same time. In one phase the disk carries one thing after the other, and so
does each direction of the link. They hide behind the part of a phase that communication leaves. If the device is a CPU, the
computing cores make the copies: these hide behind nothing, and gradients need none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onefold.machine.kernels import Kernels
from onefold.plan.hardware import Machine
from onefold.plan.offloaded import Carried
from onefold.plan.schema import SECONDS
from onefold.plan.traffic import Software, Traffic

#: The share of a copy's speed that encoding and decoding reach: on a GPU an assumption; on a CPU what
#: the plain operations reach (docs/decisions.md, Codecs). SUMMING_ON_A_GPU is the same for adding up,
#: an assumption too. Sums run beside the passes on a GPU, and take memory bandwidth from them
#: meanwhile: they count as if they ran in turn.
CODING_ON_A_GPU, CODING_ON_A_CPU = 0.8, 0.3
SUMMING_ON_A_GPU = 0.8
#: The dtype in which products of a precision are computed.
DTYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Work:
    """What one rank does in one optimizer step.

    Attributes:
        flops: done, recompute included.
        model_flops: those that MFU counts; None: the same.
        precision: of the matrix products: "fp32", "tf32", "fp16", "bf16".
        tokens: of all ranks together.
        micro_batches: of one rank.
        forward_share: the forward passes' share of the compute: 1/3, or 1/4 under full recompute.
        optimizer_numel, optimizer_bytes: elements that this rank's update steps on the device, and
            bytes that it moves (28 an element: Adam in fp32 reads p, g, m, v and writes p, m, v).
        update_flops: matrix products of the update, in bf16: those of the rank that owns most.
        host_optimizer_numel, host_optimizer_bytes: the same on the host, with its casts of masters.
        carried: bytes between tiers, by the phase behind which they can hide.
        in_backward: units are stepped in the backward pass.
        host_bytes, nvme_bytes: bytes over this rank's host link, and to and from NVMe, that hide
            behind any compute: for published systems.
        hidden, micro_tokens: width of a block and tokens of a micro-batch, for a calibrated rate at
            that shape.
        kernels: what runs in all passes of the step, if they were traced: a calibrated machine
            knows the cost of each part.
        handed: elements of gradients that the engine takes over in all micro-batches.
        coded_bytes, handled_bytes, summed_bytes: bytes that kernels read and write to encode and
            decode, to copy and cast, and to add up, each as plan/wire.py counts them.
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
    update_flops: float = 0.0
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
    """Seconds of a step.

    Attributes:
        seconds: by `schema.SECONDS`.
        mfu: of the machine's nominal peak.
        communication: of all moves, if nothing hides them.
        tiers: by `schema.TIER_SECONDS`.
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
    """Return the factor by which a step is longer than a rank's mean since all wait for the
    slowest: 1 + σ·sqrt(2 ln N).
    """
    return 1 + straggler * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 1.0


def compute_seconds(work: Work, machine: Machine, software: Software) -> float:
    """Return the seconds of forward, backward and recompute in all micro-batches."""
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
    work: Work, compute: float, machine: Machine, software: Software, products: float = 0.0
) -> tuple[float, float, dict[str, float]]:
    """Return the (exposed, all) seconds of communication, and the seconds of "forward" and
    "backward" that remain to hide something else.

    `overlap` × a phase's compute hides the phase's moves. Each hidden second costs computing the
    share `contention` of a second. Moves to and from owners (phase "boundary") hide behind the
    `products` of the update, but for the first and the last.
    """
    room = software.overlap * (1 - machine.contention) * compute
    left = {"forward": room * work.forward_share, "backward": room * (1 - work.forward_share)}
    by_phase: dict[str, list[Traffic]] = {}
    for traffic in work.traffic:
        by_phase.setdefault(traffic.phase, []).append(traffic)
    exposed = 0.0
    # The narrowest phases come first: what they use is gone for the wider ones
    for phase in ("first forward", "last backward", "forward", "backward", "both", "boundary"):
        once = phase in ("first forward", "last backward", "boundary")
        passes, divided = (1, work.micro_batches) if once else (work.micro_batches, 1)
        hideable, ends = _hideable(by_phase.get(phase, ()), passes, machine, software)
        hidden = 0.0
        if phase == "boundary":
            hidden = min(hideable, software.overlap * (1 - machine.contention) * products)
        for part in left:
            if phase == "both" or phase.endswith(part):
                taken = min(hideable - hidden, left[part] / divided)
                left[part] -= taken
                hidden += taken
        exposed += hideable + ends - hidden
    return exposed, sum(t.seconds(machine, software) for t in work.traffic), left


def _hideable(
    moves: Sequence[Traffic], micro_batches: int, machine: Machine, software: Software
) -> tuple[float, float]:
    """Return the seconds of these moves that compute can hide, and those of the first and last
    moves of each micro-batch, which it cannot.

    A first or last move takes its levels one after the other. Of the others, one unit's move inside
    nodes runs beside another unit's move between nodes.
    """
    moving = [t for t in moves if t.calls and t.nbytes and t.ranks > 1]
    # The levels of a move count as one call
    calls = sum(max(t.calls for t in moving if t.move == move) for move in {t.move for t in moving})
    ends = min(1.0, 2 * micro_batches / calls) if calls else 0.0
    parts = [t.parts(machine, software) for t in moving]
    inside, between, hops = (sum(part[i] for part in parts) for i in range(3))
    return (1 - ends) * (max(inside, between) + hops), ends * sum(
        t.seconds(machine, software) for t in moving
    )


def step_times(work: Work, machine: Machine, software: Software | None = None) -> Times:
    """Return the seconds of a step of this work on one rank of this machine.

    A calibrated machine has measured rates of blocks, moves and the optimizer. What its reference
    steps reached is its `software` (`onefold.plan.efficiency`).
    """
    soft, memory = software or Software(), machine.gpu.memory_bandwidth
    compute = compute_seconds(work, machine, soft)
    if machine.measured is None:  # reference steps include them
        compute += (work.handled_bytes + work.summed_bytes / SUMMING_ON_A_GPU) / memory
    products = work.update_flops / machine.matrix_rate("bf16") if work.update_flops else 0.0
    exposed, communication, left = exposed_seconds(work, compute, machine, soft, products)
    compute += work.coded_bytes / (
        memory * (CODING_ON_A_CPU if machine.shared else CODING_ON_A_GPU)
    )
    io, update, tiers = tier_times(work, machine, left)
    optimizer = update_seconds(work, machine, on_host=False) + products + update
    step = compute + exposed + optimizer + io
    seconds = dict(zip(SECONDS, (compute, exposed, optimizer, io, step), strict=True))
    model = work.flops if work.model_flops is None else work.model_flops
    return Times(
        seconds,
        mfu=model / (step * machine.peak(work.precision)) if step else 0.0,
        tokens_per_s=work.tokens / step if step else 0.0,
        communication=communication,
        tiers=tiers,
        notes=_notes(soft, machine, max((t.hops for t in work.traffic), default=0)),
    )


def knows_passes(work: Work, machine: Machine) -> bool:
    """Return whether compute is priced operation by operation: the operations are known, and passes
    of this dtype were measured on this machine.
    """
    measured = machine.measured
    return (
        work.kernels is not None
        and measured is not None
        and measured.knows_passes(DTYPES[work.precision])
    )


def _notes(software: Software, machine: Machine, hops: int) -> tuple[str, ...]:
    """Return a note about the assumptions on software, or about a calibrated machine's reference
    steps.
    """
    if not machine.is_timed:
        return ()
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


# -- tiers -----------------------------------------------------------------------------------------


def tier_times(
    work: Work, machine: Machine, room: Mapping[str, float]
) -> tuple[float, float, dict[str, float]]:
    """Return the seconds (that wait for link and disks, of the host's update that nothing hides, by
    `schema.TIER_SECONDS`).

    Args:
        room: seconds of the "forward" and "backward" passes that communication leaves to hide in.
    """
    left, parts = dict(room), defaultdict[str, float](float)
    io = 0.0
    for phase in ("forward", "backward"):
        beside, alone = _beside(work, phase, machine, parts)
        io += alone + _hide(beside, phase, left, parts)
    link = work.host_bytes / machine.host_link()
    disk = work.nvme_bytes / (machine.host.nvme_bandwidth / machine.local)
    parts["link"], parts["disk"] = parts["link"] + link, parts["disk"] + disk
    anywhere = max(link, disk)
    for phase in ("forward", "backward"):
        anywhere = _hide(anywhere, phase, left, parts)
    io += anywhere
    update = update_seconds(work, machine, on_host=True)
    beside, alone = _beside(work, "step", machine, parts)
    parts["host update"] = update
    parts["hidden behind the update"] = min(beside, update)
    waits = max(update, beside) + alone
    if work.in_backward:
        waits = _hide(waits, "backward", left, parts)
    waiting = min(update, waits)
    return io + waits - waiting, waiting, {k: v for k, v in parts.items() if v}


def update_seconds(work: Work, machine: Machine, *, on_host: bool) -> float:
    """Return the seconds of the update on the device or on the host, as measured if it was."""
    numel = work.host_optimizer_numel if on_host else work.optimizer_numel
    if machine.measured is not None and numel and (machine.shared or not on_host):
        return machine.measured.optimizer_seconds(round(numel), machine.ranks)
    if on_host:
        return work.host_optimizer_bytes / (machine.host.memory_bandwidth / machine.local)
    return work.optimizer_bytes / machine.gpu.memory_bandwidth


def _beside(
    work: Work, phase: str, machine: Machine, parts: dict[str, float]
) -> tuple[float, float]:
    """Return the seconds of one phase's carried bytes (that compute can hide, that nothing can)."""
    nbytes = defaultdict[str, float](float)
    for c in work.carried:
        nbytes[c.move] += c.nbytes if c.phase == phase else 0.0
    local, host = machine.local, machine.host
    disk = nbytes["read"] / (host.nvme_bandwidth / local)
    disk += nbytes["written"] / (host.nvme_writes / local)
    read = nbytes["read"] if phase != "step" else 0  # parameters, which go on to the device
    link = max(nbytes["up"] + read, nbytes["down"]) / machine.host_link()  # both at once
    if machine.shared:
        link = 2 * nbytes["up"] / machine.gpu.memory_bandwidth
    parts["link"], parts["disk"] = parts["link"] + link, parts["disk"] + disk
    return (disk, link) if machine.shared else (max(link, disk), 0.0)


def _hide(seconds: float, phase: str, left: dict[str, float], parts: dict[str, float]) -> float:
    """Hide `seconds` behind what is left of a phase, and return the rest."""
    hidden = min(seconds, left[phase])
    left[phase] -= hidden
    parts[f"hidden behind {phase}"] += hidden
    return seconds - hidden
