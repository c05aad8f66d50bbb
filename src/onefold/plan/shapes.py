"""Models as a plan sees them: parameters by unit, a transformer's dimensions, and the table of
public architectures by name. No tensors.

    >>> architecture("llama-3-70b").numel
    70553706496

Families are named after the modules of transformers (gpt2, llama, mixtral, bloom, deepseek_v3), so that names
and shapes can be compared with the real code. "gpt" is the family of the papers that publish no
code (GPT-3, MT-NLG, the trillion-parameter models): GPT-2's layout.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod

import torch

from onefold.layout import Dtypes
from onefold.recipe import Recipe


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        dtype: the dtype in which it comes, such as "float32".
        trainable: its requires_grad.
        looked_up: it is an embedding's weight, possibly tied to the head. It is never stored
            encoded.
        keeps_dtype: it computes in its own dtype under any precision (runtime/units.py).
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    dtype: str = "float32"
    looked_up: bool = False
    keeps_dtype: bool = False

    def dtypes(self, recipe: Recipe) -> Dtypes:
        return Dtypes.of(self.torch_dtype, self.trainable, recipe, self.keeps_dtype)

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def routed(self) -> bool:
        """Whether it belongs to experts of which a token sees only some."""
        return re.search(r"(^|\.)experts\.", self.name) is not None

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclass(frozen=True)
class UnitShape:
    """One unit: the parameters that are gathered and reduced together. The root comes first and is
    named "(root)".

    `looks_up_only`: its backward pass reads no parameter (an embedding that is a unit), so it is
    gathered once a micro-batch.
    """

    name: str
    parameters: tuple[Parameter, ...]
    looks_up_only: bool = False

    @cached_property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @cached_property
    def trainable(self) -> int:
        """Elements that an optimizer steps."""
        return sum(p.numel for p in self.parameters if p.trainable)


@dataclass(frozen=True)
class Transformer:
    """Dimensions of a decoder, for FLOPs and, where there is no code to trace, for activations.

    Attributes:
        kv_heads: heads of keys and values under grouped-query attention; 0: as many as `heads`.
        experts: 1 for a dense model; `active` of them see each token.
        gated: the feed-forward has three matrices (SwiGLU) instead of two.
        fused_attention: no attention scores are kept.
        q_rank, kv_rank, rope: widths of latent attention (DeepSeek-V2, section 2.1): of compressed
            queries, of compressed keys and values, and of the part of a head that is rotated; 0
            without it. `head_dim` then is the width of a head's queries, the rotated part included.
        value_dim: width of one head's values, if not that of its queries.
        shared: experts that every token passes.
        dense_layers, dense_ffn: the first blocks of a model of experts that have none, and the width
            of their feed-forward.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    experts: int = 1
    active: int = 1
    tied: bool = True
    fused_attention: bool = True
    q_rank: int = 0
    kv_rank: int = 0
    rope: int = 0
    value_dim: int = 0
    shared: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def q(self) -> int:
        """Width of a token's queries."""
        return self.heads * self.head

    @property
    def k(self) -> int:
        """Width of a token's keys."""
        return (self.kv_heads or self.heads) * self.head

    @property
    def v(self) -> int:
        """Width of a token's values."""
        return (self.kv_heads or self.heads) * (self.value_dim or self.head)

    @property
    def out(self) -> int:
        """Width of what attention hands to its output projection."""
        return self.heads * (self.value_dim or self.head)

    @property
    def latent(self) -> int:
        """Width of compressed queries, keys and values, and of the keys' rotated part."""
        return self.q_rank + self.kv_rank + self.rope if self.kv_rank else 0


