"""The table of public architectures: published sizes, and the very parameters of transformers'
modules.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch

from onefold.plan import shapes
from onefold.plan.shapes import ARCHITECTURES, Transformer, architecture

with_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_has_the_published_number_of_parameters(name: str) -> None:
    row, model = ARCHITECTURES[name], architecture(name)
    off = model.numel / row.published - 1
    assert abs(off) <= row.tolerance, (
        f"{name}: {model.numel:,} against {row.published:.6g} ({off:+.2%}); {row.source}"
    )
    assert model.units[0].name == "(root)"
    names = [p.name for u in model.units for p in u.parameters]
    assert len(names) == len(set(names))


def _config(family: str, dims: Transformer) -> Any:
    import transformers

    grouped = {"num_key_value_heads": dims.kv_heads or dims.heads, "intermediate_size": dims.ffn}
    llama = {
        "vocab_size": dims.vocab,
        "hidden_size": dims.hidden,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "tie_word_embeddings": dims.tied,
        **grouped,
    }
    if family == "llama":
        return transformers.LlamaConfig(**llama)
    if family == "mixtral":
        return transformers.MixtralConfig(
            **llama, num_local_experts=dims.experts, num_experts_per_tok=dims.active
        )
    if family == "deepseek_v3":
        return transformers.DeepseekV3Config(
            **llama | {"intermediate_size": dims.dense_ffn},
            moe_intermediate_size=dims.ffn,
            n_routed_experts=dims.experts,
            num_experts_per_tok=dims.active,
            n_shared_experts=dims.shared,
            first_k_dense_replace=dims.dense_layers,
            q_lora_rank=dims.q_rank,
            kv_lora_rank=dims.kv_rank,
            qk_rope_head_dim=dims.rope,
            qk_nope_head_dim=dims.head - dims.rope,
            v_head_dim=dims.value_dim,
        )
    if family == "bloom":
        return transformers.BloomConfig(
            vocab_size=dims.vocab, hidden_size=dims.hidden, n_layer=dims.layers, n_head=dims.heads
        )
    return transformers.GPT2Config(
        vocab_size=dims.vocab,
        n_embd=dims.hidden,
        n_layer=dims.layers,
        n_head=dims.heads,
        n_positions=dims.seq,
        n_inner=dims.ffn,
    )


@with_transformers
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "gpt2-xl",
        "llama-2-7b",
        "llama-2-70b",
        "llama-3-8b",
        "llama-3.2-1b",
        "mixtral-8x7b",
        "bloom",
        "deepseek-v3",
    ],
)
def test_the_parameters_are_those_of_the_real_module_unit_by_unit(name: str) -> None:
    import transformers

    from onefold.runtime.units import find_units

    row = shapes.find(name)
    if row.family in ("mixtral", "deepseek_v3") and int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("transformers 4 keeps each expert in matrices of its own; the table follows 5")
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        module = transformers.AutoModelForCausalLM.from_config(_config(row.family, row.dims))
    real = {
        spec.name or "(root)": sorted((f.names[0], tuple(f.param.shape)) for f in spec.found)
        for spec in find_units(module, None)
    }
    ours = {
        u.name: sorted((p.name, p.shape) for p in u.parameters) for u in architecture(name).units
    }
    assert list(ours) == list(real)
    assert ours == real
    embedding = {u.name for u in architecture(name).units if u.looks_up_only}
    assert embedding == {
        n for n in real if n != "(root)" and type(module.get_submodule(n)) is torch.nn.Embedding
    }
