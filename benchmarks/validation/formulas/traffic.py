"""Bytes that one rank sends in one optimizer step, by scheme.

In Ψ elements of the wire dtype, to be multiplied by (N−1)/N, with m micro-batches a step:

| scheme                                          | m = 1 | m      |
|-------------------------------------------------|-------|--------|
| "ddp", "zero-1": gradients at the boundary      | 2     | 2      |
| "zero-2"                                        | 2     | m + 1  |
| "zero-3"                                        | 3     | 3m     |
| "zero-3 recompute": recompute gathers once more | 4     | 4m     |
| "zero-3 kept": parameters kept for backward     | 2     | m + 1  |
| "ddp every micro-batch"                         | 2     | 2m     |
| "zero-1 every micro-batch"                      | 2     | m + 1  |

Sources: Rajbhandari et al. 2020 (ZeRO), section 7; Zhao et al. 2023 (FSDP), section 3.2;
Rajbhandari et al. 2021 (ZeRO-Infinity), section 4.1 for the fourth pass; the columns for m follow
from when each move is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

_VOLUMES: Mapping[str, Callable[[int], int]] = {
    "ddp": lambda m: 2,
    "ddp every micro-batch": lambda m: 2 * m,
    "zero-1": lambda m: 2,
    "zero-1 every micro-batch": lambda m: m + 1,
    "zero-2": lambda m: m + 1,
    "zero-3": lambda m: 3 * m,
    "zero-3 recompute": lambda m: 4 * m,
    "zero-3 kept": lambda m: m + 1,
}
SCHEMES = tuple(_VOLUMES)


def volume(scheme: str, micro_batches: int = 1) -> int:
    """How many times Ψ elements pass one rank in a step, before the factor (N−1)/N: the table
    above.

    Raises:
        ValueError: an unknown scheme, or less than one micro-batch.
    """
    if scheme not in _VOLUMES:
        raise ValueError(f"scheme {scheme!r}: expected one of {', '.join(map(repr, SCHEMES))}.")
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches!r}: expected 1 or more.")
    return _VOLUMES[scheme](micro_batches)


def wire_bytes(
    numel: float, scheme: str, ranks: int, element_bytes: float = 2, micro_batches: int = 1
) -> float:
    """Bytes that one of `ranks` ranks sends in a step: volume · Ψ · bytes · (N−1)/N."""
    return volume(scheme, micro_batches) * numel * element_bytes * (ranks - 1) / ranks


def between_groups(numel: float, group: int, ranks: int, element_bytes: float = 2) -> float:
    """HSDP and MiCS: bytes a rank sends to the other replicas of its shard, once a step: 2(Ψ/G)(1 −
    G/N).

    An all-reduce of a 1/G shard over N/G groups. FSDP section 3.2.2 prints 2M(W−1)/(GW), which
    counts the own group too. The same holds where the optimizer states are sharded over all ranks
    ("hybrid optimizer sharding"): a reduce-scatter and an all-gather of that shard.

    Raises:
        ValueError: the group does not divide the ranks.
    """
    if group < 1 or ranks % group:
        raise ValueError(f"a group of {group} ranks does not divide {ranks} ranks.")
    return 2 * (numel / group) * (1 - group / ranks) * element_bytes


def zeropp_bytes(
    numel: float,
    micro_batches: int = 1,
    *,
    quantized_weights: bool = True,
    secondary_copy: bool = True,
    quantized_gradients: bool = True,
    element_bytes: float = 2,
) -> dict[str, float]:
    """Bytes by link of ZeRO++: between nodes 0.75Ψ in 16-bit equivalents with all three parts,
    against 3Ψ without.

    Weights travel in 8 bits (half), the backward gather reads a second copy inside the node,
    gradients travel in 4 bits (a quarter).
    Source: Wang et al. 2023 (ZeRO++), section 4; DeepSpeed's ZeRO++ post, table of volumes. (N−1)/N
    is left out, as there.
    """
    forward = 0.5 if quantized_weights else 1.0
    gradients = 0.25 if quantized_gradients else 1.0
    backward = 0.0 if secondary_copy else forward
    # The copy's gather; the first of two hops
    inside = (1.0 if secondary_copy else 0.0) + (0.25 if quantized_gradients else 0.0)
    unit = numel * element_bytes * micro_batches
    return {"inside": inside * unit, "between": (forward + backward + gradients) * unit}


def secondary_copy_bytes(numel: float, node: int, element_bytes: float = 2) -> float:
    """Memory of ZeRO++'s second copy on `node` ranks: 2Ψ/Z bytes a rank (DeepSpeed's tutorial)."""
    return numel * element_bytes / node


def offload_bytes(
    numel: float, ranks: int = 1, micro_batches: int = 1, *, every_micro_batch: bool = False
) -> float:
    """Bytes on one rank's host link in a step of ZeRO-Offload: 16-bit gradients down, 16-bit
    parameters up.

    4Ψ/N if gradients go down at the boundary (Ren et al. 2021, section 3), 2Ψ(1+m)/N if they go
    down every micro-batch.
    """
    return 2 * numel * (1 + (micro_batches if every_micro_batch else 1)) / ranks


def host_streaming_bytes(
    numel: float, ranks: int, micro_batches: int = 1, passes: int = 3
) -> float:
    """Bytes that a rank reads of parameters that rest on the host or NVMe, 16-bit, and writes of
    gradients: 2Ψ(passes + 1)m/N.

    ZeRO-Infinity section 4.1 counts three reads (forward, recompute, backward) and one write of
    gradients.
    """
    return 2 * numel * (passes + 1) * micro_batches / ranks
