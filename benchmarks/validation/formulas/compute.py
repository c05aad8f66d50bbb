"""FLOPs as papers count them, and what follows from them. A convention is part of every name: model FLOPs count no
recompute, hardware FLOPs count it.
"""

from __future__ import annotations


def megatron_parameters(layers: int, hidden: int, vocab: int = 51_200, seq: int = 2048) -> float:
    """Of a GPT: 12lh²(1 + 13/(12h) + (V+s)/(12lh)) (Narayanan et al. 2021, section 5.1)."""
    return (
        12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + seq) / (12 * layers * hidden))
    )


def megatron_flops(
    batch: int, seq: int, layers: int, hidden: int, vocab: int = 51_200, *, recompute: bool = True
) -> float:
    """FLOPs of an iteration over `batch` sequences: 96·B·s·l·h²(1 + s/(6h) + V/(16lh)) with full
    recompute, as hardware FLOPs.

    Narayanan et al. 2021, section 5.1. Without recompute 72·B·s·l·h²(1 + s/(6h) + V/(12lh)), which
    are model FLOPs (Korthikanti et al. 2022, appendix A): the head is not computed again, hence the
    other divisor.
    """
    passes, head = (96, 16) if recompute else (72, 12)
    return (
        passes
        * batch
        * seq
        * layers
        * hidden**2
        * (1 + seq / (6 * hidden) + vocab / (head * layers * hidden))
    )


def infinity_flops(numel: float, batch: int, seq: int) -> float:
    """Hardware FLOPs with full recompute, blocks alone: 8·b·s·Ψ (ZeRO-Infinity 4.1)."""
    return 8 * batch * seq * numel