@dataclass(frozen=True)
class ModelShape:
    """A model as a plan sees it. `active_numel` counts the parameters that one token passes: all,
    except experts that are not chosen.
    """

    name: str
    units: tuple[UnitShape, ...]
    transformer: Transformer | None = None
    active_numel: int = 0

    def __post_init__(self) -> None:
        if not self.active_numel:
            object.__setattr__(self, "active_numel", self.numel)

    @cached_property
    def numel(self) -> int:
        return sum(u.numel for u in self.units)

    @cached_property
    def trainable(self) -> int:
        return sum(u.trainable for u in self.units)

    @classmethod
    def of_size(cls, numel: int, name: str = "") -> ModelShape:
        """Return a model of which only the size is known: equal square blocks, as many as models of
        that size usually have.

        The depth follows from numel = 12·L·h² with L ≈ h/128. Kaplan et al. 2020 observe that the
        ratio of depth to width matters little.
        """
        if numel < 1:
            raise ValueError(
                f"a model of {numel} parameters: expected a positive number, such as 7.5e9."
            )
        depth = min(numel, max(1, round((numel / (12 * 128 * 128)) ** (1 / 3))))
        each, rest = divmod(numel, depth)
        units = [UnitShape("(root)", (Parameter("rest", (rest,)),) if rest else ())]
        units += [
            UnitShape(f"blocks.{i}", (Parameter(f"blocks.{i}.weight", (each,)),))
            for i in range(depth)
        ]
        return cls(name or f"{numel:,} parameters", tuple(units))


#: The names of units that are tiles of a weight.
TILE = re.compile(r"\.tiles\.\d+$")


def blocks_of(units: Sequence[UnitShape]) -> list[UnitShape]:
    """Return the repeated units: the largest family whose names differ only in their numbers."""
    families: dict[str, list[UnitShape]] = {}
    for unit in units:
        if re.search(r"\d", unit.name) and not TILE.search(unit.name):
            families.setdefault(re.sub(r"\d+", "#", unit.name), []).append(unit)
    return max(families.values(), key=len, default=[])


# -- families --------------------------------------------------------------------------------------

Named = tuple[tuple[str, tuple[int, ...]], ...]


# fmt: off
def _gpt(dims: Transformer) -> tuple[Named, Named, Named]:
    h, f = dims.hidden, dims.ffn
    block = (
        ("ln_1.weight", (h,)), ("ln_1.bias", (h,)),
        ("attn.c_attn.weight", (h, 3 * h)), ("attn.c_attn.bias", (3 * h,)),
        ("attn.c_proj.weight", (h, h)), ("attn.c_proj.bias", (h,)),
        ("ln_2.weight", (h,)), ("ln_2.bias", (h,)),
        ("mlp.c_fc.weight", (h, f)), ("mlp.c_fc.bias", (f,)),
        ("mlp.c_proj.weight", (f, h)), ("mlp.c_proj.bias", (h,)),
    )
    first = (("transformer.wte.weight", (dims.vocab, h)), ("transformer.wpe.weight", (dims.seq, h)))
    return first, block, (("transformer.ln_f.weight", (h,)), ("transformer.ln_f.bias", (h,)))


def _llama(dims: Transformer) -> tuple[Named, Named, Named]:
    """Llama and Mixtral. As in transformers 5, two tensors hold all experts of a block."""
    h, f, e = dims.hidden, dims.ffn, dims.experts
    q, k = dims.q, dims.k
    dense: Named = (
        ("mlp.gate_proj.weight", (f, h)), ("mlp.up_proj.weight", (f, h)), ("mlp.down_proj.weight", (h, f)),
    )
    routed: Named = (
        ("mlp.gate.weight", (e, h)), ("mlp.experts.gate_up_proj", (e, 2 * f, h)), ("mlp.experts.down_proj", (e, h, f)),
    )
    block = (
        ("self_attn.q_proj.weight", (q, h)), ("self_attn.k_proj.weight", (k, h)),
        ("self_attn.v_proj.weight", (k, h)), ("self_attn.o_proj.weight", (h, q)),
        *(routed if e > 1 else dense),
        ("input_layernorm.weight", (h,)), ("post_attention_layernorm.weight", (h,)),
    )
    head: Named = () if dims.tied else (("lm_head.weight", (dims.vocab, h)),)
    return (("model.embed_tokens.weight", (dims.vocab, h)),), block, (("model.norm.weight", (h,)), *head)


