"""FLOPs as papers count them, and what follows from them. A convention is part of every name: model FLOPs count no
recompute, hardware FLOPs count it.
"""

from __future__ import annotations

from onefold.plan.formulas import model_flops_per_token, transformer_flops_per_token

__all__ = ["model_flops_per_token", "transformer_flops_per_token"]

#: Hardware FLOPs over model FLOPs under full recompute: four passes' worth instead of three
#: (forward again, backward counts twice).
FULL_RECOMPUTE = 4 / 3
SECONDS_A_DAY = 86_400


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


def selective_recompute_ratio(seq: int, hidden: int) -> float:
    """Hardware over model FLOPs: 1 + s/(6h) (Korthikanti et al. 2022, appendix A)."""
    return 1 + seq / (6 * hidden)


def utilization(flops: float, seconds: float, gpus: int, peak: float) -> float:
    """Share of the GPUs' peak: MFU with model FLOPs, HFU with hardware FLOPs."""
    return flops / (seconds * gpus * peak)


def training_days(tokens: float, numel: float, gpus: int, rate: float) -> float:
    """Days at `rate` hardware FLOP/s a GPU: 8TP/(nX) (Narayanan et al. 2021, section 5.1)."""
    return 8 * tokens * numel / (gpus * rate) / SECONDS_A_DAY


def pipeline_bubble(stages: int, micro_batches: int, interleave: int = 1) -> float:
    """Idle time over ideal time: (p−1)/(m·v) (Narayanan et al. 2021, 2.2.1 and 2.2.2)."""
    return (stages - 1) / (micro_batches * interleave)
