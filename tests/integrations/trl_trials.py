"""Runs of TRL's trainers with onefold.hf's mixin on the ranks of a test, beside themselves under
DDP.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

WORDS = [f"w{i}" for i in range(60)]


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(
        WordLevel(
            {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])},
            unk_token="<unk>",
        )
    )
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sentence(seed: int, length: int = 6) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=length + seed % 4))


def lengths(completions: Any, **_: Any) -> list[float]:
    """A reward."""
    return [float(len(text.split()) % 5) for text in completions]


def data(kind: str) -> Any:
    from datasets import Dataset

    rows = {
        "sft": [{"text": sentence(i)} for i in range(32)],
        "dpo": [
            {
                "prompt": sentence(i, 3),
                "chosen": " " + sentence(100 + i),
                "rejected": " " + sentence(200 + i),
            }
            for i in range(32)
        ],
        "reward": [{"chosen": sentence(100 + i), "rejected": sentence(200 + i)} for i in range(32)],
        "grpo": [{"prompt": sentence(i, 3)} for i in range(32)],
    }
    return Dataset.from_list(rows[kind])


def trained(folder: str, case: dict[str, Any]) -> Any:
    """The trainer of one run, after it."""
    import torch
    import trl
    from hf_trials import arguments, built
    from transformers import LlamaForSequenceClassification

    import onefold.hf

    kind, recipe = case["kind"], case.get("recipe")
    classes: dict[str, tuple[Any, Any]] = {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    }
    trainer_class, config_class = classes[kind]
    more: dict[str, Any] = {"sft": {"max_length": 16}, "dpo": {"max_length": 24}}.get(kind, {})
    if kind == "grpo":
        more = {"num_generations": 2, "max_completion_length": 8, "beta": 0.1, "temperature": 1.0}
    given = arguments(folder, case["name"], bf16=False, **more) | case.get("arguments", {})
    args = config_class(**given)
    if kind == "reward":
        model = LlamaForSequenceClassification.from_pretrained(
            Path(folder) / "model", num_labels=1, dtype=torch.float32
        )
        model.config.pad_token_id = 0
    else:
        model = built(folder, case.get("lora", False))
    options: dict[str, Any] = {"train_dataset": data(kind), "processing_class": tokenizer()}
    if kind == "grpo":
        options["reward_funcs"] = lengths
    if recipe is not None:
        options["recipe"] = recipe
        trainer_class = type("Tuner", (onefold.hf.TrainerMixin, trainer_class), {})
    trainer = trainer_class(model, args=args, **options)
    trainer.train()
    return trainer


def runs(cases: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """{name: what the run's logs say}."""
    from hf_trials import fresh_state, seen_of, start

    start(folder)
    out: dict[str, Any] = {}
    for case in cases:
        with fresh_state():
            trainer = trained(folder, case)
            out[case["name"]] = seen_of(trainer)
            other = getattr(trainer, "ref_model", None)
            out[case["name"]]["reference sharded"] = other is not None and hasattr(
                next(other.parameters()), "onefold"
            )
    return out
