"""Bytes that the forward pass keeps for backward, as papers print them. The tracer
(`onefold.tracing.trace`) is exact.
"""

from __future__ import annotations

from onefold.plan.activity import block_bytes
from onefold.plan.shapes import Transformer


def checkpoint_elements(
    layers: int, hidden: int, batch: int, seq: int, interval: int = 1, model_parallel: int = 1
) -> float:
    """b·s·h·L/ci: a checkpoint every `interval` blocks (ZeRO-Infinity section 3)."""
    return batch * seq * hidden * layers / interval / model_parallel


def logits_bytes(dims: Transformer, micro_batch: int, seq: int, element_bytes: int = 2) -> float:
    """Bytes of the head's output and of its fp32 copy that the loss keeps: s·b·V·(bytes + 4).

    Korthikanti et al. 2022, section 4.2.1 counts the fp32 logits alone (4·s·b·V); autograd keeps
    both where the model computes in 16 bits.
    """
    tokens = micro_batch * seq
    return float(
        tokens * dims.vocab * (element_bytes + 4 if element_bytes < 4 else element_bytes * 2)
    )


def total_bytes(dims: Transformer, micro_batch: int, seq: int) -> float:
    """Bytes of a checkpoint a block and of one block that is recomputed, in 16 bits, with attention that
    keeps its scores and their softmax; logits are left out.
    """
    tokens = micro_batch * seq
    scores = tokens * dims.heads * (4 * seq - 4)
    checkpoints = 2 * checkpoint_elements(dims.layers, dims.hidden, micro_batch, seq)
    return checkpoints + block_bytes(dims, tokens, 2) + scores
