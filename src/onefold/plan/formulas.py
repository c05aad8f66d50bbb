"""Closed forms that a plan uses where there is no code to trace, each with its paper. What papers
print beyond them is in `benchmarks/validation/formulas`.

What transformers' families keep and have in hand beyond the fused kernels that papers count
(`block_bytes`):

Bytes a token of one block; h hidden, f feed-forward, q and k the widths of queries and of keys, a
active of E experts, n heads, s tokens of a sample, e bytes of an element (2 or 4). Each term is
what a trace of that code shows (tests/plan/test_code.py holds them against it).

| code    | kept beyond fused kernels                                                 | in hand while a block runs                    |
|---------|---------------------------------------------------------------------------|-----------------------------------------------|
| fused   | statistics of two norms, 4e                                               | (f + h)·e, with a gate (2f + h)·e             |
| gpt2    | as fused; its GELU is a chain of kernels, 3f·e; masks of two dropouts, 2h | (2f + h)·e                                    |
| llama   | fp32 copies and normalized values of two norms, 8h + 8; in 32 bits keys   | (2f + h)·e                                    |
|         | and values repeated for all heads, 2(q − k)·e                             |                                               |
| mixtral | as llama; outputs of the experts, a·h·e; the router's input, h·e, its     | 2a·f·e, and a·h twice in fp32, 8a·h           |
|         | probabilities and indices, 4E + 40a + 4                                   | (in 32 bits h·e instead)                      |
| bloom   | as fused; attention's scores, n·s·(e + 4), in 32 bits n·s·4, and no       | 4n·s·e, in 32 bits 3n·s·e, in backward n·s·e  |
|         | log-sum-exp of their rows, −4n                                            | less; in short samples its GELU, 6f·e         |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onefold.plan.shapes import Transformer

STAGES = (0, 1, 2, 3)
_FIRST_STAGE_THAT_SHARDS = {"optimizer": 1, "gradients": 2, "parameters": 3}


@dataclass(frozen=True)
class Convention:
    """Bytes per parameter of each kind of state; `optimizer` is ZeRO's K (fp32 master weights
    included).
    """

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    def by_kind(self) -> dict[str, float]:
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
        }


def states_by_kind(
    numel: float, convention: Convention, stage: int, ranks: int
) -> dict[str, float]:
    """Bytes of each kind of state on one of `ranks` ranks at a stage.

    | stage | parameters | gradients | optimizer |
    |-------|------------|-----------|-----------|
    | 0     | 1          | 1         | 1         |
    | 1     | 1          | 1         | 1/N       |
    | 2     | 1          | 1/N       | 1/N       |
    | 3     | 1/N        | 1/N       | 1/N       |

    Source: Rajbhandari et al. 2020 (ZeRO), section 5 and Table 1.

    Raises:
        ValueError: an unknown stage, or less than one rank.
    """
    if stage not in STAGES:
        raise ValueError(f"stage={stage!r}: expected 0, 1, 2 or 3.")
    if ranks < 1:
        raise ValueError(f"ranks={ranks!r}: expected 1 or more.")
    return {
        kind: numel * nbytes / (ranks if stage >= _FIRST_STAGE_THAT_SHARDS[kind] else 1)
        for kind, nbytes in convention.by_kind().items()
    }


def model_flops_per_token(numel: float, layers: int = 0, hidden: int = 0, seq: int = 0) -> float:
    """Model FLOPs a token, forward and backward: 6N + 12·L·h·s (Chowdhery et al. 2022, PaLM,
    appendix B).

    Without dimensions it is Kaplan et al. 2020's 6N. `hidden` is heads × head_dim; attention is
    counted in full, not halved for causality.
    """
    return 6 * numel + 12 * layers * hidden * seq


def transformer_flops_per_token(
    active_numel: float, dims: Transformer | None, seq: int = 0
) -> float:
    """`model_flops_per_token` of a model with these dimensions; `active_numel` are the parameters
    that a token passes.
    """
    if dims is None:
        return model_flops_per_token(active_numel)
    return model_flops_per_token(active_numel, dims.layers, dims.q, seq or dims.seq)


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
    copies = dims.active if dims.experts > 1 else 1
    elements = (
        2 * h
        + h
        + (dims.q + 2 * dims.k)
        + dims.q
        + copies * (h + (4 if dims.gated else 2) * dims.ffn)
    )
    per_token = elements * element_bytes + (2 * h if dropout else 0)
    if dims.fused_attention:
        per_token += 4 * dims.heads  # the log-sum-exp of each row, fp32
    elif recompute == "none":
        per_token += (2 * element_bytes + (1 if dropout else 0)) * dims.heads * length
    return float(tokens * per_token)


#: Families whose code is known; "" are fused kernels.
CODES = ("", "gpt2", "llama", "mixtral", "bloom")


def check_code(code: str) -> None:
    """Raise ValueError for a family whose code is not known."""
    if code not in CODES:
        raise ValueError(f"code={code!r}: expected one of {', '.join(map(repr, CODES))}.")


def kept_beyond(code: str, dims: Transformer, length: int, element_bytes: int) -> int:
    """Bytes a token that a block of this code keeps beyond `block_bytes`, without recompute."""
    check_code(code)
    h, e = dims.hidden, element_bytes
    if code == "gpt2":
        return 4 * e + 3 * dims.ffn * e + 2 * h
    if code == "bloom":
        return 4 * e + dims.heads * (length * (e + 4 if e < 4 else e) - 4)
    if code not in ("llama", "mixtral"):
        return 4 * e
    own = 8 * h + 8
    if e >= 4:
        own += 2 * (dims.q - dims.k) * e
    if code == "mixtral":
        own += (dims.active + 1) * h * e + 4 * dims.experts + 40 * dims.active + 4
    return own


def in_hand(
    code: str, dims: Transformer, length: int, element_bytes: int, *, backward: bool
) -> int:
    """Bytes a token beyond what a block keeps, at the highest moment of a pass; gradients of
    parameters are `beside_gradient`'s.
    """
    check_code(code)
    h, e = dims.hidden, element_bytes
    if code == "mixtral":
        return dims.active * (2 * dims.ffn * e + (8 * h if e < 4 else 0)) + (h * e if e >= 4 else 0)
    if code == "bloom":
        scores = (4 if e < 4 else 3) - backward
        return max(6 * dims.ffn * e, scores * dims.heads * length * e)
    return (dims.ffn * (2 if dims.gated or code else 1) + h) * e


def beside_gradient(
    code: str, dims: Transformer, tokens: int, length: int, element_bytes: int, largest: int
) -> int:
    """Bytes beyond what a block keeps at the highest moment of its backward pass, with the gradient
    of its largest parameter.

    The gradient of a dense parameter comes close to that moment. That of all experts at once
    (stacked in one tensor) comes when a part of what was kept inside them has gone, a·f·e a token,
    and the gradient of their input is there, h·e.
    """
    hand = tokens * in_hand(code, dims, length, element_bytes, backward=True)
    if code != "mixtral":
        return hand + largest
    return max(hand, largest + tokens * (dims.hidden - dims.active * dims.ffn) * element_bytes)


def held_before(
    code: str, dims: Transformer, micro_batch: int, length: int, element_bytes: int
) -> int:
    """Bytes of a micro-batch that lie around the blocks from the start: token ids and labels, and
    what the embedding leaves.

    GPT-2's dropout leaves a mask, Llama's rotation its angles, BLOOM's first norm its input and its
    attention a mask of all pairs.
    """
    check_code(code)
    tokens, h, e = micro_batch * length, dims.hidden, element_bytes
    own = 16 * tokens
    if code == "gpt2":
        own += tokens * h
    elif code in ("llama", "mixtral"):
        own += 2 * length * dims.head * e
    elif code == "bloom":
        own += tokens * (h + length) * e
    return own


def kept_behind(code: str, dims: Transformer, element_bytes: int) -> int:
    """Bytes a token that the last norm, the head and the loss keep, without the logits: inputs,
    labels, a norm's fp32 copy.
    """
    check_code(code)
    return (
        16
        + 2 * dims.hidden * element_bytes
        + (4 * dims.hidden if code in ("llama", "mixtral") else 0)
    )
