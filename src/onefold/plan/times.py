"""Seconds of a program on a machine: each operation has a price, and begins when its lane, its links
and the operations that it waits for are free.

    compute   │██ pass ████│░░ wait ░░│██ pass ███████│▓ kernels ▓│ update │
    gathers       │▒▒▒ g1 ▒▒▒▒▒▒▒▒▒▒▒▒│▒▒▒ g2 ▒▒▒│                              what is hidden follows from the order of issue
    link          │▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▒▒▒▒▒▒▒▒▒▒│                              two moves on one link run one after the other
    up, down, disk, host                                                        the tiers of offloaded state

| operation     | seconds                                                                                               |
|---------------|-------------------------------------------------------------------------------------------------------|
| pass          | FLOPs ÷ (rate of large products × kernel_share) × the wait for the slowest of N ranks; on a calibrated |
|               | machine the cost of its operations (`onefold.machine.fit`) ÷ step_share                               |
| kernel, code, | bytes ÷ memory bandwidth, of which encoding and adding up reach a share; reference steps of a          |
| sum           | calibrated machine include copies and sums                                                            |
| move          | the slower of its two links, + messages × hops × hop_seconds: a ring takes N−1 hops, one after another; |
|               | messages to all at once (an all-to-all) take one                                                      |
| copy, disk    | bytes ÷ rate of the host link, or of this rank's share of the disk                                    |
| update        | bytes ÷ memory bandwidth; if it has matrix products (Muon), also their FLOPs ÷ rate of large products  |

Gathers are rings on NCCL, and enter each node once: the node's adapters together carry them. They are
pairwise on gloo. Reductions are pairwise, and rings if NCCL adds (reduce="native"). NCCL may also use
a tree, which has fewer hops, or add inside the switch: no reduction is counted as faster than a ring.

If the device is a CPU, the computing cores make copies and moves: each hidden second of a move costs
computing the share `contention` of a second.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from onefold.machine.calibration import Calibration
from onefold.machine.kernels import Kernels
from onefold.machine.measured import AtRanks, StepPoint
from onefold.plan.hardware import Machine, calibrated
from onefold.plan.program import COMPUTE, DISK, HOST, Op, Program
from onefold.plan.schema import IN_LAYERS

#: The share of a copy's speed that encoding and decoding reach: on a GPU an assumption; on a CPU what
#: the plain operations reach (docs/decisions.md, Codecs). SUMMING_ON_A_GPU is the same for adding up,
#: an assumption too.
CODING_ON_A_GPU, CODING_ON_A_CPU = 0.8, 0.3
SUMMING_ON_A_GPU = 0.8
#: The dtype in which products of a precision are computed.
DTYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Software:
    """What software reaches of the hardware's rates. A plan uses the defaults for a machine that
    was not measured.

    Attributes:
        kernel_share: what a whole transformer reaches of the rate of large products; norms, softmax
            and small products take the rest. Fitted, like hop_seconds, to the Azure report (see
            `benchmarks.validation.systems`).
        link_share: what a collective of large messages reaches of the nominal link. An assumption;
            published runs reach 0.17 to 1.
        hop_seconds: one step of a ring, from one rank to the next. A collective over N ranks takes
            N−1 of them: this term grows with N.
        straggler: the spread of the ranks' speeds, an assumption. The slowest of N normally
            distributed ranks is sqrt(2 ln N) deviations behind the mean.
        step_share, move_share: on a calibrated machine, what a step of the engine reaches of the
            rates of its passes and moves, which were measured alone. A share above 1 says that
            parts overlap, or that alone they were slower.
        handed_s: seconds to take over one element of a gradient, in each micro-batch. Like the two
            shares it comes from reference steps (`shares`); without them they are 1, 1 and 0.
    """

    kernel_share: float = 0.77
    link_share: float = 0.8
    hop_seconds: float = 7e-6
    straggler: float = 0.01
    step_share: float = 1.0
    move_share: float = 1.0
    handed_s: float = 0.0


def slowest_of(ranks: int, straggler: float) -> float:
    """Return the factor by which a step is longer than a rank's mean since all wait for the
    slowest: 1 + σ·sqrt(2 ln N).
    """
    return 1 + straggler * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 1.0


# -- prices ----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _near(over: Sequence[int], per_node: int) -> int:
    """How many of `over` are on the node of the first of them."""
    return sum(rank // per_node == over[0] // per_node for rank in over)


def between(op: Op, machine: Machine) -> float:
    """Return how many of a move's bytes leave the node, the mean over the ranks of a node. Of all
    ranks that hold the same, a ring enters each node once. Of other moves each peer gets its part.
    """
    size = len(op.over)
    here = _near(op.over, machine.per_node)
    if op.ring and not op.lane.endswith("group"):
        return op.nbytes / here if here < size else 0.0
    return op.nbytes * (size - here) / max(size - 1, 1)


@dataclass(frozen=True)
class Prices:
    """Seconds of each operation, on one rank of a machine.

    Attributes:
        passes: {(unit, phase): seconds of the model's computing in one micro-batch}.
    """

    machine: Machine
    software: Software
    passes: Mapping[tuple[str, str], float]

    def of(self, op: Op) -> tuple[float, dict[str, float]]:
        """Return (seconds, the seconds for which it takes each link)."""
        m, memory = self.machine, self.machine.gpu.memory_bandwidth
        if op.kind == "pass":
            return self.passes.get((op.unit, op.phase), 0.0), {}
        if op.kind == "move":
            return self._move(op)
        if op.kind == "code":
            return op.nbytes / memory / (CODING_ON_A_CPU if m.shared else CODING_ON_A_GPU), {}
        if op.kind in ("kernel", "sum"):
            share = SUMMING_ON_A_GPU if op.kind == "sum" else 1.0
            return (op.nbytes / memory / share if m.measured is None else 0.0), {}
        if op.kind == "copy":
            if m.shared:
                return (2 * op.nbytes / memory if op.move == "up" else 0.0), {}
            return op.nbytes / m.host_link(), {}
        if op.kind == "disk":
            rate = m.host.nvme_bandwidth if op.move == "read" else m.host.nvme_writes
            return op.nbytes / (rate / m.local), {}
        if op.kind == "update":
            products = op.flops / m.matrix_rate("bf16") if op.flops else 0.0
            on_host = op.lane == HOST
            if m.measured is not None and op.numel and (m.shared or not on_host):
                return products + m.measured.optimizer_seconds(round(op.numel), m.ranks), {}
            rate = m.host.memory_bandwidth / m.local if on_host else memory
            return products + op.nbytes / rate, {}
        return 0.0, {}

    def _move(self, op: Op) -> tuple[float, dict[str, float]]:
        m, soft = self.machine, self.software
        if len(op.over) <= 1 or not op.nbytes:
            return 0.0, {}
        if m.measured is not None:
            # All ranks of the machine move at the same time, in any number of groups
            gathers = op.move == "all-gather" or (op.move == "all-reduce" and op.ring)
            move = "all-gather" if gathers else "reduce-scatter"
            once = m.measured.seconds_for(move, math.ceil(op.nbytes / op.calls), m.ranks)
            seconds = op.calls * once / soft.move_share
            return seconds, {"inside": seconds}
        far = between(op, m)
        links = {"inside": (op.nbytes - far) / (m.gpu.link * soft.link_share)}
        if m.between:
            links["between"] = far * m.local / (m.between.bandwidth * soft.link_share)
        hops = (len(op.over) - 1 if op.ring else 1) * op.calls * soft.hop_seconds
        return max(links.values()) + hops, {name: s for name, s in links.items() if s}


# -- a step ----------------------------------------------------------------------------------------


def timed(ops: Sequence[Op], price: Callable[[Op], tuple[float, dict[str, float]]]) -> list[float]:
    """Give each operation its begin and end, in the order of issue; return its seconds."""
    lane: dict[str, float] = defaultdict(float)
    link: dict[str, float] = defaultdict(float)
    spent = []
    for op in ops:
        seconds, taken = price(op)
        begin = lane[op.lane]
        for i in op.after:
            begin = max(begin, ops[i].end)
        for name in taken:
            begin = max(begin, link[name])
        op.begin, op.end = begin, begin + seconds
        lane[op.lane] = op.end
        for name, busy in taken.items():
            link[name] = begin + busy
        spent.append(seconds)
    return spent


def step_seconds(program: Program, prices: Prices) -> tuple[dict[str, float], dict[str, float]]:
    """Return (seconds of a step by its parts, seconds in which tiers are busy). The lane of compute
    computes or waits: what it waits for tells the part.
    """
    ops, machine = program.ops, prices.machine
    spent = timed(ops, prices.of)
    more = max(0, program.micro_batches - 3)
    parts: dict[str, float] = defaultdict(float)
    busy: dict[str, float] = defaultdict(float)
    free = sent = 0.0
    for op, seconds in zip(ops, spent, strict=True):
        # Further micro-batches are like the second of three
        times = 1 + more if op.micro == 1 else 1
        if op.kind == "move" and op.lane != COMPUTE:
            sent += times * seconds
        elif op.kind == "copy":
            busy[f"link {op.move}"] += times * seconds
        elif op.lane in (DISK, HOST):
            busy[op.lane] += times * seconds
        if op.lane != COMPUTE:
            continue
        if op.begin > free:
            cause = max((ops[i] for i in op.after), key=lambda o: o.end, default=op)
            tier = cause.kind in ("copy", "disk") or cause.lane == HOST
            parts["io" if tier else "exposed communication"] += times * (op.begin - free)
        free = op.end
        if op.kind == "update":
            parts["optimizer"] += times * seconds
        elif op.kind == "copy":
            parts["io"] += times * seconds
        else:
            parts[IN_LAYERS.get(op.move, "compute")] += times * seconds
    # The host's update and the disk may end behind what the device computes
    late = [(op, s) for op, s in zip(ops, spent, strict=True) if op.lane in (HOST, DISK)]
    waits = max(0.0, max((op.end for op, _ in late), default=0.0) - free)
    stepping = min(waits, sum(s for op, s in late if op.lane == HOST and op.end > free))
    parts["optimizer"] += stepping
    parts["io"] += waits - stepping
    parts["exposed communication"] += machine.contention * max(
        0.0, sent - parts["exposed communication"]
    )
    return dict(parts), {
        name: n
        for name, n in (
            ("link", max(busy["link up"], busy["link down"])),
            ("disk", busy[DISK]),
            ("host update", busy[HOST]),
        )
        if n
    }


# -- a calibrated machine --------------------------------------------------------------------------
#
# Passes, moves and the optimizer are each measured alone. Then the engine trains a small transformer
# (`StepPoint`). For each dtype and number of ranks, three figures of `Software` make the sum of the
# parts equal to the seconds of those steps:
#
#     seconds of a step = passes ÷ step_share + gradients · handed_s + moves exposed ÷ move_share + optimizer
#
#     step_share    hooks, cold caches, the wait for the slowest of ranks that share cores     grows with compute
#     handed_s      gradients cast, copied and added up, parameters cast                       seen in steps of few tokens for each weight
#     move_share    waiting in each unit instead of once, sending beside computing             seen at stage 3, which sends in every unit

#: Standard deviations of the two shares from 1, and of handing over from one copy of each element,
#: each in units of a measured step's.
SPREAD = (14.0, 14.0, 33.0)
#: Bytes of one element that is copied: read and written.
COPIED = 8


def measured_software(
    machine: Machine, precision: str, kernels: Kernels | None, hidden: int
) -> Software:
    """Return the defaults; on a calibrated machine, what its reference steps reached. Without a trace
    passes are priced by the rate of blocks, if their width is known.
    """
    if machine.measured is None or (kernels is None and not hidden):
        return Software()
    dtype = DTYPES[precision]
    traced = kernels is not None and machine.measured.knows_passes(dtype)
    return shares_of(machine.measured, dtype, machine.ranks, traced)


def shares_of(
    calibration: Calibration, dtype: str = "float32", ranks: int = 1, traced: bool = True
) -> Software:
    """Return what a step of the engine reaches of the rates of its parts, by the reference steps.

    Args:
        traced: passes are priced operation by operation, otherwise by the rate of their blocks.
    """
    calibration.check_dtype(dtype)

    def at(a: AtRanks) -> Software:
        steps = [s for s in a.steps if s.dtype == dtype]
        return calibration.once(
            ("shares", a.ranks, dtype, traced),
            lambda: shares(steps, calibrated(calibration, a.ranks), traced),
        )

    return replace(
        Software(),
        step_share=calibration.between(ranks, lambda a: at(a).step_share),
        move_share=calibration.between(ranks, lambda a: at(a).move_share),
        handed_s=calibration.between(ranks, lambda a: at(a).handed_s),
    )


def shares(steps: Sequence[StepPoint], machine: Machine, traced: bool = True) -> Software:
    """Return the figures with which the sum above predicts these steps, all of one dtype, best. It is
    linear in 1 ÷ step_share, handed_s and 1 ÷ move_share; a figure on which the steps have no effect
    (hidden moves) stays where three further rows put it: at 1, 1 and one copy of each element.
    """
    measured = machine.measured
    if not steps or measured is None:
        return Software()
    copy = COPIED / machine.gpu.memory_bandwidth
    rows, sums = [], []
    for step in steps:
        if traced and measured.knows_passes(step.dtype):
            passes = measured.pass_seconds(step.kernels, step.dtype, machine.ranks)
        else:
            rate = measured.block_rate(step.hidden, step.tokens, step.dtype, machine.ranks)
            passes = step.flops / rate
        sent = 0.0
        for move, nbytes in step.wire.items():
            # A ledger counts both moves of an all-reduce in one figure
            both = ("reduce-scatter", "all-gather") if move == "all-reduce" else (move,)
            for part in both if nbytes else ():
                each = nbytes / step.calls[move] / len(both)
                sent += step.calls[move] * measured.seconds_for(part, each, machine.ranks)
        calls = sum(step.calls.values())
        ends = min(1.0, 2 * step.micro_batches / calls) if calls else 0.0
        hidden = min((1 - ends) * sent, (1 - machine.contention) * passes)
        update = measured.optimizer_seconds(step.stepped, machine.ranks)
        rows.append([passes, step.numel * step.micro_batches * copy, sent - hidden])
        sums.append([step.seconds - update, step.seconds])
    a, b = np.array(rows), np.array(sums)
    a, wanted = a / b[:, 1:], b[:, 0] / b[:, 1]
    ridge = np.diag([1 / s for s in SPREAD])
    found = np.linalg.lstsq(
        np.vstack([a, ridge]), np.concatenate([wanted, ridge.sum(0)]), rcond=None
    )[0]
    passes, handed, moved = np.maximum(found, (0.05, 0.0, 0.05))
    return replace(
        Software(), step_share=float(1 / passes), move_share=float(1 / moved), handed_s=float(copy * handed)
    )  # fmt: skip
