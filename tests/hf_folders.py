"""Hugging Face folders of tiny models, jobs that train them, and the memory that takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from onefold.train.config import resolve

MIB = 1 << 20

from promises.formulas import give_memory_back_at_once, peak_resident, reset_peak, resident
from tiny_transformers import TEXT, differences, files

__all__ = [
    "FOLDERS",
    "JOB",
    "LARGE",
    "MIB",
    "SMALL",
    "differences",
    "files",
    "give_memory_back_at_once",
    "job",
    "peak_resident",
    "reset_peak",
    "resident",
    "saved",
]  # fmt: skip


#: The tokenizer of bytes has 257 tokens.
SMALL = {**TEXT, "vocab_size": 257, "max_position_embeddings": 64}
#: {folder: (model class, configuration class, its arguments, dtype in the files, bytes in a file)}
FOLDERS: dict[str, tuple[str, str, dict[str, Any], torch.dtype, str]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "tie_word_embeddings": True},
              torch.float32, "1GB"),
    "files": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "tie_word_embeddings": False},
              torch.bfloat16, "12KB"),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig",
                {**SMALL, "num_local_experts": 3, "num_experts_per_tok": 1}, torch.float32, "1GB"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config",
             {"vocab_size": 257, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64,
              "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, torch.float32, "1GB"),
}  # fmt: skip
JOB: dict[str, Any] = {
    "tokenizer": "bytes", "seq": 32, "steps": 2, "eval_every": 0, "lr": 1e-3, "micro_batch": 2,
    "global_batch": 4, "device": "cpu", "precision": "fp32",
}  # fmt: skip


def saved(root: Path, name: str) -> Path:
    """A folder that `save_pretrained` makes, with a generation configuration of its own."""
    import transformers

    kind, config, options, dtype, limit = FOLDERS[name]
    torch.manual_seed(len(name))
    model: Any = getattr(transformers, kind)(getattr(transformers, config)(**options))
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    model.generation_config.no_repeat_ngram_size = 9
    model.to(dtype).save_pretrained(root / name, max_shard_size=limit)
    return root / name


def job(folder: Path, **more: Any) -> Any:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return resolve({**JOB, "model": str(folder), "data": str(folder / "text.txt"), **more})


#: A model of 25 million parameters: 96 MiB in fp32, on 2 ranks a shard of 48.
LARGE = {
    **SMALL, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
