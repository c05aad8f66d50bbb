"""What ZeRO-Infinity asks of slow memory (Rajbhandari et al. 2021, sections 3 and 4): intensity,
efficiency, working memory.

Bandwidths are bytes/s of one GPU, the peak is FLOP/s of one GPU. The paper prints "TB" and "GB" and
means TiB and GiB.
"""

from __future__ import annotations

from typing import Literal

Streamed = Literal["params", "optimizer", "act_ckpt"]
STREAMED: tuple[Streamed, ...] = ("params", "optimizer", "act_ckpt")
#: What the paper takes a V100 to reach on large matrices; it measured 62 to 78 TFLOP/s (section
#: 4.2).
V100_ACHIEVABLE = 70e12


def parameters(layers: int, hidden: int) -> int:
    """Parameters of the blocks alone: 12·nl·hd² (equation 1)."""
    return 12 * layers * hidden**2


def model_states(layers: int, hidden: int, bytes_per_parameter: float = 20) -> float:
    """Bytes of all model states; 240·nl·hd² at the paper's 20 bytes a parameter (equation 2)."""
    return bytes_per_parameter * parameters(layers, hidden)


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


def efficiency(intensity: float, bandwidth: float, peak: float = V100_ACHIEVABLE) -> float:
    """Share of the peak that remains when nothing overlaps: ait·bw/(ait·bw + peak) (equation 6)."""
    return intensity * bandwidth / (intensity * bandwidth + peak)
