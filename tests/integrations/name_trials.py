"""Runs of transformers' trainers on the ranks of a test with `deepspeed` served in the process,
beside themselves under DDP: generation, new tokens, AdaLoRA.
"""

from __future__ import annotations

from typing import Any


def begin(folder: str) -> None:
    """Serve the name, before anything imports transformers."""
    import onefold.deepspeed

    onefold.deepspeed.serve()
    from hf_trials import start

    start(folder)


def every_trial(folder: str) -> dict[str, Any]:
    """All of this file, in one process."""
    begin(folder)
    return {
        "texts": translated(folder, [None, 1, 3]),
        "tokens": with_new_tokens(folder, [None, 3]),
        "adalora": adapted_by_importance(folder, [None, 2, 3]),
    }


def next_run() -> Any:
    """The state of a process that has run nothing yet."""
    from hf_trials import fresh_state
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # the former run's, as long as its trainer is there
    return fresh_state()


def translated(folder: str, stages: list[int | None]) -> dict[str, Any]:
    """Seq2SeqTrainer that generates where it evaluates; then texts of the ranks' own lengths."""
    import torch
    import torch.distributed as dist
    from hf_trials import arguments, seen_of
    from trainer_trials import ds
    from transformers import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )

    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0, eos_token_id=1, pad_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        T5ForConditionalGeneration(config).save_pretrained(f"{folder}/t5")
    dist.barrier()
    rows = []
    for i in range(16):
        ids = torch.randint(2, 64, (10,), generator=torch.Generator().manual_seed(i))
        rows.append({"input_ids": ids, "labels": ids[: 3 + i % 4].tolist() + [1] * (4 - i % 4)})
    out: dict[str, Any] = {}
    for stage in stages:
        with next_run():
            args = Seq2SeqTrainingArguments(
                **arguments(
                    folder, f"seq2seq {stage}", predict_with_generate=True, generation_max_length=8,
                    eval_strategy="steps", eval_steps=2, deepspeed=ds(stage) if stage else None,
                )
            )  # fmt: skip
            texts: list[Any] = []

            def metrics(found: Any, texts: list[Any] = texts) -> dict[str, float]:
                texts.append(found.predictions.tolist())
                return {"sum": float((found.predictions > 1).sum())}

            model = T5ForConditionalGeneration.from_pretrained(f"{folder}/t5")
            model.generation_config.do_sample = True
            trainer = Seq2SeqTrainer(
                model, args, train_dataset=rows, eval_dataset=rows[:6], compute_metrics=metrics
            )
            trainer.train()
            mine = torch.stack([rows[dist.get_rank()]["input_ids"]])
            length = 4 + 3 * dist.get_rank()
            options = {"synced_gpus": True} if stage == 3 else {}
            own = trainer.model.generate(mine, max_new_tokens=length, **options)
            seen = seen_of(trainer)
            out[str(stage)] = seen | {"texts": texts, "own": own.tolist()}
    return out


def with_new_tokens(folder: str, stages: list[int | None]) -> dict[str, Any]:
    """A model that gets more tokens before it is trained, read under `zero.Init`."""
    import torch
    import torch.distributed as dist
    from hf_trials import arguments, seen_of
    from trainer_script import CONFIG, Data
    from trainer_trials import ds
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    if dist.get_rank() == 0:
        untied = LlamaConfig(**{**CONFIG, "tie_word_embeddings": False})
        LlamaForCausalLM(untied).save_pretrained(f"{folder}/untied")
    dist.barrier()
    out: dict[str, Any] = {}
    for stage in stages:
        for kind in ("tied", "tied, mean", "untied"):
            with next_run():
                name = f"{kind} {stage}"
                more = {"deepspeed": ds(stage)} if stage else {}
                args = TrainingArguments(**arguments(folder, name, **more))
                torch.manual_seed(0)
                model = LlamaForCausalLM.from_pretrained(
                    f"{folder}/untied" if kind == "untied" else f"{folder}/model"
                )
                model.resize_token_embeddings(70, mean_resizing="mean" in kind)
                trainer = Trainer(model, args, train_dataset=Data(70))
                trainer.train()
                trainer.save_model(f"{folder}/{name}")
                out[name] = seen_of(trainer) | {
                    "shapes": [tuple(e.weight.shape) for e in (
                        model.get_input_embeddings(), model.get_output_embeddings())]
                }  # fmt: skip
    return out


def adapted_by_importance(folder: str, stages: list[int | None]) -> dict[str, Any]:
    """AdaLoRA, whose ranks are given out by gradients after each step."""
    import torch
    from hf_trials import arguments, seen_of
    from peft import AdaLoraConfig, get_peft_model
    from trainer_script import Data
    from trainer_trials import ds
    from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Allocates(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            given["model"].base_model.update_and_allocate(state.global_step)

    out: dict[str, Any] = {}
    for stage in stages:
        with next_run():
            more = {"deepspeed": ds(stage)} if stage else {}
            args = TrainingArguments(
                **arguments(folder, f"adalora {stage}", max_steps=8, learning_rate=3e-2, **more)
            )
            model = LlamaForCausalLM.from_pretrained(f"{folder}/model")
            torch.manual_seed(0)
            config = AdaLoraConfig(
                init_r=4, target_r=2, tinit=1, tfinal=2, deltaT=1, total_step=8,
                target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM",
            )  # fmt: skip
            model = get_peft_model(model, config)
            trainer = Trainer(model, args, train_dataset=Data(), callbacks=[Allocates()])
            trainer.train()
            trainer.save_model(f"{folder}/adalora {stage}")
            out[str(stage)] = seen_of(trainer) | {
                "ranks": model.peft_config["default"].rank_pattern
            }
    return out
