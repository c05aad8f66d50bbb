"""Runs of other libraries' trainers on the ranks of a test: under DDP, by Onefold's own way in, and
with the name deepspeed served. They train on the host in fp32, four steps unless told otherwise.

Ranks import this file where tests run, not where they are collected: it imports accelerate.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.runtime.hooks import is_sharded
from reference import built
from zoo import tokens_of

LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": True,
}  # fmt: skip
SAVES = {"save_strategy": "steps", "save_steps": 2}
_numbers = itertools.count()


@dataclass
class Seen:
    """What a run came to. `trainer` is the library's; `weights` is what it saved."""

    losses: list[float]
    evaluated: list[float]
    rates: list[float]
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    trainer: Any = None


def launched() -> None:
    """Set the environment as torchrun would."""
    world = str(dist.get_world_size())
    os.environ |= {
        "RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "tests",
    }  # fmt: skip


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """As in a process that a launcher has started and that has run nothing yet: accelerate and
    transformers keep what they know in globals.
    """
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    launched()
    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    yield
    dist.barrier()


def tokens(words: int = 64) -> list[dict[str, Tensor]]:
    rows = [tokens_of(i, 1, 16, words)[0] for i in range(64)]
    return [{"input_ids": row, "labels": row} for row in rows]


def saved(folder: Path, seed: int = 0, **options: Any) -> Path:
    """A folder with a small Llama. Collective."""
    from transformers import LlamaConfig, LlamaForCausalLM

    place = folder / f"model {seed} {'-'.join(map(str, options.values()))}".strip()
    if dist.get_rank() == 0 and not place.exists():
        config = LlamaConfig(**{**LLAMA, **options})
        built(lambda: LlamaForCausalLM(config), seed).save_pretrained(place)
    dist.barrier()
    return place


def opened(place: Path, lora: Any = None, meta: bool = False, seed: int = 0) -> Any:
    """The model of a folder, without memory if `meta`. `lora`: True for adapters, or options of
    their configuration; "tokens" among them is another number of tokens.
    """
    import transformers

    import onefold.hf

    if meta:
        model = onefold.hf.from_pretrained(str(place), dtype=torch.float32)
        assert all(p.is_meta for p in model.parameters())
    else:
        model = transformers.LlamaForCausalLM.from_pretrained(place, dtype=torch.float32)
    if not lora:
        return model
    import peft

    more = {} if lora is True else dict(lora)
    torch.manual_seed(seed)
    if number := more.pop("tokens", None):
        model.resize_token_embeddings(number, mean_resizing=False)
        torch.manual_seed(seed)  # transformers draws other numbers at stage 3
    given = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **more}
    return peft.get_peft_model(model, peft.LoraConfig(**given))


def arguments(folder: Path, kind: Any = None, **more: Any) -> Any:
    """TrainingArguments, or those of another `kind`, with a folder of their own."""
    import transformers

    given = {
        "output_dir": str(folder / f"run-{next(_numbers)}"), "use_cpu": True, "per_device_train_batch_size": 2,
        "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "disable_tqdm": True, "seed": 1, "max_steps": 4,
        "save_strategy": "no",
    }  # fmt: skip
    return (kind or transformers.TrainingArguments)(**{**given, **more})


def with_recipe(kind: Any, recipe: Any) -> tuple[Any, dict[str, Any]]:
    """The trainer's class with Onefold's mixin, and what it is given; itself under DDP without a
    recipe.
    """
    import onefold.hf

    if recipe is None:
        return kind, {}
    return type(kind.__name__, (onefold.hf.TrainerMixin, kind), {}), {"recipe": recipe}


def by_json(stage: int | None, offload: bool = False, **more: Any) -> dict[str, Any]:
    """The argument `deepspeed` for a stage, as transformers' documentation prints it; {} for DDP."""
    if stage is None:
        return {}
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "reduce_bucket_size": "auto"}
    if offload:
        zero["offload_optimizer"] = zero["offload_param"] = {"device": "cpu"}
    auto = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
    )  # fmt: skip
    return {"deepspeed": {**auto, "zero_optimization": zero, "steps_per_print": 1e9, **more}}


