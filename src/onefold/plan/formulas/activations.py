"""Bytes that the forward pass keeps for backward, from dimensions alone: for models without code to
trace.

`s` tokens, `b` sequences of a micro-batch, `h` width, `a` heads, `t` tensor-parallel ranks. The
tracer (`onefold.plan.trace`) is exact; these are what the papers print, and one generalization to
grouped-query attention, gated feed-forward and experts (`block_bytes`).
"""

from __future__ import annotations

from typing import Literal

from onefold.plan.shapes import Transformer

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


def _check(recompute: str) -> None:
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute!r}: expected 'none', 'selective' or 'full'.")


def zero_elements(layers: int, hidden: int, batch: int, seq: int) -> int:
    """Elements of all activations of a GPT-2-like transformer without recompute: about 12·h·b·s·L
    (ZeRO section 3.2).
    """
    return 12 * hidden * batch * seq * layers


def checkpoint_elements(
    layers: int, hidden: int, batch: int, seq: int, interval: int = 1, model_parallel: int = 1
) -> float:
    """Elements of checkpoints, one every `interval` blocks: b·s·h·L/ci (ZeRO-Infinity section 3);
    split over MP under ZeRO's Pa.
    """
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
    _check(recompute)
    sbh = seq * batch * hidden
    if recompute == "full":
        return 2 * sbh
    dense = 34 / tensor if sequence_parallel else 10 + 24 / tensor
    scores = (
        0.0 if recompute == "selective" or fused_attention else 5 * heads * seq / (hidden * tensor)
    )
    return sbh * (dense + scores)


def selective_recompute_saves(seq: int, hidden: int, heads: int) -> float:
    """Share of a layer's activations that selective recompute removes (Korthikanti et al. 2022,
    section 5).
    """
    full = korthikanti_layer(seq, 1, hidden, heads)
    return 1 - korthikanti_layer(seq, 1, hidden, heads, recompute="selective") / full


def block_bytes(
    dims: Transformer,
    micro_batch: int,
    seq: int = 0,
    *,
    element_bytes: int = 2,
    recompute: Recompute = "none",
    dropout: bool = False,
) -> float:
    """Bytes that one block of `dims` keeps. With GPT's dimensions and dropout in 16 bits it equals
    `korthikanti_layer`.

    Per token, in elements of width h, queries q = heads·head_dim, keys k = kv_heads·head_dim,
    feed-forward f of each active expert: two norm inputs 2h, the input of the projections h, q, k
    and v: q + 2k, the input of the output projection q, the feed-forward's input h (each active
    expert reads a copy), its hidden values 2f (input and output of the activation) or 4f where
    gated (gate, up, activated gate, product). Dropout adds two masks of one byte. Unfused attention
    keeps the scores: 5·a·s bytes a token.

    It counts kernels that are fused, as the papers do. Code that is not keeps more: transformers'
    Llama 1.23 times as much in bf16 (its norms keep an fp32 copy and the normalized values), its
    GPT-2 1.82 times (its GELU is a chain of kernels). Trace where there is code.
    """
    _check(recompute)
    length = seq or dims.seq
    tokens = micro_batch * length
    h = dims.hidden
    if recompute == "full":
        return float(tokens * h * element_bytes)
    head_dim = dims.head_dim or h // dims.heads
    q, k = dims.heads * head_dim, (dims.kv_heads or dims.heads) * head_dim
    copies = dims.active if dims.experts > 1 else 1
    elements = 2 * h + h + (q + 2 * k) + q + copies * (h + (4 if dims.gated else 2) * dims.ffn)
    per_token = elements * element_bytes + (2 * h if dropout else 0)
    if dims.fused_attention:
        per_token += 4 * dims.heads  # the log-sum-exp of each row, fp32
    elif recompute == "none":
        per_token += (2 * element_bytes + (1 if dropout else 0)) * dims.heads * length
    return float(tokens * per_token)


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


def embedding_and_head(
    seq: int, batch: int, hidden: int, vocab: int, pipeline: int = 1, tensor: int = 1
) -> float:
    """Bytes outside the blocks: s·b·h·p/t of dropout, and 4·s·b·h(1 + V/h)/t without a pipeline
    (Korthikanti et al. 2022, 4.3).
    """
    sbh = seq * batch * hidden
    return sbh * pipeline / tensor + (
        4 * sbh * (1 + vocab / hidden) / tensor if pipeline == 1 else 0.0
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
    """Bytes of activations without the logits: every block, and under full recompute one block's
    worth that is being computed again.
    """
    layer = block_bytes(
        dims, micro_batch, seq, element_bytes=element_bytes, recompute=recompute, dropout=dropout
    )
    again = (
        block_bytes(dims, micro_batch, seq, element_bytes=element_bytes, dropout=dropout)
        if recompute == "full"
        else 0.0
    )
    return dims.layers * layer + again