def _deepseek(dims: Transformer) -> tuple[Named, Named, Named]:
    """DeepSeek-V3: latent attention, and experts of which some are shared."""
    h, f, e = dims.hidden, dims.ffn, dims.experts
    block = (
        *_latent(dims),
        ("mlp.gate.weight", (e, h)), ("mlp.experts.gate_up_proj", (e, 2 * f, h)), ("mlp.experts.down_proj", (e, h, f)),
        *((f"mlp.shared_experts.{n}_proj.weight", (dims.shared * f, h)) for n in ("gate", "up")),
        ("mlp.shared_experts.down_proj.weight", (h, dims.shared * f)),
        ("input_layernorm.weight", (h,)), ("post_attention_layernorm.weight", (h,)),
    )
    last = (("model.norm.weight", (h,)), ("lm_head.weight", (dims.vocab, h)))
    return (("model.embed_tokens.weight", (dims.vocab, h)),), block, last


def _latent(dims: Transformer) -> Named:
    h, heads, rotated = dims.hidden, dims.heads, dims.rope
    return (
        ("self_attn.q_a_proj.weight", (dims.q_rank, h)), ("self_attn.q_a_layernorm.weight", (dims.q_rank,)),
        ("self_attn.q_b_proj.weight", (dims.q, dims.q_rank)),
        ("self_attn.kv_a_proj_with_mqa.weight", (dims.kv_rank + rotated, h)),
        ("self_attn.kv_a_layernorm.weight", (dims.kv_rank,)),
        ("self_attn.kv_b_proj.weight", (heads * (dims.head - rotated + dims.value_dim), dims.kv_rank)),
        ("self_attn.o_proj.weight", (h, dims.out)),
    )


def _deepseek_dense(dims: Transformer) -> Named:
    """A first block, without experts."""
    h, f = dims.hidden, dims.dense_ffn
    return (
        *_latent(dims),
        ("mlp.gate_proj.weight", (f, h)), ("mlp.up_proj.weight", (f, h)), ("mlp.down_proj.weight", (h, f)),
        ("input_layernorm.weight", (h,)), ("post_attention_layernorm.weight", (h,)),
    )


def _bloom(dims: Transformer) -> tuple[Named, Named, Named]:
    h, f = dims.hidden, dims.ffn
    block = (
        ("input_layernorm.weight", (h,)), ("input_layernorm.bias", (h,)),
        ("self_attention.query_key_value.weight", (3 * h, h)), ("self_attention.query_key_value.bias", (3 * h,)),
        ("self_attention.dense.weight", (h, h)), ("self_attention.dense.bias", (h,)),
        ("post_attention_layernorm.weight", (h,)), ("post_attention_layernorm.bias", (h,)),
        ("mlp.dense_h_to_4h.weight", (f, h)), ("mlp.dense_h_to_4h.bias", (f,)),
        ("mlp.dense_4h_to_h.weight", (h, f)), ("mlp.dense_4h_to_h.bias", (h,)),
    )
    first = (
        ("transformer.word_embeddings.weight", (dims.vocab, h)),
        ("transformer.word_embeddings_layernorm.weight", (h,)), ("transformer.word_embeddings_layernorm.bias", (h,)),
    )
    return first, block, (("transformer.ln_f.weight", (h,)), ("transformer.ln_f.bias", (h,)))
# fmt: on


#: family -> (its parameters before, in and after the blocks; the name of the list of blocks)
FAMILIES: Mapping[str, tuple[Callable[[Transformer], tuple[Named, Named, Named]], str]] = {
    "gpt": (_gpt, "transformer.h"),
    "gpt2": (_gpt, "transformer.h"),
    "llama": (_llama, "model.layers"),
    "mixtral": (_llama, "model.layers"),
    "bloom": (_bloom, "transformer.h"),
    "deepseek_v3": (_deepseek, "model.layers"),
}
#: family -> the parameters of its first `dense_layers` blocks
FIRST_BLOCKS: Mapping[str, Callable[[Transformer], Named]] = {"deepseek_v3": _deepseek_dense}


