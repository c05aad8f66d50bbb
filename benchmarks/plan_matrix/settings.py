"""The matrix: three architectures of a few million parameters, and what varies."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

ARCHITECTURES = ("gpt2", "llama", "mixtral")
VOCABULARY = 2048


@dataclass(frozen=True)
class Cell:
    """One setting: samples of `seq` tokens a micro-batch, micro-batches in a step of a rank."""

    architecture: str
    ranks: int
    stage: int
    precision: str
    accumulation: int
    checkpointing: str
    micro_batch: int = 2
    seq: int = 64

    def __str__(self) -> str:
        return (
            f"{self.architecture}, {self.ranks} ranks, stage {self.stage}, {self.precision},"
            f" accumulation {self.accumulation}, checkpointing {self.checkpointing}"
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary that `Cell(**d)` reads back."""
        return asdict(self)


def cells(
    architectures: Iterable[str] = ARCHITECTURES,
    ranks: Iterable[int] = (1, 2, 4),
    precisions: Iterable[str] = ("fp32", "bf16"),
    accumulations: Sequence[int] = (1, 4),
    checkpointing: Sequence[str] = ("none", "full"),
) -> list[Cell]:
    """The product, stages innermost."""
    product = itertools.product(
        architectures, ranks, precisions, accumulations, checkpointing, (0, 1, 2, 3)
    )
    return [Cell(a, n, stage, p, k, c) for a, n, p, k, c, stage in product]


def by_setting(part: Iterable[Cell]) -> list[list[Cell]]:
    """Cells that differ in their stage alone, together."""
    out: dict[Cell, list[Cell]] = {}
    for cell in part:
        out.setdefault(replace(cell, stage=0), []).append(cell)
    return list(out.values())


def build(architecture: str) -> nn.Module:
    """The model with the same weights on every rank: causal language models of transformers, from
    configs of our own.

    Raises:
        ValueError: an architecture that is not in `ARCHITECTURES`.
    """
    import transformers

    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    common = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1}
    decoder = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    decoder |= {"tie_word_embeddings": False, **common}
    if architecture == "gpt2":
        size = {"n_embd": 192, "n_layer": 6, "n_head": 4, "n_positions": 256}
        drops = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **drops, **common))
    if architecture == "llama":
        size = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 6}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **decoder))
    if architecture == "mixtral":
        size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
        size |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**size, **decoder))
    raise ValueError(f"architecture {architecture!r}: expected one of {', '.join(ARCHITECTURES)}.")


def batch(cell: Cell, samples: int, seed: int) -> dict[str, torch.Tensor]:
    """Token ids and labels, [samples, seq]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (samples, cell.seq), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}
