"""Closed forms that a plan uses where there is no code to trace, each with its paper. Further
formulas of the papers are in `benchmarks/validation/formulas`.

Papers count fused kernels (`block_bytes`). The code of transformers' families keeps more, and uses
more while a block runs. In bytes a token of one block, with h hidden, f feed-forward, q and k the
widths of queries and of keys, a active of E experts, n heads, s tokens of a sample and e bytes of
an element (2 or 4); each term is what a trace of that code shows (tests/plan/test_code.py compares
them):

| code    | kept beyond fused kernels                                                 | used while a block runs                       |
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
from functools import cached_property
from typing import Literal

from onefold.plan.shapes import Transformer
from onefold.recipe import PLACEMENTS_OF_STAGE, Placement

STAGES = tuple(PLACEMENTS_OF_STAGE)


@dataclass(frozen=True)
class Convention:
    """Bytes per parameter of each kind of state. `optimizer` is ZeRO's K: it includes fp32 master
    weights.
    """

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def states_by_kind(
    numel: float, convention: Convention, stage: int, ranks: int
) -> dict[str, float]:
    """Return the bytes of each kind of state on one of `ranks` ranks.

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
        kind: numel * nbytes / (ranks if placement is Placement.SHARDED else 1)
        for (kind, nbytes), placement in zip(
            vars(convention).items(), PLACEMENTS_OF_STAGE[stage], strict=True
        )
    }


def model_flops_per_token(numel: float, layers: int = 0, hidden: int = 0, seq: int = 0) -> float:
    """Return the model FLOPs of a token, forward and backward: 6N + 12·L·h·s (Chowdhery et al.
    2022, PaLM, appendix B).

    Without dimensions it is Kaplan et al. 2020's 6N. `hidden` is heads × head_dim. Attention is
    counted in full, not halved for causality.
    """
    return 6 * numel + 12 * layers * hidden * seq


def transformer_flops_per_token(
    active_numel: float, dims: Transformer | None, seq: int = 0
) -> float:
    """Return `model_flops_per_token` of a model with these dimensions, of whose parameters a token
    passes `active_numel`.
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
    """Return the bytes that one block of `dims` keeps for its backward pass. With GPT's dimensions
    and dropout in 16 bits they equal the figure of Korthikanti et al. 2022.

    Elements of a token, with width h, queries q = heads·head_dim, keys k = kv_heads·head_dim and
    the feed-forward f of each active expert:

    - the inputs of two norms, 2h, and of the projections, h;
    - queries, keys and values, q + 2k, and the input of the output projection, q (with latent
      attention also what it compresses);
    - the feed-forward's input, h (each active expert reads a copy), and its hidden values: 2f
      (input and output of the activation), or 4f if gated (gate, up, activated gate, product).

    Dropout adds two masks of one byte. Unfused attention keeps the scores: 5·a·s bytes a token.

    Like the papers, this counts fused kernels. Other code keeps more: in bf16 transformers' Llama
    1.23 times as much (its norms keep an fp32 copy and the normalized values), its GPT-2 1.82 times
    (its GELU is a chain of kernels). Trace the code where there is some.
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
        + 2 * dims.latent  # before and behind its norms
        + (dims.q + dims.k + dims.v)
        + dims.out
        + copies * (h + (4 if dims.gated else 2) * dims.ffn)
        + (h + 4 * dims.shared * dims.ffn if dims.shared else 0)
    )
    per_token = elements * element_bytes + (2 * h if dropout else 0)
    if dims.fused_attention:
        per_token += 4 * dims.heads  # the log-sum-exp of each row, fp32
    elif recompute == "none":
        per_token += (2 * element_bytes + (1 if dropout else 0)) * dims.heads * length
    return float(tokens * per_token)


#: Families whose code is known; "" stands for fused kernels.
CODES = ("", "gpt2", "llama", "mixtral", "bloom")


