"""Tiny models of transformers, the folders that it saves of them, and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TEXT = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "intermediate_size": 32, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
MOE = {
    **TEXT,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_experts": 3,
    "num_experts_per_tok": 1,
}
#: name: (model class, configuration class, its arguments)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**TEXT, "tie_word_embeddings": False}),
    "llama, tied": ("LlamaForCausalLM", "LlamaConfig", {**TEXT, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
             "bos_token_id": 1, "eos_token_id": 2}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**TEXT, "num_local_experts": 3, "num_experts_per_tok": 1}),
    "qwen2 moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", MOE),
    "bert": ("BertForMaskedLM", "BertConfig", {k: v for k, v in TEXT.items() if k not in ("num_key_value_heads", "head_dim")}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {k: v for k, v in TEXT.items() if k not in ("num_key_value_heads", "head_dim")}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2,
           "num_heads": 2, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}),
    "vit": ("ViTForImageClassification", "ViTConfig", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 32, "image_size": 16, "patch_size": 4, "num_labels": 3}),
}  # fmt: skip
TRAINED = ("llama", "llama, tied", "gpt2", "mixtral")
TOKENS = torch.arange(14).reshape(2, 7)


def build(family: str) -> Any:
    import transformers

    kind, config, options = FAMILIES[family]
    return getattr(transformers, kind)(getattr(transformers, config)(**options))


def on_meta(family: str) -> Any:
    with torch.device("meta"):
        return build(family)


def opened(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    return getattr(transformers, FAMILIES[family][0]).from_pretrained(str(folder), dtype=dtype)


def files(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {
        key: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for key, tensor in load_file(file).items()
    }


def differences(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    """Names, dtypes, shapes and bits."""
    problems = [f"only one side has {name}" for name in expected.keys() ^ actual.keys()]
    for name in expected.keys() & actual.keys():
        a, b = expected[name], actual[name]
        if a.dtype != b.dtype or not torch.equal(a, b):
            problems.append(
                f"{name}: expected {a.dtype} {tuple(a.shape)}, got {b.dtype} {tuple(b.shape)}, or"
                " other values"
            )
    return problems


def complaint(act: Callable[[], object]) -> str:
    from onefold.checkpoint.errors import CheckpointError

    try:
        act()
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


#: For plans of tensor and expert parallelism: heads and experts that 4 ranks can divide.
DIVISIBLE = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 4, "intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
             "eos_token_id": 2, "tie_word_embeddings": False}  # fmt: skip


def divisible(kind: str, **options: Any) -> Any:
    """A model of `kind`, "Llama" for LlamaForCausalLM, with noise in each weight, also in norms."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**DIVISIBLE | options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return model