def model_of(name: str, family: str, dims: Transformer) -> ModelShape:
    """Return a family's parameters at these dimensions, by unit: the root first, then the others in
    the order of the modules.

    Units are those of `onefold.runtime.units.find_units`: blocks, and an embedding or head of its
    own that is at least half as large as a block. Tied and small parameters stay in the root.

    Raises:
        ValueError: a family that is not in the table.
    """
    if family not in FAMILIES:
        raise ValueError(f"family {family!r}: expected one of {', '.join(FAMILIES)}.")
    parameters, blocks_at = FAMILIES[family]
    first, block, last = parameters(dims)

    def made(named: Named, prefix: str = "") -> tuple[Parameter, ...]:
        return tuple(
            Parameter(prefix + n, s, looked_up=named is first and len(s) == 2) for n, s in named
        )

    enough = sum(p.numel for p in made(block)) / 2
    tied = {first[0][0]} if dims.tied else set()
    before: list[UnitShape] = []
    after: list[UnitShape] = []
    root: list[Parameter] = []
    for named, own in ((first, before), (last, after)):
        for parameter in made(named):
            module = parameter.name.rsplit(".", 1)[0]
            whole = sum(p.numel for p in made(named) if p.name.rsplit(".", 1)[0] == module)
            if whole >= enough and parameter.name not in tied:
                own.append(UnitShape(module, (parameter,), looks_up_only=named is first))
            else:
                root.append(parameter)
    dense = FIRST_BLOCKS[family](dims) if dims.dense_layers else ()
    blocks = [
        UnitShape(
            f"{blocks_at}.{i}", made(dense if i < dims.dense_layers else block, f"{blocks_at}.{i}.")
        )
        for i in range(dims.layers)
    ]
    # A token passes only the active experts
    counts = (
        (first, 1),
        (dense, dims.dense_layers),
        (block, dims.layers - dims.dense_layers),
        (last, 1),
    )
    active = sum(
        count * (p.numel * (dims.active if p.routed else dims.experts) // dims.experts)
        for named, count in counts
        for p in made(named)
    )
    units = (UnitShape("(root)", tuple(root)), *before, *blocks, *after)
    return ModelShape(name, units, dims, active)


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        published: the number of parameters as its source states it.
        tolerance: relative; how far the sum of the shapes may be from it.
        source: where the dimensions come from.
    """

    name: str
    family: str
    dims: Transformer
    published: float
    tolerance: float
    source: str


_GPT2 = "Radford et al. 2019; openai-community/gpt2*/config.json"
_GPT3 = "Brown et al. 2020, Table 2.1"
_LLAMA1 = "Touvron et al. 2023a, Table 2"
_LLAMA2 = "Touvron et al. 2023b; meta-llama/Llama-2-*/config.json"
_LLAMA3 = "Llama team 2024, Table 3; meta-llama/Llama-3*/config.json"
_MISTRAL = "Jiang et al. 2023 and 2024, Tables 1; mistralai/Mi*tral-*/config.json"
_BLOOM = "BigScience tr11-176B-ml README"
_MEGATRON = "Narayanan et al. 2021, Table 1"
_KORTHIKANTI = "Korthikanti et al. 2022, Table 3"
_INFINITY = "Rajbhandari et al. 2021 (ZeRO-Infinity), Fig. 2a and Table 1"
_DEEPSEEK = "DeepSeek-AI 2024 (DeepSeek-V3), section 4.2; deepseek-ai/DeepSeek-V3/config.json"


def _dense(layers: int, hidden: int, heads: int, vocab: int, seq: int) -> Transformer:
    return Transformer(layers, hidden, heads, 4 * hidden, vocab, seq)


def _gated(
    layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, seq: int, tied: int = 0
) -> Transformer:
    return Transformer(layers, hidden, heads, ffn, vocab, seq, kv, gated=True, tied=bool(tied))


def _experts(layers: int, hidden: int, heads: int, ffn: int, vocab: int, seq: int) -> Transformer:
    dense = _gated(layers, hidden, heads, 8, ffn, vocab, seq)
    return replace(dense, experts=8, active=2)


_DEEPSEEK_V3 = Transformer(
    61, 7168, 128, 2048, 129_280, 4096, head_dim=192, gated=True, experts=256, active=8, tied=False,
    q_rank=1536, kv_rank=512, rope=64, value_dim=128, shared=1, dense_layers=3, dense_ffn=18_432,
)  # fmt: skip


# Two rows of GPT-3's Table 2.1 contradict themselves: 13B (5140 = 40 × 128.5) and 1.3B (24 heads of
# 128 make 3072, not 2048). Here they have 5120 and 16 heads. ZeRO-Infinity states no heads for 5T
# and 20T.
# fmt: off
_TABLE: tuple[tuple[str, str, Transformer, float, float, str], ...] = (
    ("gpt2", "gpt2", _dense(12, 768, 12, 50_257, 1024), 124.44e6, 1e-4, _GPT2),
    ("gpt2-medium", "gpt2", _dense(24, 1024, 16, 50_257, 1024), 354.82e6, 1e-4, _GPT2),
    ("gpt2-large", "gpt2", _dense(36, 1280, 20, 50_257, 1024), 774.03e6, 1e-4, _GPT2),
    ("gpt2-xl", "gpt2", _dense(48, 1600, 25, 50_257, 1024), 1557.6e6, 1e-4, _GPT2),
    ("gpt3-125m", "gpt", _dense(12, 768, 12, 50_257, 2048), 125e6, 0.01, _GPT3),
    ("gpt3-350m", "gpt", _dense(24, 1024, 16, 50_257, 2048), 350e6, 0.02, _GPT3),
    ("gpt3-760m", "gpt", _dense(24, 1536, 16, 50_257, 2048), 760e6, 0.01, _GPT3),
    ("gpt3-1.3b", "gpt", _dense(24, 2048, 16, 50_257, 2048), 1.3e9, 0.02, _GPT3),
    ("gpt3-2.7b", "gpt", _dense(32, 2560, 32, 50_257, 2048), 2.7e9, 0.02, _GPT3),
    ("gpt3-6.7b", "gpt", _dense(32, 4096, 32, 50_257, 2048), 6.7e9, 0.01, _GPT3),
    ("gpt3-13b", "gpt", _dense(40, 5120, 40, 50_257, 2048), 13e9, 0.02, _GPT3),
    ("gpt3-175b", "gpt", _dense(96, 12_288, 96, 50_257, 2048), 175e9, 0.005, _GPT3),
    ("llama-65b", "llama", _gated(80, 8192, 64, 64, 22_016, 32_000, 2048), 65.2e9, 2e-3, _LLAMA1),
    ("llama-2-7b", "llama", _gated(32, 4096, 32, 32, 11_008, 32_000, 4096), 6.738e9, 1e-3, _LLAMA2),
    ("llama-2-13b", "llama", _gated(40, 5120, 40, 40, 13_824, 32_000, 4096), 13.016e9, 1e-3, _LLAMA2),
    ("llama-2-70b", "llama", _gated(80, 8192, 64, 8, 28_672, 32_000, 4096), 68.977e9, 1e-3, _LLAMA2),
    ("llama-3-8b", "llama", _gated(32, 4096, 32, 8, 14_336, 128_256, 8192), 8.03e9, 1e-3, _LLAMA3),
    ("llama-3-70b", "llama", _gated(80, 8192, 64, 8, 28_672, 128_256, 8192), 70.55e9, 1e-3, _LLAMA3),
    ("llama-3-405b", "llama", _gated(126, 16_384, 128, 8, 53_248, 128_256, 8192), 405.85e9, 1e-3, _LLAMA3),
    ("llama-3.2-1b", "llama", _gated(16, 2048, 32, 8, 8192, 128_256, 131_072, 1), 1.236e9, 1e-3, _LLAMA3),
    ("llama-3.2-3b", "llama", _gated(28, 3072, 24, 8, 8192, 128_256, 131_072, 1), 3.213e9, 1e-3, _LLAMA3),
    ("mistral-7b", "llama", _gated(32, 4096, 32, 8, 14_336, 32_000, 8192), 7.242e9, 1e-3, _MISTRAL),
    ("mixtral-8x7b", "mixtral", _experts(32, 4096, 32, 14_336, 32_000, 32_768), 46.7e9, 1e-3, _MISTRAL),
    ("mixtral-8x22b", "mixtral", _experts(56, 6144, 48, 16_384, 32_000, 65_536), 140.6e9, 1e-3, _MISTRAL),
    ("deepseek-v3", "deepseek_v3", _DEEPSEEK_V3, 671e9, 1e-3, _DEEPSEEK),
    ("bloom-176b", "bloom", _dense(70, 14_336, 112, 250_880, 2048), 176.247e9, 1e-4, _BLOOM),
    ("megatron-1.7b", "gpt", _dense(24, 2304, 24, 51_200, 2048), 1.7e9, 0.035, _MEGATRON),
    ("megatron-22b", "gpt", _dense(48, 6144, 64, 51_200, 2048), 22e9, 0.02, _KORTHIKANTI),
    ("megatron-145b", "gpt", _dense(80, 12_288, 96, 51_200, 2048), 145.6e9, 1e-3, _MEGATRON),
    ("mt-nlg-530b", "gpt", _dense(105, 20_480, 128, 51_200, 2048), 529.6e9, 1e-3, _MEGATRON),
    ("1t", "gpt", _dense(128, 25_600, 160, 51_200, 2048), 1008.0e9, 1e-3, _MEGATRON),
    ("5t", "gpt", _dense(174, 49_152, 256, 51_200, 1024), 5.0e12, 0.02, _INFINITY),
    ("10t", "gpt", _dense(195, 65_536, 512, 51_200, 1024), 10.05e12, 0.005, _INFINITY),
    ("20t", "gpt", _dense(205, 90_112, 512, 51_200, 1024), 20e12, 0.01, _INFINITY),
    ("100t", "gpt", _dense(315, 163_840, 1024, 51_200, 1024), 101.47e12, 0.005, _INFINITY),
)
# fmt: on
#: Every architecture by name.
ARCHITECTURES: Mapping[str, Architecture] = {row[0]: Architecture(*row) for row in _TABLE}
#: Other spellings.
ALIASES: Mapping[str, str] = {
    "gpt2-small": "gpt2",
    "gpt2-124m": "gpt2",
    "gpt2-355m": "gpt2-medium",
    "gpt2-774m": "gpt2-large",
    "gpt2-1.5b": "gpt2-xl",
    "gpt3": "gpt3-175b",
    "llama-3.1-8b": "llama-3-8b",
    "llama-3.1-70b": "llama-3-70b",
    "llama-3.1-405b": "llama-3-405b",
    "bloom": "bloom-176b",
    "mt-nlg": "mt-nlg-530b",
    "deepseek-v3-671b": "deepseek-v3",
    "deepseek-r1": "deepseek-v3",
}


def _plain(name: str) -> str:
    """Return a name without organization, case and suffixes: "meta-llama/Llama-2-7b-hf" becomes
    "llama-2-7b".
    """
    plain = name.strip().lower().replace("_", "-").rsplit("/", 1)[-1]
    for part in ("meta-", "-hf", "-v0.1"):
        plain = plain.removeprefix(part).removesuffix(part)
    return ALIASES.get(plain, plain)


def known(name: str) -> bool:
    """Return whether the table has this architecture."""
    return _plain(name) in ARCHITECTURES


def find(name: str) -> Architecture:
    """Return a row of the table by its name or another spelling. Raises ValueError: no such name,
    with the nearest ones.
    """
    plain = _plain(name)
    if plain not in ARCHITECTURES:
        near = difflib.get_close_matches(plain, [*ARCHITECTURES, *ALIASES], 3, 0.5)
        hint = (
            f"Did you mean {' or '.join(map(repr, near))}?"
            if near
            else f"Known: {', '.join(ARCHITECTURES)}."
        )
        raise ValueError(f"no architecture is called {name!r}. {hint}")
    return ARCHITECTURES[plain]


@cache
def architecture(name: str) -> ModelShape:
    """Return a public architecture as a plan sees it. Raises ValueError: no such name, with the
    nearest ones.
    """
    row = find(name)
    return model_of(row.name, row.family, row.dims)
