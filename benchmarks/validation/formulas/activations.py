"""Bytes that the forward pass keeps for backward, as papers print them.

`s` tokens, `b` sequences of a micro-batch, `h` width, `a` heads, `t` tensor-parallel ranks. The
tracer (`onefold.tracing.trace`) is exact.
"""

from __future__ import annotations

from onefold.plan.formulas import Recompute, block_bytes, check_recompute
from onefold.plan.shapes import Transformer


def zero_elements(layers: int, hidden: int, batch: int, seq: int) -> int:
    """Elements of a GPT-2-like transformer's activations: 12·h·b·s·L (ZeRO section 3.2)."""
    return 12 * hidden * batch * seq * layers


def checkpoint_elements(
    layers: int, hidden: int, batch: int, seq: int, interval: int = 1, model_parallel: int = 1
) -> float:
    """b·s·h·L/ci: a checkpoint every `interval` blocks (ZeRO-Infinity section 3)."""
    return batch * seq * hidden * layers / interval / model_parallel


def korthikanti_layer(
    seq: int,
    batch: int,
    hidden: int,
    heads: int,
    tensor: int = 1,
    *,
    recompute: Recompute = "none",
    sequence_parallel: bool = False,
    fused_attention: bool = False,
) -> float:
    """Bytes of one layer's activations in 16 bits with dropout (Korthikanti et al. 2022, Table 2).

    s·b·h·(34 + 5·a·s/h) without recompute, 34·s·b·h under selective recompute or fused attention
    (neither keeps the scores), 2·s·b·h under full recompute; tensor parallelism divides 24 of the
    34, sequence parallelism all of them.
    """
    check_recompute(recompute)
    sbh = seq * batch * hidden
    if recompute == "full":
        return 2 * sbh
    dense = 34 / tensor if sequence_parallel else 10 + 24 / tensor
    scores = (
        0.0 if recompute == "selective" or fused_attention else 5 * heads * seq / (hidden * tensor)
    )
    return sbh * (dense + scores)


def selective_recompute_saves(seq: int, hidden: int, heads: int) -> float:
    """Share of activations that selective recompute removes (Korthikanti et al., section 5)."""
    full = korthikanti_layer(seq, 1, hidden, heads)
    return 1 - korthikanti_layer(seq, 1, hidden, heads, recompute="selective") / full


def logits_bytes(
    dims: Transformer, micro_batch: int, seq: int = 0, element_bytes: int = 2
) -> float:
    """Bytes of the head's output and of its fp32 copy that the loss keeps: s·b·V·(bytes + 4).

    Korthikanti et al. 2022, section 4.2.1 counts the fp32 logits alone (4·s·b·V); autograd keeps
    both where the model computes in 16 bits.
    """
    tokens = micro_batch * (seq or dims.seq)
    return float(
        tokens * dims.vocab * (element_bytes + 4 if element_bytes < 4 else element_bytes * 2)
    )


def total_bytes(
    dims: Transformer,
    micro_batch: int,
    seq: int = 0,
    *,
    element_bytes: int = 2,
    recompute: Recompute = "none",
    dropout: bool = False,
) -> float:
    """Bytes of every block and, under full recompute, of one more; logits are left out."""
    layer = block_bytes(
        dims, micro_batch, seq, element_bytes=element_bytes, recompute=recompute, dropout=dropout
    )
    again = (
        block_bytes(dims, micro_batch, seq, element_bytes=element_bytes, dropout=dropout)
        if recompute == "full"
        else 0.0
    )
    return dims.layers * layer + again
