"""What code keeps and has in hand beyond the fused kernels that papers count
(`activations.block_bytes`): transformers' families.

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

from onefold.plan.shapes import Transformer

#: Families whose code is known; "" are fused kernels.
CODES = ("", "gpt2", "llama", "mixtral", "bloom")


def check(code: str) -> None:
    """Raise ValueError for a family whose code is not known."""
    if code not in CODES:
        raise ValueError(f"code={code!r}: expected one of {', '.join(map(repr, CODES))}.")


def kept_beyond(code: str, dims: Transformer, length: int, element_bytes: int) -> int:
    """Bytes a token that a block of this code keeps beyond `block_bytes`, without recompute."""
    check(code)
    h, e = dims.hidden, element_bytes
    if code == "gpt2":
        return 4 * e + 3 * dims.ffn * e + 2 * h
    if code == "bloom":
        return 4 * e + dims.heads * (length * (e + 4 if e < 4 else e) - 4)
    if code not in ("llama", "mixtral"):
        return 4 * e
    own = 8 * h + 8
    if e >= 4:
        head = dims.head_dim or h // dims.heads
        own += 2 * (dims.heads - (dims.kv_heads or dims.heads)) * head * e
    if code == "mixtral":
        own += (dims.active + 1) * h * e + 4 * dims.experts + 40 * dims.active + 4
    return own


def in_hand(
    code: str, dims: Transformer, length: int, element_bytes: int, *, backward: bool
) -> int:
    """Bytes a token beyond what a block keeps, at the highest moment of a pass; gradients of
    parameters are `beside_gradient`'s.
    """
    check(code)
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
    check(code)
    tokens, h, e = micro_batch * length, dims.hidden, element_bytes
    own = 16 * tokens
    if code == "gpt2":
        own += tokens * h
    elif code in ("llama", "mixtral"):
        own += 2 * length * (dims.head_dim or h // dims.heads) * e
    elif code == "bloom":
        own += tokens * (h + length) * e
    return own


def kept_behind(code: str, dims: Transformer, element_bytes: int) -> int:
    """Bytes a token that the last norm, the head and the loss keep, without the logits: inputs,
    labels, a norm's fp32 copy.
    """
    check(code)
    return (
        16
        + 2 * dims.hidden * element_bytes
        + (4 * dims.hidden if code in ("llama", "mixtral") else 0)
    )
