"""Bytes that the forward pass keeps for backward, from dimensions alone: for models without code to
trace.

The tracer (`onefold.plan.trace`) is exact; this is what Korthikanti et al. 2022 (Table 2) print,
generalized to grouped-query attention, gated feed-forward and experts.
"""

from __future__ import annotations

from typing import Literal

from onefold.plan.shapes import Transformer

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


def check_recompute(recompute: str) -> None:
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute!r}: expected 'none', 'selective' or 'full'.")


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
    their figure.

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
    check_recompute(recompute)
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
