"""Trains adapters of peft in a loop of accelerate, as peft's guide to accelerate writes it.

accelerate launch --num_processes 2 lora_loop.py --model M --data train.jsonl --output O
"""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    get_linear_schedule_with_warmup,
)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()

    # Ranks on the host need to be told their backend
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    set_seed(42)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, inference_mode=False, r=8, lora_alpha=32, lora_dropout=0.1
    )
    model = get_peft_model(model, config)

    with accelerator.main_process_first():
        rows = load_dataset("json", data_files=args.data, split="train").map(
            lambda row: tokenizer(row["text"], truncation=True, max_length=48),
            remove_columns=["text"],
        )
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    train = DataLoader(rows, shuffle=True, batch_size=1, collate_fn=collate)
    evaluated = DataLoader(rows.select(range(4)), batch_size=1, collate_fn=collate)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, args.steps * accelerator.num_processes)
    model, train, evaluated, optimizer, schedule = accelerator.prepare(
        model, train, evaluated, optimizer, schedule
    )

    losses, rates = [], []
    model.train()
    for batch, _ in zip(train, range(args.steps), strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())

    model.eval()
    seen = []
    for batch in evaluated:
        with torch.no_grad():
            loss = model(**batch).loss
        seen += accelerator.gather_for_metrics(loss.reshape(1)).tolist()

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        args.output, state_dict=accelerator.get_state_dict(model)
    )
    if accelerator.is_main_process:
        with open(f"{args.output}/seen.json", "w") as out:
            kind = type(model).__name__
            json.dump({"loss": losses, "rate": rates, "eval": seen, "kind": kind}, out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
