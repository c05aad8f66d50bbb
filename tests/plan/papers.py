"""Closed forms of papers that only planner_cases.csv asks for; the others are in
benchmarks/validation/formulas. Plain arithmetic: bytes, elements, FLOP, seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from benchmarks.validation.formulas.states import model_states

from onefold.plan.job import Convention

Streamed = Literal["params", "optimizer", "act_ckpt"]
STREAMED: tuple[Streamed, ...] = ("params", "optimizer", "act_ckpt")
#: What the paper takes a V100 to reach on large matrices; it measured 62 to 78 TFLOP/s (section
#: 4.2).
V100_ACHIEVABLE = 70e12


def infinity_states(layers: int, hidden: int, bytes_per_parameter: float) -> float:
    """Bytes of all model states; 240·nl·hd² at the paper's 20 bytes a parameter (equations 1, 2)."""
    return bytes_per_parameter * 12 * layers * hidden**2


def intensity(
    streamed: str, *, batch: int = 1, seq: int = 1024, hidden: int = 0, interval: int = 1
) -> float:
    """FLOPs done per byte that has to be streamed: s·b for parameters and gradients, s·b/4 for
    optimizer states, 24·hd·ci for activation checkpoints (equations 9, 10 and 11).

    Raises:
        ValueError: something else is streamed.
    """
    if streamed == "params":
        return seq * batch
    if streamed == "optimizer":
        return seq * batch / 4
    if streamed == "act_ckpt":
        return 24 * hidden * interval
    raise ValueError(f"streamed={streamed!r}: expected one of {', '.join(map(repr, STREAMED))}.")


def efficiency(intensity: float, bandwidth: float) -> float:
    """Share of the peak that remains when nothing overlaps: ait·bw/(ait·bw + peak) (equation 6)."""
    return intensity * bandwidth / (intensity * bandwidth + V100_ACHIEVABLE)


def zero3_on_a_gpu(numel: float, largest_layer: float, gpus: int) -> float:
    """Bytes at stage 3: 18 a parameter spread over all GPUs; the largest layer gathered (4 bytes)."""
    return 4 * largest_layer + 18 * numel / gpus


def zero3_on_a_host(numel: float, nodes: int) -> float:
    """Bytes at stage 3 with states and parameters on the hosts: 18 a parameter spread over them, half
    as many again for buffers.
    """
    return 1.5 * 18 * numel / nodes


def zero_elements(layers: int, hidden: int, batch: int, seq: int) -> int:
    """Elements of a GPT-2-like transformer's activations: 12·h·b·s·L (ZeRO section 3.2)."""
    return 12 * hidden * batch * seq * layers


def korthikanti_layer(
    seq: int, batch: int, hidden: int, heads: int, tensor: int = 1, *, selective: bool = False
) -> float:
    """Bytes of one layer's activations in 16 bits with dropout (Korthikanti et al. 2022, Table 2).

    s·b·h·(34 + 5·a·s/h) without recompute, 34·s·b·h under selective recompute, which does not keep
    the scores; tensor parallelism divides 24 of the 34.
    """
    scores = 0.0 if selective else 5 * heads * seq / (hidden * tensor)
    return seq * batch * hidden * (10 + 24 / tensor + scores)


def selective_recompute_saves(seq: int, hidden: int, heads: int) -> float:
    """Share of activations that selective recompute removes (Korthikanti et al., section 5)."""
    full = korthikanti_layer(seq, 1, hidden, heads)
    return 1 - korthikanti_layer(seq, 1, hidden, heads, selective=True) / full


def reduction_factor(convention: Convention, stage: int, ranks: int) -> float:
    """By how much a stage shrinks the states; ZeRO's 4 and 8 hold for many ranks only."""
    return convention.total / model_states(1.0, convention, stage, ranks)


def ranks_to_hold(numel: float, bytes_per_parameter: float, capacity: float) -> float:
    """GPUs (not rounded) whose memory together holds the states, nothing else."""
    return numel * bytes_per_parameter / capacity


def smallest_degree(
    numel: float, convention: Convention, stage: int, capacity: float, degrees: Iterable[int]
) -> int:
    """The smallest data-parallel degree of `degrees` at which the states fit (ZeRO Table 1, bold).

    Raises:
        ValueError: none of them is enough.
    """
    tried = sorted(degrees)
    for ranks in tried:
        if model_states(numel, convention, stage, ranks) <= capacity:
            return ranks
    raise ValueError(
        f"the states of {numel:.3g} parameters do not fit {capacity / 1e9:.0f} GB at stage {stage}"
        f" on any of {tried} ranks: use more ranks, a higher stage, or offload."
    )


def checkpoint_bytes(numel: float) -> float:
    """Bytes to resume from: 16-bit weights, fp32 master, m, v (BigScience tr11-176B README)."""
    return numel * (2 + 12)


def tensor_parallel_elements(batch: int, seq: int, hidden: int, degree: int) -> float:
    """Per layer, micro-batch and GPU: 8bsh(t−1)/t (Narayanan et al. 2021, section 3.2)."""
    return 8 * batch * seq * hidden * (degree - 1) / degree
