"""Imported by the fork server "libraries": what tools bring along, so that no rank of a test that
uses them pays for its import.
"""

from __future__ import annotations

import contextlib
import importlib

#: Those that models of tests are made of.
ARCHITECTURES = (
    "albert", "bart", "bert", "bloom", "clip", "convnext", "deberta_v2", "gemma2", "gpt2", "gpt_neox", "llama", "mamba", "mixtral",
    "phi3", "qwen3", "resnet", "t5", "vit", "wav2vec2", "whisper",
)  # fmt: skip
NAMES = (
    "onefold.train.worker", "accelerate", "datasets", "gguf", "lightning.pytorch", "peft", "tokenizers", "torchao.optim", "transformers",
    "transformers.trainer", "transformers.trainer_seq2seq", "transformers.generation", "trl", "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer", "trl.trainer.reward_trainer", "trl.trainer.sft_trainer",
    *(f"transformers.models.{name}.modeling_{name}" for name in ARCHITECTURES),
    "onefold.hf", "onefold.lightning",
)  # fmt: skip

for _name in NAMES:
    with contextlib.suppress(ImportError):  # met again by the test that needs it
        importlib.import_module(_name)
