"""A training script of transformers' Trainer, as users write it: it knows nothing of Onefold.

python trainer_script.py '{"folder": ..., "deepspeed": {...} or null, ...}'

Rank 0 writes what it saw to `folder`/`name`.json.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}


class Data(torch.utils.data.Dataset):
    def __init__(self, tokens=64):
        self.tokens = tokens

    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, self.tokens, (16,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def made():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def with_adapters(model, asked, seed=0):
    """The model with LoRA; `asked`: True, or what its configuration has besides, and with "tokens"
    another number of tokens.
    """
    from peft import LoraConfig, get_peft_model

    more = {} if asked is True else dict(asked)
    torch.manual_seed(seed)
    if tokens := more.pop("tokens", None):
        model.resize_token_embeddings(tokens, mean_resizing=False)
        torch.manual_seed(seed)  # transformers draws other numbers at stage 3
    given = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **more}
    return get_peft_model(model, LoraConfig(**given))


def main(asked):
    folder = Path(asked["folder"])
    arguments = TrainingArguments(
        output_dir=str(folder / asked["name"]),
        deepspeed=asked.get("deepspeed"),
        use_cpu=True,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=1,
        **{"max_steps": 4, "save_strategy": "no", **asked.get("arguments", {})},
    )
    if asked.get("from_pretrained"):
        model = LlamaForCausalLM.from_pretrained(folder / "model")
    else:
        model = made()
    if asked.get("lora"):
        model = with_adapters(model, asked["lora"], asked.get("seed", 0))
    trainer = Trainer(model=model, args=arguments, train_dataset=Data(), eval_dataset=Data())
    trainer.train(resume_from_checkpoint=asked.get("resume"))
    logs = trainer.state.log_history
    out = {
        "losses": [row["loss"] for row in logs if "loss" in row],
        "norms": [row["grad_norm"] for row in logs if "grad_norm" in row],
        "rates": [row["learning_rate"] for row in logs if "learning_rate" in row],
        "eval": [row["eval_loss"] for row in logs if "eval_loss" in row],
        "type": type(trainer.model_wrapped).__name__,
        "skipped": getattr(trainer.model_wrapped, "skipped_steps", 0),
        "scale": getattr(trainer.model_wrapped, "cur_scale", 1.0),
    }
    if asked.get("save"):
        trainer.save_model(str(folder / asked["save"]))
    if trainer.args.process_index == 0:
        (folder / f"{asked['name']}.json").write_text(json.dumps(out))
    if torch.distributed.is_initialized() and not asked.get("keep_group"):
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
