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


def digits(completion_ids: Any, **_: Any) -> list[float]:
    """A reward that differs where most tokens have no text."""
    return [float(sum(ids) % 5) for ids in completion_ids]


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
        "distillation": [{"prompt": sentence(i, 3)} for i in range(32)],
        "kto": [
            {"prompt": sentence(i, 3), "completion": " " + sentence(100 + i), "label": i % 2 == 0}
            for i in range(32)
        ],
    }
    return Dataset.from_list(rows[kind])


def on_disk(rows: Any, place: str) -> Any:
    """The same, where all ranks find what is computed from it."""
    import torch.distributed as dist
    from datasets import load_from_disk

    if dist.get_rank() == 0 and not Path(place).exists():
        rows.save_to_disk(place)
    dist.barrier()
    return load_from_disk(place)


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
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "distillation": (trl.DistillationTrainer, trl.DistillationConfig),
    }
    trainer_class, config_class = classes[kind]
    more: dict[str, Any] = {"sft": {"max_length": 16}, "dpo": {"max_length": 24}}.get(kind, {})
    if kind == "distillation":
        more = {"max_completion_length": 8, "temperature": 1.0}
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
    rows = on_disk(data(kind), f"{folder}/{kind} data") if case.get("on_disk") else data(kind)
    options: dict[str, Any] = {"train_dataset": rows, "processing_class": tokenizer()}
    if kind == "grpo":
        options["reward_funcs"] = digits if case.get("digits") else lengths
    if kind == "distillation":
        options["teacher_model"] = built(f"{folder}/teacher")
    if recipe is not None:
        options["recipe"] = recipe
        trainer_class = type("Tuner", (onefold.hf.TrainerMixin, trainer_class), {})
    trainer = trainer_class(model, args=args, **options)
    trainer.train()
    return trainer


def large_heads(folder: str) -> None:
    """Write a model whose head has weights of its own, larger than any block (a unit), to
    `folder`/model, and another one to `folder`/teacher/model. Collective.
    """
    import torch
    import torch.distributed as dist
    import trainer_script
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{**trainer_script.CONFIG, "tie_word_embeddings": False, "vocab_size": 8192}
    )
    if dist.get_rank() == 0:
        for seed, place in enumerate((folder, f"{folder}/teacher")):
            torch.manual_seed(seed)
            LlamaForCausalLM(config).save_pretrained(f"{place}/model")
    dist.barrier()


def runs_with_large_heads(cases: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """The runs of `runs`, of models of `large_heads`; with the units of the trained model."""
    from hf_trials import fresh_state, seen_of, start

    import onefold

    start(folder)
    large_heads(f"{folder}/large")
    out: dict[str, Any] = {}
    for case in cases:
        with fresh_state():
            trainer = trained(f"{folder}/large", case)
            out[case["name"]] = seen_of(trainer)
            if case.get("recipe") is not None:
                units = onefold.engine_of(trainer.model).units
                out[case["name"]]["units"] = [unit.name for unit in units]
    return out


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


def runs_under_the_name(cases: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """The same with `deepspeed` served in the process; `stage` in a case makes it DeepSpeed's by
    name. `untied` takes a model of `large_heads`.
    """
    import onefold.deepspeed

    onefold.deepspeed.serve()
    from hf_trials import fresh_state, seen_of, start
    from trainer_trials import ds
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    start(folder)
    large_heads(f"{folder}/untied")
    out: dict[str, Any] = {}
    for case in cases:
        given = {**case, "arguments": dict(case.get("arguments", {}))}
        if case.get("stage"):
            given["arguments"]["deepspeed"] = ds(case["stage"])
        unset_hf_deepspeed_config()  # the former run's, as long as its trainer is there
        with fresh_state():
            trainer = trained(f"{folder}/untied" if case.get("untied") else folder, given)
            out[case["name"]] = seen_of(trainer)
            other = getattr(trainer, "ref_model", None)
            out[case["name"]]["types"] = [
                type(trainer.model_wrapped).__name__,
                type(other).__name__,
            ]
    return out
