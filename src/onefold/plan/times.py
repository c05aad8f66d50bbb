"""Seconds of a program on a machine: each operation has a price, and begins when its lane, its links
and the operations that it waits for are free.

    compute   │██ pass ████│░░ wait ░░│██ pass ███████│▓ kernels ▓│ update │
    gathers       │▒▒▒ g1 ▒▒▒▒▒▒▒▒▒▒▒▒│▒▒▒ g2 ▒▒▒│                              what is hidden follows from the order of issue
    link          │▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▒▒▒▒▒▒▒▒▒▒│                              two moves on one link run one after the other
    up, down, disk, host                                                        the tiers of offloaded state

| operation     | seconds                                                                                               |
|---------------|-------------------------------------------------------------------------------------------------------|
| pass          | FLOPs ÷ (rate of large products × kernel_share) × the wait for the slowest of N ranks                  |
| kernel, code, | bytes ÷ memory bandwidth, of which encoding and adding up reach a share                               |
| sum           |                                                                                                       |
| move          | the slower of its two links, + messages × hops × hop_seconds: a ring takes N−1 hops, one after another; |
|               | messages to all at once (an all-to-all) take one                                                      |
| copy, disk    | bytes ÷ rate of the host link, or of this rank's share of the disk                                    |
| update        | bytes ÷ memory bandwidth; if it has matrix products (Muon), also their FLOPs ÷ rate of large products  |

Gathers are rings on NCCL, and enter each node once: the node's adapters together carry them. They are
pairwise on gloo. Reductions are pairwise, and rings if NCCL adds (reduce="native"). NCCL may also use
a tree, which has fewer hops, or add inside the switch: no reduction is counted as faster than a ring.

If the device is a CPU, the computing cores make copies and moves: each hidden second of a move costs
computing `contention` seconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

from onefold.plan.hardware import Machine
from onefold.plan.program import COMPUTE, DISK, HOST, Op, Program
from onefold.plan.schema import IN_LAYERS

#: The share of a copy's speed that encoding and decoding reach, and adding up: on a GPU as measured on
#: one H200 (benchmarks/results/gpu_2.md: 0.02 to 0.1, and 0.16 for parts in 16 bits), on a CPU what the
#: plain operations reach (docs/decisions.md, Codecs).
CODING_ON_A_GPU, CODING_ON_A_CPU = 0.05, 0.3
SUMMING_ON_A_GPU = 0.16


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


def price(
    op: Op, m: Machine, passes: Mapping[tuple[str, str], float]
) -> tuple[float, dict[str, float]]:
    """Return (seconds of an operation on one rank, the seconds for which it takes each link).

    Args:
        passes: {(phase, unit): seconds of the model's computing in one micro-batch}.
    """
    rate = m.gpu.memory_bandwidth
    if op.kind == "pass":
        return passes.get((op.phase, op.unit), 0.0), {}
    if op.kind in ("move", "layer"):
        return _move(op, m)
    if op.kind == "code":
        rate *= CODING_ON_A_CPU if m.shared else CODING_ON_A_GPU
    elif op.kind == "sum":
        rate *= SUMMING_ON_A_GPU
    elif op.kind == "copy" and m.shared:  # what goes down stays in memory
        rate = rate / 2 if op.move == "up" else math.inf
    elif op.kind == "copy":
        rate = m.host_link()
    elif op.kind == "disk":
        reads = op.move == "read" or not m.host.nvme_write
        rate = (m.host.nvme_bandwidth if reads else m.host.nvme_write) / m.local
    elif op.lane == HOST and not m.shared:
        rate = m.host.memory_bandwidth / m.local
    products = op.flops / m.matrix_rate("bf16") if op.flops else 0.0
    return products + op.nbytes / rate, {}


def _move(op: Op, m: Machine) -> tuple[float, dict[str, float]]:
    soft = m.software
    if len(op.over) <= 1 or not op.nbytes:
        return 0.0, {}
    far = between(op, m)
    links = {"inside": (op.nbytes - far) / (m.gpu.link * soft.link_share)}
    if m.between:
        links["between"] = far * m.local / (m.between.bandwidth * soft.link_share)
    hops = (len(op.over) - 1 if op.ring else 1) * op.calls * soft.hop_seconds
    return max(links.values()) + hops, {name: s for name, s in links.items() if s}


# -- a step ----------------------------------------------------------------------------------------


def step_seconds(
    program: Program, machine: Machine, passes: Mapping[tuple[str, str], float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return (seconds of a step by its parts, seconds in which tiers are busy). The lane of compute
    computes or waits: what it waits for tells the part. `passes`: see `price`.
    """
    ops = program.ops
    lane, link, parts, busy = (defaultdict[str, float](float) for _ in range(4))
    for op, times in program.counted():  # each begins and ends, in the order of issue
        seconds, taken = price(op, machine, passes)
        free, waits = lane[op.lane], [ops[i] for i in op.after]
        op.begin = max([free, *(o.end for o in waits), *(link[name] for name in taken)])
        op.end = lane[op.lane] = op.begin + seconds
        for name, busy_for in taken.items():
            link[name] = op.begin + busy_for
        busy[op.kind if op.kind == "move" else op.lane] += times * seconds
        if op.lane != COMPUTE:
            continue
        if op.kind == "copy":
            busy[op.move] += times * seconds
        if op.begin > free:
            cause = max(waits, key=lambda o: o.end, default=op)
            tier = cause.kind in ("copy", "disk") or cause.lane == HOST
            parts["io" if tier else "exposed communication"] += times * (op.begin - free)
        part = {"update": "optimizer", "copy": "io"}.get(op.kind)
        parts[part or IN_LAYERS.get(op.move, "compute")] += times * seconds
    free = lane[COMPUTE]
    # The host's update and the disk may end behind what the device computes
    late = [op for op in ops if op.lane in (HOST, DISK) and op.end > free]
    behind = max((op.end - free for op in late), default=0.0)
    stepping = min(behind, sum(op.end - op.begin for op in late if op.lane == HOST))
    parts["optimizer"] += stepping
    parts["io"] += behind - stepping
    hidden = max(0.0, busy["move"] - parts["exposed communication"])
    parts["exposed communication"] += machine.contention * hidden
    tiers = {"link": max(busy["up"], busy["down"]), "disk": busy[DISK], "host update": busy[HOST]}
    return dict(parts), {name: n for name, n in tiers.items() if n}