def seen(trainer: Any, save: bool = False) -> Seen:
    """What a Trainer of transformers or TRL has logged, and what it saves now."""
    from safetensors.torch import load_file

    logs, weights = trainer.state.log_history, {}
    if save:
        trainer.save_model(place := f"{trainer.args.output_dir}/saved")
        dist.barrier()
        (file,) = Path(place).glob("*.safetensors")
        weights = load_file(file)
    names = ("loss", "eval_loss", "learning_rate", "grad_norm")
    return Seen(*([r[n] for r in logs if n in r] for n in names), weights, trainer)


def trained(
    folder: Path, recipe: Any = None, *, model: Any = None, resume: Any = None, lora: Any = None, meta: bool = False,
    seed: int = 0, options: Any = None, save: bool = False, **given: Any,
) -> Seen:  # fmt: skip
    """A run of transformers' Trainer. `given` are TrainingArguments, `options` what Trainer itself
    takes.
    """
    import transformers

    with fresh():
        args = arguments(folder, **given)
        kind, more = with_recipe(transformers.Trainer, recipe)
        data = {"train_dataset": tokens(), "eval_dataset": tokens()}
        if model is None:
            model = opened(saved(folder), lora, meta, seed)
        trainer = kind(model, args, **{**data, **(options or {})}, **more)
        trainer.train(resume_from_checkpoint=resume and str(resume))
        assert is_sharded(trainer.model) == (recipe is not None or bool(given.get("deepspeed")))
        return seen(trainer, save)


def checkpoint(run: Seen, step: int = 2) -> Path:
    return Path(run.trainer.args.output_dir, f"checkpoint-{step}")


# -- TRL -------------------------------------------------------------------------------------------

WORDS = [f"w{i}" for i in range(60)]
#: {kind: (its class and that of its arguments, what these have, the columns of its data)}
TRL: dict[str, tuple[str, dict[str, Any], str]] = {
    "sft": ("SFT", {"max_length": 16}, "text"),
    "dpo": ("DPO", {"max_length": 24}, "prompt chosen rejected"),
    "reward": ("Reward", {}, "chosen rejected"),
    "kto": ("KTO", {}, "prompt completion label"),
    "distillation": ("Distillation", {"max_completion_length": 8, "temperature": 1.0}, "prompt"),
    "grpo": (
        "GRPO",
        {"num_generations": 2, "max_completion_length": 8, "beta": 0.1, "temperature": 1.0},
        "prompt",
    ),
}


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def texts(columns: str) -> Any:
    from datasets import Dataset

    def cell(column: str, row: int) -> Any:
        if column == "label":
            return row % 2 == 0
        length = 3 if column == "prompt" else 6
        seed = row + {"chosen": 100, "completion": 100, "rejected": 200}.get(column, 0)
        words = " ".join(random.Random(seed).choices(WORDS, k=length + seed % 4))
        # A completion begins with the space behind its prompt
        return words if column in ("text", "prompt") or "prompt" not in columns else f" {words}"

    return Dataset.from_list([{c: cell(c, row) for c in columns.split()} for row in range(32)])


def reward(completion_ids: Any, **_: Any) -> list[float]:
    """It differs where most tokens have no text."""
    return [float(sum(ids) % 5) for ids in completion_ids]


def tuned(
    folder: Path, kind: str, recipe: Any = None, *, lora: Any = None, large: bool = False, mixin: Any = None,
    **given: Any,
) -> Seen:  # fmt: skip
    """A run of a trainer of TRL. `large`: the head has weights of its own, larger than any block, so
    that it is a unit. `mixin`: attributes of the trainer's class.
    """
    import transformers
    import trl

    name, more, columns = TRL[kind]
    with fresh():
        args = arguments(folder, getattr(trl, f"{name}Config"), **{"bf16": False, **more, **given})
        untied = {"tie_word_embeddings": False, "vocab_size": 8192} if large else {}
        place = saved(folder, **untied)
        if kind == "reward":
            torch.manual_seed(0)  # its head is drawn
            made: Any = transformers.LlamaForSequenceClassification.from_pretrained(
                place, num_labels=1, dtype=torch.float32
            )
            made.config.pad_token_id = 0
        else:
            made = opened(place, lora)
        options: dict[str, Any] = {"train_dataset": texts(columns), "processing_class": tokenizer()}
        if kind == "grpo":
            options["reward_funcs"] = reward
        if kind == "distillation":
            options["teacher_model"] = opened(saved(folder, 1, **untied))
        host, ours = with_recipe(getattr(trl, f"{name}Trainer"), recipe)
        trainer = type(name, (host,), mixin or {})(made, args=args, **options, **ours)
        trainer.train()
        return seen(trainer)
