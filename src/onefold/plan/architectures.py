"""Public architectures by name.

    >>> architecture("llama-3-70b").numel
    70553706496

Families are named like the modules of transformers (gpt2, llama, mixtral, bloom), so that names and
shapes can be compared with the real code. "gpt" is the family of the papers that publish no code
(GPT-3, MT-NLG, the trillion-parameter models): GPT-2's layout.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from onefold.plan.shapes import ModelShape, Parameter, Transformer, UnitShape

Named = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        published: the parameters as its source states them; tolerance: relative, how far the sum of
            the shapes may lie from it.
        source: where the dimensions come from.
    """

    name: str
    family: str
    dims: Transformer
    published: float
    tolerance: float
    source: str


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
    """Mixtral too, as transformers 5 has it: the experts of a block in two tensors."""
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
}


def model_of(name: str, family: str, dims: Transformer) -> ModelShape:
    """The parameters of a family at these dimensions, by unit: the root first, then in the order of
    the modules.

    The cut is `onefold.runtime.units.find_units`'s: blocks, and an embedding or head of its own as
    large as half a block; what is tied or small stays in the root.

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
    blocks = [
        UnitShape(f"{blocks_at}.{i}", made(block, f"{blocks_at}.{i}.")) for i in range(dims.layers)
    ]
    return ModelShape(
        name,
        (UnitShape("(root)", tuple(root)), *before, *blocks, *after),
        dims,
        _active(dims, block, first, last),
    )


def _active(dims: Transformer, block: Named, first: Named, last: Named) -> int:
    """Parameters that one token passes: of the experts only the active ones."""

    def size(named: Named) -> int:
        return sum(
            Parameter(n, shape).numel
            * (dims.active if ".experts." in n else dims.experts)
            // dims.experts
            for n, shape in named
        )

    return size(first) + dims.layers * size(block) + size(last)


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


def _dense(layers: int, hidden: int, heads: int, vocab: int, seq: int) -> Transformer:
    return Transformer(layers, hidden, heads, 4 * hidden, vocab, seq)


def _gated(
    layers: int,
    hidden: int,
    heads: int,
    kv: int,
    ffn: int,
    vocab: int,
    seq: int,
    tied: bool = False,
) -> Transformer:
    return Transformer(layers, hidden, heads, ffn, vocab, seq, kv, gated=True, tied=tied)


def _experts(layers: int, hidden: int, heads: int, ffn: int, vocab: int, seq: int) -> Transformer:
    dense = _gated(layers, hidden, heads, 8, ffn, vocab, seq)
    return replace(dense, experts=8, active=2)


# GPT-3: two rows of its Table 2.1 do not fit themselves (13B: 5140 = 40 × 128.5; 1.3B: 24 heads of
# 128 make 3072, not 2048); here 5120 and 16 heads. ZeRO-Infinity states no heads for 5T and 20T.
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
    ("llama-3.2-1b", "llama", _gated(16, 2048, 32, 8, 8192, 128_256, 131_072, True), 1.236e9, 1e-3, _LLAMA3),
    ("llama-3.2-3b", "llama", _gated(28, 3072, 24, 8, 8192, 128_256, 131_072, True), 3.213e9, 1e-3, _LLAMA3),
    ("mistral-7b", "llama", _gated(32, 4096, 32, 8, 14_336, 32_000, 8192), 7.242e9, 1e-3, _MISTRAL),
    ("mixtral-8x7b", "mixtral", _experts(32, 4096, 32, 14_336, 32_000, 32_768), 46.7e9, 1e-3, _MISTRAL),
    ("mixtral-8x22b", "mixtral", _experts(56, 6144, 48, 16_384, 32_000, 65_536), 140.6e9, 1e-3, _MISTRAL),
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
}


def _plain(name: str) -> str:
    """A name without organization, case and suffixes: "meta-llama/Llama-2-7b-hf" is
    "llama-2-7b".
    """
    plain = name.strip().lower().replace("_", "-").rsplit("/", 1)[-1]
    for part in ("meta-", "-hf", "-v0.1"):
        plain = plain.removeprefix(part).removesuffix(part)
    return ALIASES.get(plain, plain)


def known(name: str) -> bool:
    """Whether the table has it."""
    return _plain(name) in ARCHITECTURES


def find(name: str) -> Architecture:
    """A row of the table by its name or another spelling.

    Raises:
        ValueError: no such name, with the nearest ones.
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
    """A public architecture as a plan sees it.

    Raises:
        ValueError: no such name, with the nearest ones.
    """
    row = find(name)
    return model_of(row.name, row.family, row.dims)