@dataclass(frozen=True)
class MicroBatchBytes:
    """What one micro-batch keeps and uses, in bytes, by the formulas of this module.

    Attributes:
        element: bytes of an element of the compute dtype.
        code: the family whose code runs, one of `CODES`.

    Raises:
        ValueError: a family whose code is not known.
    """

    dims: Transformer
    micro_batch: int
    seq: int
    element: int
    code: str

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"code={self.code!r}: expected one of {', '.join(map(repr, CODES))}.")

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.seq

    @cached_property
    def whole(self) -> int:
        """What a block keeps for its backward pass without recompute."""
        fused = block_bytes(self.dims, self.micro_batch, self.seq, element_bytes=self.element)
        return int(fused) + self.tokens * self._beyond()

    def _beyond(self) -> int:
        """Bytes a token that a block of this code keeps beyond `block_bytes`."""
        dims, h, e = self.dims, self.dims.hidden, self.element
        if self.code == "gpt2":
            return 4 * e + 3 * dims.ffn * e + 2 * h
        if self.code == "bloom":
            return 4 * e + dims.heads * (self.seq * (e + 4 if e < 4 else e) - 4)
        if self.code == "":
            return 4 * e
        own = 8 * h + 8
        if e >= 4:
            own += 2 * (dims.q - dims.k) * e
        if self.code == "mixtral":
            own += (dims.active + 1) * h * e + 4 * dims.experts + 40 * dims.active + 4
        return own

    def kept(self, whole: bool) -> int:
        """What a block keeps: everything, or only the input from which it is recomputed."""
        return self.whole if whole else self.tokens * self.dims.hidden * self.element

    def in_hand(self, backward: bool = False) -> int:
        """What a block uses beyond what it keeps, at the highest moment of a pass, without
        gradients of parameters.
        """
        dims, h, e = self.dims, self.dims.hidden, self.element
        if self.code == "mixtral":
            each = dims.active * (2 * dims.ffn * e + (8 * h if e < 4 else 0))
            each += h * e if e >= 4 else 0
        elif self.code == "bloom":
            scores = (4 if e < 4 else 3) - backward
            each = max(6 * dims.ffn * e, scores * dims.heads * self.seq * e)
        else:
            each = (dims.ffn * (2 if dims.gated or self.code else 1) + h) * e
        return self.tokens * each

    def beside(self, largest: int) -> int:
        """What a block uses beyond what it keeps, at the highest moment of its backward pass, with
        the gradient of its largest parameter, of `largest` bytes.

        The gradient of a dense parameter arrives close to that moment. The gradient of all experts
        at once (stacked in one tensor) arrives when a part of what they kept has been freed, a·f·e
        a token, and the gradient of their input is there, h·e.
        """
        if self.code != "mixtral":
            return self.in_hand(backward=True) + largest
        freed = (self.dims.hidden - self.dims.active * self.dims.ffn) * self.element
        return max(self.in_hand(backward=True), largest + self.tokens * freed)

    @cached_property
    def before(self) -> int:
        """What is kept before the first block: token ids, labels, and what the embedding leaves.

        GPT-2's dropout leaves a mask, Llama's rotation its angles, BLOOM's first norm its input and
        its attention a mask of all pairs.
        """
        dims, e, own = self.dims, self.element, 16 * self.tokens
        if self.code == "gpt2":
            own += self.tokens * dims.hidden
        elif self.code in ("llama", "mixtral"):
            own += 2 * self.seq * dims.head * e
        elif self.code == "bloom":
            own += self.tokens * (dims.hidden + self.seq) * e
        return own

    @cached_property
    def behind(self) -> int:
        """What the last norm, the head and the loss keep, without the logits: inputs, labels, a
        norm's fp32 copy.
        """
        copy = 4 * self.dims.hidden if self.code in ("llama", "mixtral") else 0
        return self.tokens * (16 + 2 * self.dims.hidden * self.element + copy)

    @property
    def logits(self) -> int:
        """The log-probabilities that the loss keeps, in fp32."""
        return 4 * self.tokens * self.dims.vocab

    @property
    def first_logits(self) -> int:
        """Logits while the loss is computed: in fp32, their log-probabilities, and the model's own
        if they are in 16 bits.
        """
        return self.tokens * self.dims.vocab * (8 + (self.element if self.element < 4 else 0))

    @property
    def shared(self) -> int:
        """The gradient of a tied head, until the embedding adds its own to it."""
        return self.dims.vocab * self.dims.hidden * self.element if self.dims.tied else 0
